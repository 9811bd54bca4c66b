"""Run one pass on a scheduled joint graph and show its result: rows for people and programs, and the new graph.

A graph from a bug report can be examined pass by pass this way, on a machine without the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import fx

from ssdtrain_fx.config import OffloadConfig, device_of
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.analysis.analyse import Analysis, analyse
from ssdtrain_fx.passes.analysis.candidates import find_candidates
from ssdtrain_fx.passes.analysis.find_recomputations import find_recomputations
from ssdtrain_fx.passes.analysis.liveness import find_live_intervals
from ssdtrain_fx.passes.analysis.pose_problem import pose_problem
from ssdtrain_fx.passes.decisions.plan_offloads import plan_offloads
from ssdtrain_fx.passes.graph.alias_sets import AliasSets, find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, OPS, site_of
from ssdtrain_fx.passes.planning.live_intervals import LiveInterval, memory_profile
from ssdtrain_fx.passes.planning.plan import Plan
from ssdtrain_fx.passes.rewrites.copy_out_views import copy_out_views
from ssdtrain_fx.passes.rewrites.insert_offloads import insert_offloads
from ssdtrain_fx.passes.rewrites.verify_offloads import verify_offloads
from ssdtrain_fx.units import format_bytes

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PassResult:
    """The result of a pass."""

    summary: str
    rows: tuple[Row, ...]
    """All rows have the same keys. Values are numbers, strings, or lists of strings."""
    rewritten: ScheduledJointGraph | None = None
    """The graph, if the pass changes it. It is the given graph, rewritten in place."""


Pass = Callable[[ScheduledJointGraph, OffloadConfig], PassResult]


def run_pass(name: str, joint: ScheduledJointGraph, config: OffloadConfig) -> PassResult:
    """Run the pass called ``name`` with the options of the backend.

    Raises:
        KeyError: there is no such pass; see :data:`PASSES`.
        BudgetError: ``memory_budget_bytes`` is below the lowest peak that a plan can reach.
        InternalError: the graph breaks an invariant.
    """
    return PASSES[name](joint, config)


def _alias_sets(joint: ScheduledJointGraph, config: OffloadConfig) -> PassResult:
    """Which nodes share a storage."""
    alias_sets = find_alias_sets(joint.graph)
    rows = tuple(
        {
            "storage": storage.idx,
            "allocator": storage.allocator.name,
            "bytes": storage.hint_bytes,
            "input": storage.is_input,
            "members": _names(storage.members),
        }
        for storage in alias_sets.storages
    )
    return PassResult(summary=f"{len(rows)} storages", rows=rows)


def _candidates(joint: ScheduledJointGraph, config: OffloadConfig) -> PassResult:
    """Which saved storages may be offloaded, and why the others may not."""
    found = find_candidates(joint, find_alias_sets(joint.graph), min_tensor_bytes=config.min_tensor_bytes)
    rows = tuple(
        {
            "storage": candidate.storage.idx,
            "saved": _names(candidate.saved_nodes),
            "bytes": candidate.storage.hint_bytes,
            "moves": None if candidate.representative is None else candidate.representative.name,
            "reason to keep": candidate.reason_to_keep,
        }
        for candidate in found
    )
    movable = sum(row["moves"] is not None for row in rows)
    return PassResult(summary=f"{movable} of {len(rows)} saved storages may be offloaded", rows=rows)


def _liveness(joint: ScheduledJointGraph, config: OffloadConfig) -> PassResult:
    """When each storage is live if nothing is offloaded and each node is a separate kernel."""
    alias_sets = find_alias_sets(joint.graph)
    return _describe_intervals(joint, alias_sets, find_live_intervals(joint.graph, alias_sets).values())


def _fuse_intervals(joint: ScheduledJointGraph, config: OffloadConfig) -> PassResult:
    """Like liveness, but without what Inductor's fused kernels keep out of memory."""
    analysis = _analyse(joint, dataclasses.replace(config, inner="inductor"))
    return _describe_intervals(joint, analysis.alias_sets, analysis.intervals.values())


def _node_costs(joint: ScheduledJointGraph, config: OffloadConfig) -> PassResult:
    """Seconds of every node that takes time on the planned hardware, and their source."""
    analysis = _analyse(joint, config)
    rows = tuple(
        {
            "node": node.name,
            "target": str(node.target),
            "seconds": seconds,
            "source": "measured" if node in analysis.measured.seconds else "roofline",
        }
        for node, seconds in zip(joint.graph.nodes, analysis.node_s, strict=True)
        if seconds > 0
    )
    return PassResult(summary=f"{sum(analysis.node_s):.6f} s in {len(rows)} nodes; {analysis.cost_sources}", rows=rows)


def _copy_out_views(joint: ScheduledJointGraph, config: OffloadConfig) -> PassResult:
    """Save copies of small views that keep large storages alive."""
    before = set(joint.saved)
    rewritten = copy_out_views(joint, min_tensor_bytes=config.min_tensor_bytes)
    rows = tuple({"saved instead": node.name} for node in rewritten.saved if node not in before)
    return PassResult(summary=f"{len(rows)} views copied out", rows=rows, rewritten=rewritten)


def _recomputations(joint: ScheduledJointGraph, config: OffloadConfig) -> PassResult:
    """Which saved storages backward could recompute, and from what."""
    alias_sets = find_alias_sets(joint.graph)
    candidates = find_candidates(joint, alias_sets, min_tensor_bytes=config.min_tensor_bytes)
    found = find_recomputations(joint, alias_sets, candidates, fused=config.inner == "inductor")
    rows = tuple(
        {
            "storage": one.storage_idx,
            "bytes": alias_sets.storages[one.storage_idx].hint_bytes,
            "runs again": _names(one.nodes),
            "from storages": [str(idx) for idx in one.sources],
        }
        for one in found.values()
    )
    return PassResult(summary=f"{len(rows)} of {len(candidates)} saved storages could be recomputed", rows=rows)


def _plan(joint: ScheduledJointGraph, config: OffloadConfig) -> PassResult:
    """Keep or offload each saved storage, and the predicted effect. Nothing is recomputed."""
    _, plan = _make_plan(joint, config)
    return _describe_plan(plan, None)


def _insert_offloads(joint: ScheduledJointGraph, config: OffloadConfig) -> PassResult:
    """Make a plan, and insert the four ops into the graph."""
    analysis, plan = _make_plan(joint, config)
    rewritten = insert_offloads(
        joint,
        alias_sets=analysis.alias_sets,
        plan=plan,
        candidates=analysis.candidates,
        engine=config.engine_config().to_argument(),
        order_reloads=_hardware(joint, config).has_host_tier,
    )
    return _describe_plan(plan, rewritten)


def _verify_offloads(joint: ScheduledJointGraph, config: OffloadConfig) -> PassResult:
    """Check every invariant of a graph with offloads."""
    on_host = any(node.target is OFFLOAD and site_of(node).host for node in joint.graph.nodes)
    hardware = _hardware(joint, config) if on_host else None
    verify_offloads(joint, host=None if hardware is None else config.host_tier(hardware), hardware=hardware)
    rows = tuple({"op": str(op), "nodes": sum(node.target is op for node in joint.graph.nodes)} for op in OPS)
    return PassResult(summary="every invariant holds", rows=rows)


PASSES: Mapping[str, Pass] = {
    "alias_sets": _alias_sets,
    "candidates": _candidates,
    "liveness": _liveness,
    "fuse_intervals": _fuse_intervals,
    "node_costs": _node_costs,
    "copy_out_views": _copy_out_views,
    "recomputations": _recomputations,
    "plan": _plan,
    "insert_offloads": _insert_offloads,
    "verify_offloads": _verify_offloads,
}
"""Passes by name, in the order in which the pipeline needs them. The docstring of each says what it shows."""


def _analyse(joint: ScheduledJointGraph, config: OffloadConfig) -> Analysis:
    return analyse(
        joint,
        min_tensor_bytes=config.min_tensor_bytes,
        hardware=_hardware(joint, config),
        fused=config.inner == "inductor",
        times=config.load_call_times(_device(joint)),
        modules=config.module_wishes,
        in_flight=config.forwards_in_flight,
    )


def _make_plan(joint: ScheduledJointGraph, config: OffloadConfig) -> tuple[Analysis, Plan]:
    analysis = _analyse(joint, config)
    hardware = _hardware(joint, config)
    budget = config.find_budget(_inputs(joint))
    plan = plan_offloads(
        analysis,
        pose_problem(analysis, hardware=hardware, host=config.host_tier(hardware)),
        move_all=config.policy == "all",
        max_slowdown=config.max_slowdown,
        budget=config.budget_of_plan(budget, hardware),
    )
    return analysis, plan


def _hardware(joint: ScheduledJointGraph, config: OffloadConfig) -> Hardware:
    return config.load_hardware(_device(joint))


def _device(joint: ScheduledJointGraph) -> str:
    return device_of(_inputs(joint))


def _inputs(joint: ScheduledJointGraph) -> list[Any]:
    return [node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")]


def _describe_intervals(
    joint: ScheduledJointGraph, alias_sets: AliasSets, intervals: Collection[LiveInterval]
) -> PassResult:
    profile = memory_profile(intervals, len(joint.graph.nodes))
    names = _names(joint.graph.nodes)
    rows = tuple(
        {
            "storage": interval.storage_idx,
            "allocator": alias_sets.storages[interval.storage_idx].allocator.name,
            "start": interval.start,
            "end": interval.end,
            "bytes": interval.size_bytes,
        }
        for interval in intervals
    )
    where = f"position {profile.peak_position}, {names[profile.peak_position]}"
    return PassResult(summary=f"peak {format_bytes(profile.peak_bytes)} at {where}", rows=rows)


def _describe_plan(plan: Plan, rewritten: ScheduledJointGraph | None) -> PassResult:
    rows: list[Row] = []
    for storage in plan.storages:
        decision = dataclasses.asdict(storage.decision)
        positions = {name: decision.get(name) for name in ("offload", "release", "reload", "wait")}
        kind = type(storage.decision).__name__.lower()
        tier = decision.get("tier")
        rows.append(
            {
                "storage": storage.name,
                "bytes": storage.size_bytes,
                "decision": kind if tier != "host" else f"{kind} to host",
                **positions,
                "reason": decision["reason"],
            }
        )
    summary = (
        f"peak {format_bytes(plan.peak_before_bytes)} -> {format_bytes(plan.peak_after_bytes)}, "
        f"{100 * plan.slowdown:+.1f} % of the step time, {len(plan.offloaded)} of {len(plan.storages)} offloaded"
    )
    return PassResult(summary=summary, rows=tuple(rows), rewritten=rewritten)


def _names(nodes: Iterable[fx.Node]) -> list[str]:
    return [node.name for node in nodes]
