"""Which saved storages may be offloaded, and why every other one may not."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Sequence

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.accelerators import reason_to_refuse
from ssdtrain_fx.passes.graph.alias_sets import AliasSets, Storage, find_written_storages, storages_of
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, is_symbol

TOKEN_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A storage that is saved for backward."""

    storage: Storage
    saved_nodes: tuple[fx.Node, ...]
    representative: fx.Node | None
    """The node whose value is offloaded; None if the storage must stay in memory."""
    reason_to_keep: str
    """Empty if the storage may be offloaded."""

    def kept(self, reason: str) -> Candidate:
        """The same storage, which must stay in memory."""
        return dataclasses.replace(self, representative=None, reason_to_keep=reason)


def find_candidates(
    joint: ScheduledJointGraph,
    alias_sets: AliasSets,
    *,
    min_tensor_bytes: int,
    activations: Collection[fx.Node] = (),
) -> tuple[Candidate, ...]:
    """One candidate per saved storage that backward reads, in the order of allocation.

    Args:
        activations: placeholders that may move, because nothing outside the graph is known to hold them. All other
            placeholders stay in memory.
    """
    saved_by_storage: dict[int, list[fx.Node]] = {}
    positions = joint.positions()
    marker = positions[joint.marker]
    for node in joint.saved:
        storage = alias_sets.of(node)
        # A partitioner may save a value and recompute it as well. The saved one is not read, and split drops it.
        if storage is not None and any(positions[user] > marker for user in node.users):
            saved_by_storage.setdefault(storage.idx, []).append(node)
    outputs = storages_of(joint.forward_outputs, alias_sets)
    gradients = storages_of(joint.gradients, alias_sets)
    written = find_written_storages(joint.graph, alias_sets)

    candidates: list[Candidate] = []
    for idx in sorted(saved_by_storage):
        storage, saved_nodes = alias_sets.storages[idx], saved_by_storage[idx]
        representative = _find_representative(storage, saved_nodes, alias_sets)
        reason = (
            _reason_of_role(storage, outputs, gradients, written, activations)
            or _reason_of_allocator(storage.allocator)
            or _reason_of_value(saved_nodes[0])
            or _reason_of_size(storage, min_tensor_bytes)
            or ("" if representative is not None else "no node covers the storage: only a part of it is in this graph")
        )
        candidates.append(
            Candidate(
                storage=storage,
                saved_nodes=tuple(saved_nodes),
                representative=None if reason else representative,
                reason_to_keep=reason,
            )
        )
    return tuple(candidates)


def view_path(
    node: fx.Node, known: Container[fx.Node], storage: Storage, alias_sets: AliasSets
) -> list[fx.Node] | None:
    """The view ops that lead to ``node`` from the nearest node in ``known``, in order; None if there is no path.

    Exactly one argument of a view op holds the storage. Every other argument must be a number or a symbol, so that
    backward can rerun the op. The path through a multi-output view (``split``) includes the ``getitem``.

    A caller that asks for many views adds each path to ``known``: all paths together then take linear time.
    """
    path: list[fx.Node] = []
    view: fx.Node | None = node
    while view is not None and view not in known:
        path.append(view)
        view = base_of(view, storage, alias_sets)
    return None if view is None else path[::-1]


def base_of(view: fx.Node, storage: Storage, alias_sets: AliasSets) -> fx.Node | None:
    """The node from which alone ``view`` can be taken again; None if there is none."""
    held = alias_sets.by_node
    bases = [source for source in view.all_input_nodes if storage.idx in held[source]]
    if len(bases) != 1 or not all(is_symbol(source) for source in view.all_input_nodes if source is not bases[0]):
        return None
    return bases[0]


def _find_representative(storage: Storage, saved_nodes: Sequence[fx.Node], alias_sets: AliasSets) -> fx.Node | None:
    """The earliest node that covers the storage and from which every saved tensor can be rebuilt."""
    for node in storage.members:
        if not _covers(node, storage):
            continue
        reached = {node}
        for saved in saved_nodes:
            path = view_path(saved, reached, storage, alias_sets)
            if path is None:
                break
            reached.update(path)
        else:
            return node
    return None


def _covers(node: fx.Node, storage: Storage) -> bool:
    """Does this tensor use every byte of its storage exactly once?"""
    value: torch.Tensor = node.meta["val"]
    if value.is_conj() or value.is_neg():
        return False
    try:
        sizes = [_torch_private.size_hint(size) for size in value.shape]
        strides = [_torch_private.size_hint(stride) for stride in value.stride()]
        offset = _torch_private.size_hint(value.storage_offset())
        storage_bytes = storage.hint_bytes
    except ValueError:
        return False
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return offset == 0 and expected * value.element_size() == storage_bytes


def _reason_of_role(
    storage: Storage, outputs: set[int], gradients: set[int], written: set[int], activations: Collection[fx.Node]
) -> str:
    if storage.is_input and storage.allocator not in activations:
        return "graph input: a parameter, a buffer or data that the caller holds"
    if storage.idx in outputs:
        return "graph output: the caller holds it, so offloading would free nothing"
    if storage.idx in gradients:
        return "returned as a gradient"
    if storage.idx in written:
        return "written in place"
    return ""


def _reason_of_allocator(allocator: fx.Node) -> str:
    # Inductor runs the operator while it compiles, so the state is no value of the graph that it compiles. The operator
    # has no metadata, so its item counts as the allocator.
    if any(str(node.target) == "run_and_save_rng_state" for node in (allocator, *allocator.all_input_nodes)):
        return "the state of a random number generator, which a checkpoint saves"
    # On processors with a fast path for its dtype, it returns empty tensors where the trace has indices.
    if any("aten._embedding_bag" in str(node.target) for node in (allocator, *allocator.all_input_nodes)):
        return "a result of embedding_bag, whose real size may differ from the traced one"
    return ""


def _reason_of_value(node: fx.Node) -> str:
    value: torch.Tensor = node.meta["val"]
    if type(value) is not _torch_private.FakeTensor:
        return f"tensor subclass {type(value).__name__}"
    if value.is_quantized:
        return "quantized tensor"
    refused = reason_to_refuse(value.device.type)
    if refused:
        return f"device {refused}"
    return ""


def _reason_of_size(storage: Storage, min_tensor_bytes: int) -> str:
    try:
        size_bytes = storage.hint_bytes
    except ValueError:
        return "its size depends on data"
    if size_bytes == 0:
        return "empty"
    if size_bytes <= TOKEN_BYTES:
        return f"{size_bytes} bytes: not larger than the token that would replace it"
    if size_bytes < min_tensor_bytes:
        return f"{size_bytes} bytes: below min_tensor_bytes={min_tensor_bytes}"
    return ""
