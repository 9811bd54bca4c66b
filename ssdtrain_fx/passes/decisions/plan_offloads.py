"""The planner: (joint graph, candidates, node times, hardware) -> Plan.

:func:`~ssdtrain_fx.passes.analysis.pose_problem.pose_problem` turns the graph into numbers. :func:`plan_offloads`
passes them to ``place_transfers`` and reports a decision with a reason for every saved storage, and the peak before and
after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import fx

from ssdtrain_fx.errors import BudgetError
from ssdtrain_fx.passes.analysis.analyse import Analysis
from ssdtrain_fx.passes.analysis.candidates import Candidate
from ssdtrain_fx.passes.analysis.find_recomputations import Recomputation
from ssdtrain_fx.passes.decisions.find_chain_memory import find_chain_memory
from ssdtrain_fx.passes.decisions.find_peak_parts import find_peak_parts
from ssdtrain_fx.passes.graph.source_lines import source_line
from ssdtrain_fx.passes.planning.chains import choose_most
from ssdtrain_fx.passes.planning.live_intervals import LiveInterval, memory_profile
from ssdtrain_fx.passes.planning.place_transfers import (
    Choice,
    choose_all,
    choose_cheapest,
    floor_bytes,
)
from ssdtrain_fx.passes.planning.plan import Keep, Offload, Peak, Plan, PlannedDecision, Recompute, SavedStorage
from ssdtrain_fx.passes.planning.read_ahead import AheadTimes, ahead_times, read_ahead_spans
from ssdtrain_fx.passes.planning.step_budget import StepBudget
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Placements, TransferProblem
from ssdtrain_fx.passes.planning.use_host_tier import use_host_tier
from ssdtrain_fx.passes.planning.use_room import choose_within_time, use_room

KEPT_ELSEWHERE = "the peak is no higher with it in memory"
KEPT_TIME = "offloading it would take more time than max_slowdown allows"
KEPT_FITS = "the step fits into memory_budget_bytes with it in memory"
NUM_LARGEST = 5


def plan_offloads(
    analysis: Analysis,
    problem: TransferProblem,
    *,
    move_all: bool = False,
    max_slowdown: float,
    budget: StepBudget | None = None,
) -> Plan:
    """Decide about every candidate, and predict peak and time before and after.

    Args:
        problem: the result of :func:`pose_problem` for the same analysis.
        move_all: offload every storage that may be offloaded, at any cost.
        max_slowdown: choose the lowest peak that adds at most this share to the step. For a graph in a chain, offload
            as many bytes as this share allows.
        budget: if set, take the least time whose peak stays within it, and offload no more than that needs.

    Raises:
        BudgetError: no placement brings the predicted peak within the budget.
    """
    without_host = dataclasses.replace(problem, host=None)
    floor = floor_bytes(without_host)
    reason_not_moved = KEPT_ELSEWHERE
    if move_all:
        choice = use_host_tier(problem, choose_all(without_host))
    elif budget is not None:
        found = choose_cheapest(without_host, budget_bytes=budget.peak_bytes)
        if found is None:
            raise BudgetError(
                floor,
                f"memory_budget_bytes is {budget.size_bytes}, but the predicted activation peak of this graph cannot "
                f"get below {floor} bytes (without offloading: {_find_peak(analysis, {}).size_bytes}). "
                f"Raise the budget to {budget.size_for(floor)} bytes or more, or lower the batch size or "
                "min_tensor_bytes.",
                reached_bytes=floor,
            )
        choice, reason_not_moved = use_host_tier(problem, found, time_first=True), KEPT_FITS
    elif analysis.is_link:
        choice, reason_not_moved = choose_most(problem, max_slowdown=max_slowdown), KEPT_TIME
    else:
        choice = choose_within_time(problem, max_slowdown=max_slowdown, floor_bytes=floor)
        if choice.peak_bytes > floor:
            reason_not_moved = KEPT_TIME
    # move_all is meant to keep as little in memory as possible. A graph of a chain does not know the peak of the step.
    if budget is not None and not move_all:
        choice = use_room(problem, choice)
    return describe_plan(analysis, problem, choice, reason_not_moved=reason_not_moved, reasons={})


def describe_plan(
    analysis: Analysis,
    problem: TransferProblem,
    choice: Choice,
    *,
    reason_not_moved: str,
    reasons: Mapping[str, str],
) -> Plan:
    """Describe ``choice`` as a plan.

    Args:
        reasons: why movable storages are kept, by name. All others get ``reason_not_moved``.
    """
    movables = {movable.idx: movable for movable in problem.movables}
    simulation = choice.simulation
    live_in_chain, ahead = _live(analysis, choice.placements), dict[int, AheadTimes]()
    if analysis.is_link:
        ahead = ahead_times(problem, choice.placements)
        live_in_chain += read_ahead_spans(problem, choice.placements, ahead)
    return Plan(
        storages=tuple(
            describe_storage(
                candidate,
                analysis,
                _decide(candidate, choice, movables, ahead, reasons.get(_main_node(candidate).name, reason_not_moved)),
            )
            for candidate in analysis.candidates
        ),
        peak_before=_find_peak(analysis, {}),
        peak_after=_find_peak(analysis, choice.placements),
        chain_before=find_chain_memory(analysis, _live(analysis, {})),
        chain_after=find_chain_memory(analysis, live_in_chain),
        floor_bytes=floor_bytes(problem),
        step_s=problem.step_s,
        exposed_s=simulation.exposed_s,
        recompute_s=problem.recompute_s,
        read_s=simulation.read_busy_s,
        write_s=simulation.write_busy_s,
        host_peak_bytes=simulation.host_peak_bytes,
        stall_s=simulation.stall_s,
    )


def add_recomputations(plan: Plan, analysis: Analysis, recomputations: Sequence[Recomputation]) -> Plan:
    """Add the decisions for recomputed storages to ``plan``, which was made after ``recomputations`` were inserted.

    Args:
        analysis: the analysis of the graph without the recomputations.
    """
    positions = {node.name: position for node, position in analysis.joint.positions().items()}
    candidates = {candidate.storage.idx: candidate for candidate in analysis.candidates}
    recomputed = [
        describe_storage(
            candidates[recomputation.storage_idx],
            analysis,
            Recompute(
                nodes=tuple(node.name for node in recomputation.nodes),
                sources=tuple(_main_node(candidates[idx]).name for idx in recomputation.sources),
                reason="recomputed in backward",
            ),
        )
        for recomputation in recomputations
    ]
    storages = sorted((*plan.storages, *recomputed), key=lambda storage: positions[storage.name])
    return dataclasses.replace(
        plan,
        storages=tuple(storages),
        peak_before=_find_peak(analysis, {}),
        chain_before=find_chain_memory(analysis, _live(analysis, {})),
    )


def _live(analysis: Analysis, placements: Placements) -> list[LiveInterval]:
    """What is in memory with these placements."""
    spans = list(analysis.extras.values())
    for idx, interval in analysis.intervals.items():
        placement = placements.get(idx)
        spans += [interval] if placement is None else interval.without(placement.release, placement.reload)
    return spans


def _find_peak(analysis: Analysis, placements: Placements) -> Peak:
    spans = _live(analysis, placements)
    nodes = list(analysis.joint.graph.nodes)
    names = {storage.idx: storage.allocator.name for storage in analysis.alias_sets.storages}
    names |= {extra.storage_idx: name for name, extra in analysis.extras.items()}
    profile = memory_profile(spans, len(nodes))
    position = profile.peak_position
    there = [span for span in spans if span.start <= position < span.end]
    there.sort(key=lambda span: (-span.size_bytes, span.storage_idx))
    return Peak(
        size_bytes=profile.peak_bytes,
        position=position,
        node=nodes[position].name,
        phase="forward" if position < nodes.index(analysis.joint.marker) else "backward",
        source=source_line(nodes[position]),
        largest=tuple((names[span.storage_idx], span.size_bytes) for span in there[:NUM_LARGEST]),
        parts=find_peak_parts(analysis, there),
    )


class PlannedTimes(NamedTuple):
    """What the runtime knows of the plan for one storage, in seconds. See :class:`Offload`."""

    out_s: float
    back_s: float
    stall_s: float


def planned_times(choice: Choice, movable: Movable) -> PlannedTimes:
    """The times of ``movable``, which ``choice`` offloads."""
    placement, simulation = choice.placements[movable.idx], choice.simulation
    start_s = simulation.start_s
    release_stall_s = simulation.release_stall_s.get(movable.idx, 0.0)
    wait_stall_s = simulation.wait_stall_s.get(movable.idx, 0.0)
    # The time between two different positions includes the stall. At the same position, the stall is all of it.
    out_s = max(start_s[placement.release] - start_s[placement.offload_of(movable)], release_stall_s)
    back_s = max(start_s[placement.wait_of(movable)] - start_s[placement.reload], wait_stall_s)
    return PlannedTimes(out_s, back_s, release_stall_s + wait_stall_s)


def _decide(
    candidate: Candidate,
    choice: Choice,
    movables: Mapping[int, Movable],
    ahead: Mapping[int, AheadTimes],
    reason_not_moved: str,
) -> PlannedDecision:
    idx = candidate.storage.idx
    if idx not in choice.placements:
        return Keep(candidate.reason_to_keep or reason_not_moved)
    assert candidate.representative is not None
    placement, movable, views = choice.placements[idx], movables[idx], len(candidate.saved_nodes)
    where = "in host memory" if placement.tier == "host" else "away"
    times = planned_times(choice, movable)
    lead_s, left_s = ahead.get(idx, (0.0, 0.0))
    return Offload(
        representative=candidate.representative.name,
        offload=placement.offload_of(movable),
        release=placement.release,
        reload=placement.reload,
        wait=placement.wait_of(movable),
        # Values are rounded to microseconds to keep the graph readable.
        out_s=round(times.out_s, 6),
        back_s=round(times.back_s, 6),
        stall_s=round(times.stall_s, 6),
        lead_s=round(lead_s, 6),
        left_s=round(left_s, 6),
        reason=f"{where} between forward and backward" + (f"; {views} saved views share it" if views > 1 else ""),
        tier=placement.tier,
    )


def _main_node(candidate: Candidate) -> fx.Node:
    """The node that gives the storage its name."""
    return candidate.representative or candidate.saved_nodes[0]


def describe_storage(candidate: Candidate, analysis: Analysis, decision: PlannedDecision) -> SavedStorage:
    """Describe the storage of ``candidate`` and the ``decision`` about it."""
    node = _main_node(candidate)
    value = node.meta["val"]
    interval = analysis.intervals.get(candidate.storage.idx)
    size_bytes = interval.size_bytes if interval is not None else _size_of_input(candidate)
    return SavedStorage(
        name=node.name,
        saved_nodes=tuple(saved.name for saved in candidate.saved_nodes),
        op=str(candidate.storage.allocator.target),
        shape=tuple(str(size) for size in value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        device=str(value.device),
        size_bytes=size_bytes,
        is_input=candidate.storage.is_input,
        source=source_line(candidate.storage.allocator),
        decision=decision,
    )


def _size_of_input(candidate: Candidate) -> int:
    """Size of an input, which has no live interval. 0 if the size depends on data."""
    try:
        return candidate.storage.hint_bytes
    except ValueError:
        return 0
