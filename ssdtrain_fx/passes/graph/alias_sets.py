"""Alias sets: which nodes of a graph share a storage.

The answer comes from the FakeTensors in ``node.meta["val"]``, so views, ``getitem`` and multi-output ops need no list
of ops. Two cases need more than that:

* A recomputed node has the same FakeTensor as its original, but at run time it allocates a separate storage. So a node
  shares a storage only with its *inputs*; otherwise it allocates a new one.
* When a rewrite replaces the input of a view (equal expressions are merged, a saved tensor is reloaded), the view's
  FakeTensor still refers to the old storage. Then the op's schema says which argument the result views.

For example:

    base = addmm(...)          # storage 0, allocator
    q    = view(base[...])     # storage 0
    out, stats = norm(q)       # storages 1 and 2, allocated at the tuple, exposed by getitem
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ssdtrain_fx import _torch_private


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Memory that one or more nodes view."""

    idx: int
    allocator: fx.Node
    """The node that allocates it. For a multi-output op, the node whose value is the tuple."""
    members: tuple[fx.Node, ...]
    """Every node whose value is one tensor on this storage, in graph order."""
    holders: tuple[fx.Node, ...]
    """The members, and the tuples that contain some of them, in graph order."""
    size_bytes: int | torch.SymInt

    @property
    def is_input(self) -> bool:
        """True if the caller passes it in: parameters, buffers, user data, tangents."""
        return self.allocator.op in ("placeholder", "get_attr")

    @property
    def hint_bytes(self) -> int:
        """Size for estimates. Raises ValueError when the size depends on data."""
        return _torch_private.size_hint(self.size_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class AliasSets:
    """All storages of a graph, in the order of their allocators."""

    storages: tuple[Storage, ...]
    by_node: Mapping[fx.Node, tuple[int, ...]]
    """Indices of the storages that a node's value holds: one for a tensor, several for a tuple, otherwise none."""

    def of(self, node: fx.Node) -> Storage | None:
        """The storage of a node whose value is one tensor; None for everything else."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        found = self.by_node[node]
        return self.storages[found[0]] if found else None

    def of_copy(self, copy_of: Mapping[fx.Node, fx.Node]) -> AliasSets:
        """The same alias sets for a copy of the graph.

        Args:
            copy_of: maps every node to its copy.
        """

        def copied(nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
            return tuple(copy_of[node] for node in nodes)

        return AliasSets(
            storages=tuple(
                dataclasses.replace(
                    storage,
                    allocator=copy_of[storage.allocator],
                    members=copied(storage.members),
                    holders=copied(storage.holders),
                )
                for storage in self.storages
            ),
            by_node={copy_of[node]: held for node, held in self.by_node.items()},
        )


def find_alias_sets(graph: fx.Graph) -> AliasSets:
    """Group the nodes of ``graph`` by storage. Every node that returns a tensor must have ``meta["val"]``."""
    keys_of: dict[fx.Node, dict[int, int]] = {}
    allocators: list[fx.Node] = []
    sizes: list[int | torch.SymInt] = []
    members: list[list[fx.Node]] = []
    holders: list[list[fx.Node]] = []
    for node in graph.nodes:
        inherited: dict[int, int] = {}
        for source in node.all_input_nodes:
            for key, idx in keys_of[source].items():
                inherited.setdefault(key, idx)
        own: dict[int, int] = {}
        viewed = _viewed_storage(node, keys_of)
        if node.op != "output":
            value = node.meta.get("val")
            for tensor in _strided_tensors(value):
                key = _torch_private.storage_key(tensor)
                if key in own:
                    continue
                idx = inherited.get(key, viewed)
                if idx is None:
                    idx = len(allocators)
                    allocators.append(node)
                    sizes.append(tensor.untyped_storage().nbytes())
                    members.append([])
                    holders.append([])
                own[key] = idx
                holders[idx].append(node)
                if isinstance(value, torch.Tensor):
                    members[idx].append(node)
        keys_of[node] = own
    storages = tuple(
        Storage(
            idx=idx,
            allocator=allocator,
            members=tuple(members[idx]),
            holders=tuple(holders[idx]),
            size_bytes=sizes[idx],
        )
        for idx, allocator in enumerate(allocators)
    )
    return AliasSets(storages=storages, by_node={node: tuple(keys.values()) for node, keys in keys_of.items()})


def storages_of(values: Iterable[object], alias_sets: AliasSets) -> set[int]:
    """Indices of all storages held by the nodes in ``values``."""
    return {idx for value in values if isinstance(value, fx.Node) for idx in alias_sets.by_node[value]}


def find_written_storages(graph: fx.Graph, alias_sets: AliasSets) -> set[int]:
    """Storages that an op mutates. A higher-order op with "mutation" in its name may write any of its inputs."""
    written: set[int] = set()
    for node in graph.nodes:
        if isinstance(node.target, _torch_private.OpOverload):
            schema = node.target._schema
            if schema.is_mutable:
                arguments = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
                for argument in schema.arguments:
                    if argument.alias_info is not None and argument.alias_info.is_write:
                        value = arguments.get(argument.name, node.kwargs.get(argument.name))
                        written |= storages_of(_torch_private.tree_leaves(value), alias_sets)
        elif "mutation" in str(node.target):
            written |= storages_of(node.all_input_nodes, alias_sets)
    return written


def _viewed_storage(node: fx.Node, keys_of: Mapping[fx.Node, Mapping[int, int]]) -> int | None:
    """The storage of the argument that the result views according to the op's schema; None if there is not one."""
    if not isinstance(node.target, _torch_private.OpOverload):
        return None
    schema = node.target._schema
    if schema.is_mutable or not any(result.alias_info is not None for result in schema.returns):
        return None
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, fx.Node) and len(keys_of[value]) == 1:
            return next(iter(keys_of[value].values()))
    return None


def _strided_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The strided tensors in a node's value. Sparse and opaque tensors have no plain storage to move."""
    for leaf in _torch_private.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf
