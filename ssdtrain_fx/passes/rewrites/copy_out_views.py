"""Save a copy of a small view, if saving the view itself would keep a large storage until backward.

    before   h = addmm(...)               # f32[8, 197, 384]  2.3 MiB
             token = select(h, 1, 0)      # f32[8, 384], a view: saving it for backward keeps h
             backward_starts()
             gw = mm(gy, token)

    after    h = addmm(...)
             token1 = lift_fresh_copy(select(h, 1, 0))   # 12 KiB
             token = select(h, 1, 0)      # h dies after its last read in forward
             backward_starts()
             gw = mm(gy, token1)

The copy is made right after the storage is allocated. The storage is complete there, because no op writes to it later.
A copy right after the view could be too late, because views that only backward reads are at the end of forward.

The copy keeps the order of the view's strides, so every view of the view can also be taken from the copy.

Only matrix products may read the view in backward. They bring their arguments into blocks of their own, so the layout
does not matter. Elsewhere it changes bits: the loop over a dense copy has one dimension where the loop over a view has
two, so ``sum`` adds in another order, and ``sigmoid`` or ``gelu`` is computed by vector code for other elements. With
Inductor, this holds for every op that is fused with a reduction: ``sum(mul(gy, token))``, the gradient of a scale.

It is a ``lift_fresh_copy`` and no ``clone``: Inductor drops a clone that has the strides of its argument, whatever
storage that lies on. The storage would then live on, against the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.analysis.candidates import Candidate, base_of, find_candidates, view_path
from ssdtrain_fx.passes.analysis.chains import find_activations
from ssdtrain_fx.passes.graph.alias_sets import AliasSets, find_alias_sets, find_written_storages, storages_of
from ssdtrain_fx.passes.graph.copy_nodes import copy_nodes, erase_unread, fake_result
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, find_saved

COPY = torch.ops.aten.lift_fresh_copy.default
_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("addmm", "baddbmm", "bmm", "mm"))
MIN_PARTS = 4
MIN_SAVED_BYTES = 1 << 16
"""A guess: below this size, an additional kernel does not pay off."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """A saved view to copy, and the saved views that can be taken from the copy."""

    path: Sequence[fx.Node]
    """From the first tensor of the storage to the view that is copied, which is the last node."""
    taken: list[fx.Node]
    """The other saved views that can be taken from the copied one."""


def copy_out_views(
    joint: ScheduledJointGraph,
    *,
    min_tensor_bytes: int,
    min_parts: int = MIN_PARTS,
    min_saved_bytes: int = MIN_SAVED_BYTES,
) -> ScheduledJointGraph:
    """Rewrite ``joint.gm`` in place, and return ``joint`` with ``saved`` updated. If no copy pays, nothing changes.

    Args:
        min_tensor_bytes: storages smaller than this are no candidates.
        min_parts: copy if the copies of a storage's views take at most this fraction of it: 4 means a quarter ...
        min_saved_bytes: ... and if at least this much memory is freed.
    """
    alias_sets = find_alias_sets(joint.graph)
    candidates = find_candidates(
        joint, alias_sets, min_tensor_bytes=min_tensor_bytes, activations=find_activations(joint)
    )
    held = storages_of((*joint.forward_outputs, *joint.gradients), alias_sets)
    held |= find_written_storages(joint.graph, alias_sets)
    positions = joint.positions()
    marker = positions[joint.marker]
    chosen: list[tuple[Candidate, list[_Copy]]] = []
    for candidate in candidates:
        if candidate.storage.is_input or candidate.storage.idx in held:
            continue
        if not _only_products_read(candidate, positions, marker):
            continue
        copies = _find_copies(candidate, alias_sets, positions)
        if copies and _pays(candidate, copies, min_parts, min_saved_bytes):
            chosen.append((candidate, copies))
    if not chosen:
        return joint
    in_backward = {node for node, position in positions.items() if position > marker}
    for candidate, copies in chosen:
        for copy in copies:
            _insert(joint.graph, candidate, copy, alias_sets, in_backward)
        _update_views_in_backward(candidate, alias_sets, in_backward)
        erase_unread(node for node in candidate.storage.holders if node not in in_backward)
    joint.gm.recompile()
    return dataclasses.replace(joint, saved=find_saved(joint))


def _only_products_read(candidate: Candidate, positions: Mapping[fx.Node, int], marker: int) -> bool:
    """Whether every op of backward that reads the storage, directly or through views, is a matrix product."""
    holders = set(candidate.storage.holders)
    readers = {user for holder in holders for user in holder.users if positions[user] > marker} - holders
    return all(str(reader.target) in _PRODUCTS for reader in readers)


def _find_copies(candidate: Candidate, alias_sets: AliasSets, positions: Mapping[fx.Node, int]) -> list[_Copy] | None:
    """One copy for each saved view that cannot be taken from another. None if a view cannot be copied."""
    storage = candidate.storage
    first = storage.members[0]
    holders = set(storage.holders)
    if any("as_strided" in str(node.target) for node in holders):
        return None  # its offsets refer to the storage, and the layout of a copy is different
    copies: list[_Copy] = []
    copy_for: dict[fx.Node, _Copy | None] = {first: None}
    """For every node on a path so far, the copy from which it can be taken."""
    for node in candidate.saved_nodes:  # in graph order, a view comes after its base
        path = view_path(node, copy_for, storage, alias_sets)
        if path is None:
            return None
        base = base_of(path[0], storage, alias_sets) if path else node
        assert base is not None
        copy = copy_for[base]
        copy_for.update(dict.fromkeys(path, copy))
        if copy is not None:
            copy.taken.append(node)
            continue
        if not _has_no_overlap(node) or type(node.meta["val"]) is not _torch_private.FakeTensor:
            return None
        views = view_path(node, (first,), storage, alias_sets)
        assert views is not None
        symbols = {source for view in views for source in view.all_input_nodes if source not in holders}
        if any(positions[symbol] > positions[first] for symbol in symbols):
            return None
        copy_for[node] = copy = _Copy(path=[first, *views], taken=[])
        copies.append(copy)
    return copies


def _has_no_overlap(node: fx.Node) -> bool:
    """Whether no stride is 0: the copy of an expanded view would be larger. Data-dependent strides count as 0."""
    value: torch.Tensor = node.meta["val"]
    try:
        return all(map(_torch_private.size_hint, value.stride()))
    except ValueError:
        return False


def _pays(candidate: Candidate, copies: Sequence[_Copy], min_parts: int, min_saved_bytes: int) -> bool:
    try:
        size_bytes = candidate.storage.hint_bytes
        copied_bytes = sum(_size_bytes(copy.path[-1]) for copy in copies)
    except ValueError:  # a size depends on data
        return False
    return min_parts * copied_bytes <= size_bytes and size_bytes - copied_bytes >= min_saved_bytes


def _size_bytes(node: fx.Node) -> int:
    value: torch.Tensor = node.meta["val"]
    return _torch_private.size_hint(value.numel()) * value.element_size()


def _insert(
    graph: fx.Graph, candidate: Candidate, copy: _Copy, alias_sets: AliasSets, in_backward: set[fx.Node]
) -> None:
    first, *views = copy.path
    view = copy.path[-1]
    with graph.inserting_before(first.next):
        replayed = copy_nodes(graph, views, alias_sets)
        copied = _copy_in_order(graph, replayed.get(view, view))
    replicas = {view: copied}
    saved = [view, *copy.taken]
    readers = {user for node in saved for user in node.users if user in in_backward}
    with graph.inserting_before(min(readers)):  # nodes compare by their place in the graph
        for node in copy.taken:
            path = view_path(node, replicas, candidate.storage, alias_sets)
            assert path is not None
            for step in path:
                replica = graph.node_copy(step, lambda node: replicas.get(node, node))
                replica.meta = {**step.meta}
                replica.meta["val"] = fake_result(replica)
                replicas[step] = replica
    for node in saved:
        for user in readers.intersection(node.users):
            user.replace_input_with(node, replicas[node])


def _copy_in_order(graph: fx.Graph, view: fx.Node) -> fx.Node:
    """Copy ``view`` to a dense tensor with the same order of strides. The op itself only makes contiguous copies."""
    value: torch.Tensor = view.meta["val"]
    strides = [_torch_private.size_hint(stride) for stride in value.stride()]
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])  # stable: equal strides keep their order
    origin = {name: view.meta[name] for name in ("stack_trace", "nn_module_stack") if name in view.meta}

    def call(target: Callable[..., object], *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta = {**origin}
        node.meta["val"] = fake_result(node)
        return node

    if order == sorted(order):
        return call(COPY, view)
    copied = call(COPY, call(torch.ops.aten.permute.default, view, order))
    return call(torch.ops.aten.permute.default, copied, [order.index(dim) for dim in range(len(order))])


def _update_views_in_backward(candidate: Candidate, alias_sets: AliasSets, in_backward: set[fx.Node]) -> None:
    """Update the values of views in backward: they view the copy now, which has different strides."""
    for node in candidate.storage.holders:
        if node in in_backward:
            node.meta["val"] = fake_result(node)
