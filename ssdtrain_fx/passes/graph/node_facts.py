"""What the cost of a node depends on, apart from its neighbours: what it reads, writes, allocates and computes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.graph.op_kinds import FREE_OP, Kind, Op, arguments_inside, is_around_random_op, op_inside, op_of
from ssdtrain_fx.passes.graph.tensor_sizes import Shape, shape_of, touched_bytes

GPU = "gpu"
"""No type of torch's, so no rule for a special device applies."""


def takes_time(node: fx.Node, alias_sets: AliasSets) -> bool:
    """False for inputs, views, ``getitem``, symbols, the marker and the ops of ssdtrain_fx."""
    op = op_of(node.target) if node.op == "call_function" else FREE_OP
    if op.kind is Kind.FREE:
        return False
    if is_around_random_op(node):  # of its results, each ``getitem`` counts as the one that makes it
        return True
    makes_a_storage = any(alias_sets.storages[idx].allocator is node for idx in alias_sets.by_node[node])
    return makes_a_storage or bool(op.written_arguments)


def find_own_kernels(joint: ScheduledJointGraph, alias_sets: AliasSets, *, fused: bool) -> tuple[fx.Node, ...]:
    """The nodes that run as the op in the graph, unfused, in graph order.

    Args:
        fused: False for ``inner="aot_eager"``, where every node that takes time counts. Otherwise, ops that add at
            indices are also left out: Inductor does not fuse them, but it generates their kernels itself.
    """

    def is_own(op: Op) -> bool:
        return op.kind is Kind.KERNEL and not op.adds_at_indices

    nodes = [node for node in joint.graph.nodes if takes_time(node, alias_sets)]
    return tuple(node for node in nodes if not fused or is_own(op_of(node.target)))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NodeFact:
    """What the cost of a node depends on, apart from its neighbours."""

    node: fx.Node
    kind: Kind
    made: tuple[int, ...]
    """Storages that it allocates."""
    written: tuple[tuple[int, int], ...]
    """Storages of arguments that it writes, with the bytes written."""
    read: tuple[tuple[int, int], ...]
    """Storages that it reads, with the bytes of each argument. A slice has fewer bytes than its storage."""
    shape: Shape
    """What it iterates over: the shape of its result, or that of its largest argument for a reduction and for what is
    filled in parts."""
    flops: int
    convolves: bool
    dtype: torch.dtype | None
    expensive_elements: int
    """Elements that need a transcendental function or a random number."""
    name: str
    """Of the op, without namespace and overload; empty for what takes no time."""
    device_type: str
    """Of its result. ``GPU`` stands for a CPU tensor in a graph that is planned for a GPU."""
    is_view: bool
    """Its result has the storage of an argument."""
    traffic_bytes: int
    """Bytes moved in addition to ``read``, ``written`` and the storages that it allocates."""

    @property
    def needs_memory(self) -> bool:
        """Its arguments have to be in memory: it is no part of a generated kernel, and no view."""
        return self.kind is Kind.KERNEL or (self.kind is Kind.FREE and not self.is_view)

    @property
    def is_filled_in_parts(self) -> bool:
        """Is each argument computed by a kernel of its own, which writes into the result?

        See ``cat`` in torch/_inductor/lowering.py of torch 2.13: on a CPU, it always makes a ``ConcatKernel``.
        """
        return _is_filled_in_parts(self.name, self.device_type)

    @classmethod
    def of(cls, node: fx.Node, alias_sets: AliasSets, *, for_gpu: bool = False) -> NodeFact:
        made = tuple(idx for idx in alias_sets.by_node[node] if alias_sets.storages[idx].allocator is node)
        op = op_of(node.target) if node.op == "call_function" else FREE_OP
        if not takes_time(node, alias_sets):
            held = tuple((idx, 0) for source in node.all_input_nodes for idx in alias_sets.by_node[source])
            is_view = bool(set(alias_sets.by_node[node]) & {idx for idx, _ in held})
            device_type = _device_type(node.meta.get("val"), for_gpu)
            return cls(node, Kind.FREE, made, (), held, (), 0, False, None, 0, "", device_type, is_view, 0)
        inputs = [value for value in node.all_input_nodes if isinstance(value.meta.get("val"), torch.Tensor)]
        first = inputs[0].meta["val"] if inputs else None
        results = [leaf for leaf in _torch_private.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
        result = results[0] if results else first
        kind, shape = op.kind, shape_of(result)
        if kind is Kind.ROWS:
            shape = shape_of(first)
            kind = _reduction_kind(node, shape)
        device_type = _device_type(result, for_gpu)
        if _is_filled_in_parts(op.name, device_type):
            shape = max((shape_of(value.meta["val"]) for value in inputs), key=math.prod)
        table = node.args[0] if op.looks_up else None
        read: list[tuple[int, int]] = []
        for value in inputs:
            size_bytes = touched_bytes(value.meta["val"])
            if value is table:
                size_bytes = min(size_bytes, touched_bytes(result))
            read += [(idx, size_bytes) for idx in alias_sets.by_node[value]]
        written = [
            (idx, touched_bytes(value.meta.get("val")))
            for value in op.written_values(node)
            for idx in alias_sets.by_node[value]
        ]
        inside, computed = op, result
        if is_around_random_op(node):  # which has no value of its own
            inside = op_inside(node)
            computed = cast(fx.Node, arguments_inside(node)[0]).meta["val"]
        traffic_bytes, expensive_elements = 0, 0
        if op.is_expensive(node):
            expensive_elements = max(math.prod(shape), math.prod(shape_of(result)))
        if op.adds_at_indices:
            values = max((value.meta["val"] for value in inputs[1:] or inputs), key=touched_bytes)
            traffic_bytes = 2 * touched_bytes(values)
            expensive_elements = math.prod(shape_of(values))
        return cls(
            node=node,
            kind=kind,
            made=made,
            written=tuple(written),
            read=tuple(read),
            shape=shape,
            flops=inside.count_flops(node),
            convolves="conv" in op.name,
            dtype=None if computed is None else computed.dtype,
            expensive_elements=expensive_elements + inside.attention_elements(node),
            name=op.name,
            device_type=device_type,
            is_view=False,
            traffic_bytes=traffic_bytes,
        )


def _device_type(value: Any, for_gpu: bool) -> str:
    device = getattr(value, "device", None)
    if device is None:
        return ""
    return GPU if for_gpu and device.type == "cpu" else device.type


def _is_filled_in_parts(name: str, device_type: str) -> bool:
    return name == "cat" and device_type == "cpu"


def _reduction_kind(node: fx.Node, shape: Shape) -> Kind:
    """ROWS if it reduces trailing dimensions and other dimensions remain; otherwise COLUMNS."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if type(dims) is int:
        dims = [dims]
    if not isinstance(dims, (list, tuple)) or not dims:
        return Kind.COLUMNS
    reduced = {cast(int, dim) % len(shape) for dim in dims} if shape else set[int]()
    kept = [dim for dim, size in enumerate(shape) if dim not in reduced and size != 1]
    moving = [dim for dim in reduced if shape[dim] != 1]
    return Kind.ROWS if kept and (not moving or max(kept) < min(moving)) else Kind.COLUMNS
