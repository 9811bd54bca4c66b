"""Let backward make saved storages again, right before it reads them first, instead of saving them.

    before   h = mm(x, w)                       # f32[4096, 4096]  64 MiB  saved for backward
             a = h * h                          #                  64 MiB  saved for backward
             backward_starts()
             gw = mm(gy, a)
             gh = ga * h

    after    h = mm(x, w)
             a = h * h                          # dies in forward
             backward_starts()
             a1 = h * h
             gw = mm(gy, a1)
             gh = ga * h

It comes before the offloads are planned: the new nodes are reads in backward like all others. So whoever calls this
analyses the new graph again. What a recomputation reads (``h``) may be offloaded then, or be made again itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import fx
from torch.fx.node import Argument, map_aggregate, map_arg

from ssdtrain_fx import _torch_private
from ssdtrain_fx._torch_private import FakeTensor
from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.passes.analysis.find_recomputations import Recomputation, is_symbol
from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph

COPY_OF = "ssdtrain_copy_of"
"""Key of the metadata of a node that runs again: names of the original, and of the first member of the storage that it
is for. Only reports read it."""


def insert_recomputations(
    joint: ScheduledJointGraph, alias_sets: AliasSets, recomputations: Sequence[Recomputation]
) -> ScheduledJointGraph:
    """Rewrite ``joint.gm`` in place, and return it with what is saved now. Without recomputations nothing changes.

    Args:
        alias_sets: of this graph. Both are stale afterwards.
        recomputations: made for this graph. One may read a storage that another one makes.

    Raises:
        InternalError: two recomputations make the same storage, or nothing in backward reads it.
    """
    if not recomputations:
        return joint
    if len({recomputation.storage_idx for recomputation in recomputations}) < len(recomputations):
        raise InternalError("two recomputations make the same storage.")
    for recomputation in recomputations:
        first = alias_sets.storages[recomputation.storage_idx].members[0]
        # Inductor: as if it were still returned for backward, or its readers may get it in another layout. Copies
        # inherit it: to backward they are what a saved tensor was.
        first.meta[_torch_private.REALIZE_TO_STRIDES] = True
    nodes = list(joint.graph.nodes)
    in_backward = set(nodes[nodes.index(joint.marker) + 1 :])
    # What is made last in forward comes first: the nodes that make it again then count as readers of its sources.
    for recomputation in sorted(recomputations, key=lambda one: one.storage_idx, reverse=True):
        on_storage = [node for node in recomputation.nodes if recomputation.storage_idx in alias_sets.by_node[node]]
        readers = {user for node in on_storage for user in node.users if user in in_backward}
        if not readers:
            raise InternalError(f"nothing in backward reads storage {recomputation.storage_idx} ({on_storage}).")
        with joint.graph.inserting_before(min(readers)):  # nodes compare by their place in the graph
            copies = copy_nodes(joint.graph, recomputation.nodes, alias_sets)
        made = alias_sets.storages[recomputation.storage_idx].members[0].name
        for node, copy in copies.items():
            copy.meta[COPY_OF] = (node.name, made)
        in_backward.update(copies.values())
        for node in on_storage:
            for user in readers.intersection(node.users):
                user.replace_input_with(node, copies[node])
        erase_unread(copies.values())
    made_in_forward = {node for recomputation in recomputations for node in recomputation.nodes}
    erase_unread(node for node in nodes if node in made_in_forward)
    joint.gm.recompile()
    return dataclasses.replace(joint, saved=find_saved(joint))


def copy_nodes(graph: fx.Graph, nodes: Iterable[fx.Node], alias_sets: AliasSets) -> dict[fx.Node, fx.Node]:
    """Copies at the insertion point that read each other, and otherwise what the originals read."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copy = graph.node_copy(node, lambda source: copies.get(source, source))
        copy.meta = dict(node.meta)
        copy.meta["val"] = _fake_copy(node, copy, alias_sets)
        copies[node] = copy
    return copies


def _fake_copy(node: fx.Node, copy: fx.Node, alias_sets: AliasSets) -> object:
    """The value of a copy: on the storage of its argument when it is a view, otherwise on one of its own."""
    inherited = {idx for source in node.all_input_nodes for idx in alias_sets.by_node[source]}
    if inherited.issuperset(alias_sets.by_node[node]):
        return fake_result(copy)
    return map_aggregate(node.meta["val"], _like)


def fake_result(node: fx.Node) -> object:
    """Run the node on the values that its arguments have now."""
    values = [leaf for source in node.all_input_nodes for leaf in _torch_private.tree_leaves(source.meta["val"])]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    assert callable(node.target)
    with mode:
        return node.target(*map_arg(node.args, _value_of), **map_arg(node.kwargs, _value_of))


def _like(value: Argument) -> Argument:
    """A fake tensor of the same layout on a new storage."""
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _value_of(node: fx.Node) -> Argument:
    return node.meta["val"]


def erase_unread(nodes: Iterable[fx.Node]) -> None:
    """Drop what nobody reads. ``nodes`` are functional, and in graph order."""
    for node in reversed(list(nodes)):
        if not node.users:
            node.graph.erase_node(node)


def find_saved(joint: ScheduledJointGraph) -> tuple[fx.Node, ...]:
    """What backward reads of forward, in the order that ``split`` gives it; and all symbols that were saved."""
    nodes = list(joint.graph.nodes)
    boundary = nodes.index(joint.marker)
    in_backward = set(nodes[boundary + 1 : -1])
    gradients = {node for node in joint.gradients if isinstance(node, fx.Node)}
    forward = [node for node in nodes[:boundary] if node.op != "get_attr" and node not in joint.backward_inputs]
    read = dict.fromkeys(node for node in forward if node in gradients or not in_backward.isdisjoint(node.users))
    values = [node for node in joint.saved if not is_symbol(node) and node in read]
    symbols = [node for node in joint.saved if is_symbol(node)]
    known = {*joint.saved}
    new = [node for node in read if node not in known]
    return (
        *(node for node in new if not is_symbol(node)),
        *values,
        *symbols,
        *(node for node in new if is_symbol(node)),
    )
