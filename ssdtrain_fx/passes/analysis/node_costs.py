"""Estimate how long each node takes, from shapes and a hardware profile.

No clock is read, so the same graph always costs the same. By the roofline model, a kernel takes ``max(arithmetic, bytes
moved / memory rate) + kernel_s``. :mod:`ssdtrain_fx.passes.analysis.fused_kernels` says which nodes form a kernel,
:mod:`ssdtrain_fx.passes.graph.op_kinds` what an op computes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from ssdtrain_fx.hardware import Hardware, convolution_key
from ssdtrain_fx.passes.analysis.fused_kernels import NodeFacts
from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.graph.node_facts import NodeFact
from ssdtrain_fx.passes.graph.op_kinds import Kind
from ssdtrain_fx.passes.graph.tensor_sizes import hint


def estimate_node_seconds(
    joint: ScheduledJointGraph,
    alias_sets: AliasSets,
    hardware: Hardware,
    *,
    fused: bool = True,
    facts: NodeFacts | None = None,
) -> tuple[float, ...]:
    """Seconds of every position of ``joint``.

    The time of a fused group is assigned to its last member, which is about where Inductor runs the kernel. The other
    members cost 0, as do inputs, views, ``getitem`` and the marker. Sizes that depend on data count as 0.

    Args:
        fused: False for ``inner="aot_eager"``, which runs node by node: every node is then a separate group.
        facts: facts of this graph, if they are already known.
    """
    facts = facts or NodeFacts(joint, alias_sets, for_gpu=hardware.is_gpu)
    groups = facts.groups if fused else range(len(facts.facts))
    return _price(facts.facts, groups, alias_sets, hardware, fused=fused)


@dataclasses.dataclass(slots=True)
class _GroupCost:
    """The cost of one group, summed over its members."""

    arithmetic_s: float = 0.0
    moved_bytes: int = 0
    last: int = 0
    read: dict[int, int] = dataclasses.field(default_factory=dict[int, int])


def _price(
    facts: Sequence[NodeFact], groups: Sequence[int], alias_sets: AliasSets, hardware: Hardware, *, fused: bool
) -> tuple[float, ...]:
    sizes = [_storage_bytes(alias_sets, idx) for idx in range(len(alias_sets.storages))]
    maker: dict[int, int] = {}
    needed_outside: set[tuple[int, int]] = set()  # storage, group that made it
    group_costs: dict[int, _GroupCost] = {}
    for position, fact in enumerate(facts):
        group = groups[position]
        if fact.node.op == "output":
            needed_outside.update((idx, maker[idx]) for idx, _ in fact.read if idx in maker)
        if fact.kind is Kind.FREE:
            continue
        cost = group_costs.setdefault(group, _GroupCost())
        cost.last = position
        cost.moved_bytes += fact.traffic_bytes
        cost.arithmetic_s += fact.flops / _flop_rate(hardware, fact)
        cost.arithmetic_s += fact.expensive_elements / _rate(hardware.elements_per_s, fact.dtype)
        for idx, size_bytes in fact.read:
            if idx in maker and maker[idx] == group:
                continue
            if idx in maker:
                needed_outside.add((idx, maker[idx]))
            cost.read[idx] = min(cost.read.get(idx, 0) + size_bytes, sizes[idx])
        for idx, size_bytes in fact.written:
            cost.moved_bytes += size_bytes
            maker[idx] = group
        for idx in fact.made:
            maker[idx] = group
    for fact, group in zip(facts, groups, strict=True):
        if fact.kind is not Kind.FREE:
            group_costs[group].moved_bytes += sum(
                sizes[idx]
                for idx in fact.made
                if not fused or fact.kind is Kind.KERNEL or (idx, group) in needed_outside
            )
    seconds = [0.0] * len(facts)
    for cost in group_costs.values():
        moved_bytes = cost.moved_bytes + sum(cost.read.values())
        seconds[cost.last] = max(cost.arithmetic_s, moved_bytes / hardware.memory_bytes_per_s) + hardware.kernel_s
    return tuple(seconds)


def _flop_rate(hardware: Hardware, fact: NodeFact) -> float:
    if fact.convolves:
        rate = hardware.flops_per_s.get(convolution_key(str(fact.dtype).removeprefix("torch.")))
        if rate is not None:
            return rate
    return _rate(hardware.flops_per_s, fact.dtype)


def _rate(rates: Mapping[str, float], dtype: torch.dtype | None) -> float:
    """The rate for ``dtype``, or that of float32 (halved for eight-byte types); infinite in an empty profile."""
    if dtype is None:
        return math.inf
    name = str(dtype).removeprefix("torch.")
    if name in rates:
        return rates[name]
    known = rates.get("float32", min(rates.values(), default=math.inf))
    return known * 4 / dtype.itemsize if dtype.itemsize > 4 else known


def _storage_bytes(alias_sets: AliasSets, idx: int) -> int:
    return hint(alias_sets.storages[idx].size_bytes)
