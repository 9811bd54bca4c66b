"""Limits on kernel fusion that keep Inductor to the plan (see the table in ``_torch_private``)."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch._inductor import ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.virtualized import V

from ssdtrain_fx._torch_private.inductor_order import are_placed

__all__ = ["InStepMemory", "fusing_as_planned", "running_in_step_memory"]


@contextmanager
def running_in_step_memory(step_memory: Mapping[str, Any]) -> Generator[None]:
    """Compile graphs whose memory may come from the arena.

    Args:
        step_memory: the arguments of ``in_step_memory`` besides the code, for the generated code. Literals.
    """
    with V.set_choices_handler(cast(Any, InStepMemory(V.choices, step_memory))):
        yield


@contextmanager
def fusing_as_planned(own_ops: frozenset[Any], stored: str, step_memory: Mapping[str, Any]) -> Generator[None]:
    """Compile graphs in which kernels are fused only where the plan counts them as one.

    Args:
        own_ops: the ops that move tensors; they are not kernels.
        stored: a key in the metadata of nodes whose result must be in memory from their position on.
        step_memory: see ``running_in_step_memory``.
    """
    with V.set_choices_handler(cast(Any, FuseWithinLevels(V.choices, own_ops, stored, step_memory))):
        yield


class InStepMemory:
    """Inductor's heuristics, and what the end of the generated code needs."""

    def __init__(self, inner: Any, step_memory: Mapping[str, Any]) -> None:
        self.step_memory = step_memory
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class FuseWithinLevels(InStepMemory):
    """Inductor's heuristics, with two more rules.

    Two kernels that do not read each other's results are fused only if the longest chains of never-fused kernels before
    them have the same length, as in ``passes/fused_kernels.py``. Otherwise one of them would run earlier or later than
    its position in the graph, and its inputs or results would live longer than planned:

        y = sum(mul(g1, x))     # g1 could die here ...
        g2 = mm(...)            # ... before the backward of a whole layer
        z = mul(g2, x)          # Inductor: one kernel for y and z, since both read x

    No data passes between the two, so the numbers stay the same.

    A result that must be stored at its position is not computed in the kernel that reads it, if that kernel runs later.

    Where our ops are placed between the kernels that Inductor chooses alone, these rules do not hold.
    """

    def __init__(self, inner: Any, own_ops: frozenset[Any], stored: str, step_memory: Mapping[str, Any]) -> None:
        super().__init__(inner, step_memory)
        self._own_ops = own_ops
        self._stored = stored

    def can_fuse_horizontal(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        if not self._inner.can_fuse_horizontal(scheduler, node1, node2, shared_data_score):
            return False
        if are_placed():
            return True
        levels = self._levels_of(scheduler)
        level1, level2 = (max(levels.get(name, 0) for name in node.get_operation_names()) for node in (node1, node2))
        return level1 == level2

    def can_fuse_vertical(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        if not self._inner.can_fuse_vertical(scheduler, node1, node2, shared_data_score):
            return False
        if are_placed():
            return True
        parts = (scheduler.name_to_node.get(name) for name in node1.get_operation_names())
        stored = [part.get_name() for part in parts if part is not None and _is_stored(part.node, self._stored)]
        if not stored:
            return True
        levels = self._levels_of(scheduler)
        latest = max(levels.get(name, 0) for name in node2.get_operation_names())
        return all(levels.get(name, 0) == latest for name in stored)

    def _levels_of(self, scheduler: Any) -> dict[str, int]:
        levels: dict[str, int] | None = scheduler.__dict__.get("_ssdtrain_levels")
        if levels is None:
            levels = scheduler.__dict__["_ssdtrain_levels"] = _find_levels(scheduler, self._own_ops, self._stored)
        return levels


def _find_levels(scheduler: Any, own_ops: frozenset[Any], stored: str) -> dict[str, int]:
    """For every operation, the length of the longest chain of never-fused kernels before it.

    A pointwise op has the level of its first reader: Inductor lowers it there, unless it must be stored.
    """
    names: list[str] = [operation.get_operation_name() for operation in V.graph.operations]
    node_by_name = {name: scheduler.name_to_node[name] for name in names if name in scheduler.name_to_node}
    levels: dict[str, int] = {}
    for name, node in node_by_name.items():
        level = 0
        for dependency in node.read_writes.reads:
            buffer = scheduler.name_to_buf.get(dependency.name)
            if buffer is not None and not isinstance(dependency, WeakDep):  # weak: only fixes the order
                maker = buffer.defining_op_name()
                made_by = node_by_name.get(maker)
                never_fused = made_by is not None and _is_never_fused(made_by.node, own_ops)
                level = max(level, levels.get(maker, 0) + never_fused)
        levels[name] = level
    for name, node in reversed(node_by_name.items()):
        if isinstance(node.node, ir.ComputedBuffer) and not node.is_reduction() and not _is_stored(node.node, stored):
            uses = [use for buffer in node.get_outputs() for use in buffer.users if not use.is_weak]
            readers = [use.node.get_name() for use in uses]
            if readers and all(reader in levels for reader in readers):  # not for an output of the graph
                levels[name] = min(levels[reader] for reader in readers)
    return levels


def _is_never_fused(operation: Any, own_ops: frozenset[Any]) -> bool:
    if not isinstance(operation, (ir.ExternKernel, ir.TemplateBuffer)) or isinstance(operation, ir.MultiOutput):
        return False
    return getattr(operation, "op_overload", None) not in own_ops


def _is_stored(operation: Any, stored: str) -> bool:
    origin = getattr(operation, "origin_node", None)
    return origin is not None and stored in origin.meta
