"""The planner: (joint graph, what may move, node times, hardware) -> Plan.

:func:`pose_problem` turns the graph into numbers. :func:`plan_offloads` lets ``place_transfers`` decide about these and
words the outcome: a decision with its reason for every saved storage, and where the peak stands before and after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from ssdtrain_fx.errors import BudgetError
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.alias_sets import AliasSets
from ssdtrain_fx.passes.candidates import Candidate
from ssdtrain_fx.passes.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.liveness import LiveInterval, memory_profile
from ssdtrain_fx.passes.place_transfers import Choice, choose_all, choose_cheapest, choose_lowest_peak, floor_bytes
from ssdtrain_fx.passes.plan import Decision, Keep, Offload, Peak, Plan, SavedStorage
from ssdtrain_fx.passes.transfer_problem import Movable, Placement, Placements, TransferProblem

KEPT_ELSEWHERE = "the peak is no higher with it in memory"
KEPT_TIME = "moving it would take more time than max_slowdown allows"
KEPT_FITS = "the step fits into memory_budget_bytes with it in memory"
NUM_LARGEST = 5


def plan_offloads(
    joint: ScheduledJointGraph,
    alias_sets: AliasSets,
    candidates: Sequence[Candidate],
    problem: TransferProblem,
    intervals: Mapping[int, LiveInterval],
    *,
    move_all: bool = False,
    max_slowdown: float,
    memory_budget_bytes: int | None = None,
) -> Plan:
    """Decide for every candidate, and predict peak and time before and after.

    Args:
        problem: what :func:`pose_problem` made of the same graph, candidates and intervals.
        intervals: when each storage is live if nothing moves.
        move_all: offload every storage that may move, whatever it costs.
        max_slowdown: the lowest peak that adds at most this share to the step is chosen.
        memory_budget_bytes: instead, the peak is brought under this at the least cost, and nothing more is moved.

    Raises:
        BudgetError: no placement brings the predicted peak under the budget.
    """
    floor = floor_bytes(problem)
    before = _find_peak(joint, alias_sets, intervals, {})
    reason_not_moved = KEPT_ELSEWHERE
    if move_all:
        choice = choose_all(problem)
    elif memory_budget_bytes is not None:
        found = choose_cheapest(problem, budget_bytes=memory_budget_bytes)
        if found is None:
            raise BudgetError(
                f"memory_budget_bytes is {memory_budget_bytes}, but the predicted activation peak of this graph cannot "
                f"get below {floor} bytes (without offloading: {before.size_bytes}). "
                "Raise the budget to at least that, or lower the batch size or min_tensor_bytes."
            )
        choice, reason_not_moved = found, KEPT_FITS
    else:
        choice = choose_lowest_peak(problem, max_slowdown=max_slowdown)
        if choice.peak_bytes > floor:
            reason_not_moved = KEPT_TIME
    simulation = choice.simulation
    movables = {movable.idx: movable for movable in problem.movables}
    return Plan(
        storages=tuple(
            _describe_storage(candidate, intervals, choice, movables, reason_not_moved) for candidate in candidates
        ),
        peak_before=before,
        peak_after=_find_peak(joint, alias_sets, intervals, choice.placements),
        floor_bytes=floor,
        step_s=problem.step_s,
        exposed_s=simulation.exposed_s,
        read_s=simulation.read_busy_s,
        write_s=simulation.write_busy_s,
    )


def pose_problem(
    joint: ScheduledJointGraph,
    candidates: Sequence[Candidate],
    intervals: Mapping[int, LiveInterval],
    *,
    node_s: Sequence[float],
    hardware: Hardware,
) -> TransferProblem:
    """What has to be decided, in numbers.

    Args:
        intervals: when each storage is live if nothing moves.
        node_s: seconds of every node of the joint graph.
    """
    positions = joint.positions()
    marker = positions[joint.marker]
    movables = [
        _describe_movable(candidate, intervals[candidate.storage.idx], positions, marker)
        for candidate in candidates
        if candidate.representative is not None
    ]
    moving = {movable.idx for movable in movables}
    fixed = [interval for idx, interval in intervals.items() if idx not in moving]
    return TransferProblem(
        node_s=tuple(node_s),
        marker=marker,
        fixed_live_bytes=memory_profile(fixed, len(positions)).live_bytes,
        movables=tuple(sorted(movables, key=lambda movable: (movable.complete, movable.idx))),
        hardware=hardware,
    )


def _describe_movable(
    candidate: Candidate, interval: LiveInterval, positions: Mapping[fx.Node, int], marker: int
) -> Movable:
    representative = candidate.representative
    assert representative is not None
    # Forward often ends with views that only backward reads. They go away, so they are no reads.
    last_forward_read = positions[representative]
    first_backward_read = len(positions)
    only_for_backward: set[fx.Node] = set()
    for node in reversed(candidate.storage.holders):
        forward_users = [user for user in node.users if positions[user] < marker and user not in only_for_backward]
        if not forward_users and node is not representative:
            only_for_backward.add(node)
        for user in node.users:
            if positions[user] > marker:
                first_backward_read = min(first_backward_read, positions[user])
        last_forward_read = max([last_forward_read, *(positions[user] for user in forward_users)])
    return Movable(
        idx=interval.storage_idx,
        size_bytes=interval.size_bytes,
        start=interval.start,
        complete=positions[representative] + 1,
        earliest_release=last_forward_read + 1,
        wait=first_backward_read,
        end=interval.end,
    )


def _find_peak(
    joint: ScheduledJointGraph,
    alias_sets: AliasSets,
    intervals: Mapping[int, LiveInterval],
    placements: Placements,
) -> Peak:
    spans: list[LiveInterval] = []
    for idx, interval in intervals.items():
        placement = placements.get(idx)
        spans += [interval] if placement is None else interval.without(placement.release, placement.reload)
    nodes = list(joint.graph.nodes)
    profile = memory_profile(spans, len(nodes))
    position = profile.peak_position
    there = [span for span in spans if span.start <= position < span.end]
    there.sort(key=lambda span: (-span.size_bytes, span.storage_idx))
    return Peak(
        size_bytes=profile.peak_bytes,
        position=position,
        node=nodes[position].name,
        phase="forward" if position < nodes.index(joint.marker) else "backward",
        source=_source_line(nodes[position]),
        largest=tuple(
            (alias_sets.storages[span.storage_idx].allocator.name, span.size_bytes) for span in there[:NUM_LARGEST]
        ),
    )


def _decide(candidate: Candidate, movable: Movable, placement: Placement) -> Offload:
    assert candidate.representative is not None
    views = len(candidate.saved_nodes)
    return Offload(
        representative=candidate.representative.name,
        offload=movable.complete,
        release=placement.release,
        reload=placement.reload,
        wait=movable.wait,
        reason="away between forward and backward" + (f"; {views} saved views share it" if views > 1 else ""),
    )


def _describe_storage(
    candidate: Candidate,
    intervals: Mapping[int, LiveInterval],
    choice: Choice,
    movables: Mapping[int, Movable],
    reason_not_moved: str,
) -> SavedStorage:
    idx = candidate.storage.idx
    decision: Decision
    if idx in choice.placements:
        decision = _decide(candidate, movables[idx], choice.placements[idx])
    else:
        decision = Keep(candidate.reason_to_keep or reason_not_moved)
    node = candidate.representative or candidate.saved_nodes[0]
    value = node.meta["val"]
    interval = intervals.get(idx)
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
        source=_source_line(candidate.storage.allocator),
        decision=decision,
    )


def _size_of_input(candidate: Candidate) -> int:
    """Inputs have no live interval; a size that depends on data shows as 0."""
    try:
        return candidate.storage.hint_bytes
    except ValueError:
        return 0


def _source_line(node: fx.Node) -> str:
    """``file.py:12 code`` of the innermost frame of user code that made the node."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    for idx in range(len(lines) - 1, -1, -1):
        if lines[idx].startswith("File "):
            path, number = lines[idx].split('"')[1], lines[idx].split("line ")[1].split(",")[0]
            code = lines[idx + 1] if idx + 1 < len(lines) else ""
            return f"{path.rsplit('/', 1)[-1]}:{number} {code}".strip()
    return ""
