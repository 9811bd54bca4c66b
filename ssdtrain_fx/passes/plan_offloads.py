"""The planner: (joint graph, what may move, settings) -> Plan.

Positions follow from one number, the in-flight window of W bytes, and need no clock:

    forward   offload(x) stands right behind x. Its release stands where more than W bytes would be leaving at once,
              but never before the last forward read of x.
    backward  the wait stands right before the first read; the reload as early as at most W bytes are on their way back
              or waiting for their reader.

So at most W bytes more than necessary are live at any position, whatever the speed of the disk, and a transfer has W
bytes worth of compute to hide behind. Storages that would be released only when forward ends and be asked for again as
soon as backward begins would never be away: ``policy="auto"`` keeps them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from torch import fx

from ssdtrain_fx.errors import BudgetError
from ssdtrain_fx.passes.alias_sets import AliasSets
from ssdtrain_fx.passes.candidates import Candidate
from ssdtrain_fx.passes.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.liveness import LiveInterval, MemoryProfile, find_live_intervals, memory_profile, split_interval
from ssdtrain_fx.passes.plan import Decision, Keep, Offload, Plan, SavedStorage

KEPT_SOON = "needed again soon: it would be on its way back before it is gone"
KEPT_FITS = "fits: the peak is no higher with it in memory"


@dataclasses.dataclass(frozen=True, slots=True)
class _Move:
    """A candidate that may move: where its storage is used."""

    candidate: Candidate
    size_bytes: int
    complete: int
    """First position after the representative exists."""
    last_forward_read: int
    first_backward_read: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Placement:
    release: int
    reload: int


def plan_offloads(
    joint: ScheduledJointGraph,
    alias_sets: AliasSets,
    candidates: Sequence[Candidate],
    *,
    keep_what_is_needed_soon: bool,
    in_flight_bytes: int | None,
    memory_budget_bytes: int | None,
) -> Plan:
    """Decide for every candidate, and predict the peak before and after.

    Args:
        keep_what_is_needed_soon: False offloads every storage that may move.
        in_flight_bytes: the window W; None takes the largest storage or 1/48 of all, whichever is more, and on a GPU
            twice that.
        memory_budget_bytes: stop as soon as the predicted peak is at most this; None means as low as possible.

    Raises:
        BudgetError: no choice of storages brings the predicted peak under the budget.
    """
    positions = joint.positions()
    marker = positions[joint.marker]
    num_positions = len(positions)
    intervals = find_live_intervals(joint.graph, alias_sets)
    before = memory_profile(intervals.values(), num_positions)

    moves = [_describe(candidate, positions, marker) for candidate in candidates if candidate.representative]
    window_bytes = in_flight_bytes or _default_window_bytes(moves)
    soon: set[int] = set()
    if keep_what_is_needed_soon:
        for idx, placement in _place(moves, {}, window_bytes, marker).items():
            if placement.release >= marker and placement.reload <= marker + 1:
                soon.add(idx)
    chosen = [move for move in moves if move.candidate.storage.idx not in soon]
    kept = {move.candidate.storage.idx: move for move in moves if move.candidate.storage.idx in soon}
    window_bytes = in_flight_bytes or _default_window_bytes(chosen)  # what stays may have been the largest

    def profile_of(selected: Sequence[_Move]) -> tuple[dict[int, _Placement], MemoryProfile]:
        placements = _place(selected, kept, window_bytes, marker)
        return placements, memory_profile(_apply(intervals, placements), num_positions)

    if keep_what_is_needed_soon or memory_budget_bytes is not None:
        placements, after = _fit_budget(chosen, profile_of, before, memory_budget_bytes)
    else:
        placements, after = profile_of(chosen)

    storages: list[SavedStorage] = []
    by_idx = {move.candidate.storage.idx: move for move in moves}
    for candidate in candidates:
        idx = candidate.storage.idx
        decision: Decision
        if idx in placements:
            decision = _decide(by_idx[idx], placements[idx])
        else:
            decision = Keep(candidate.reason_to_keep or (KEPT_SOON if idx in soon else KEPT_FITS))
        storages.append(_describe_storage(candidate, intervals, decision))
    return Plan(
        storages=tuple(storages),
        in_flight_bytes=window_bytes,
        peak_before_bytes=before.peak_bytes,
        peak_after_bytes=after.peak_bytes,
    )


def _default_window_bytes(moves: Sequence[_Move]) -> int:
    """Enough for one transfer to hide behind another's compute. A GPU computes through a window sooner than a CPU."""
    sizes = [move.size_bytes for move in moves]
    on_gpu = any(move.candidate.saved_nodes[0].meta["val"].device.type == "cuda" for move in moves)
    return max([*sizes, sum(sizes) // 48], default=0) * (2 if on_gpu else 1)


def _describe(candidate: Candidate, positions: dict[fx.Node, int], marker: int) -> _Move:
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
    return _Move(
        candidate=candidate,
        size_bytes=candidate.storage.hint_bytes,
        complete=positions[representative] + 1,
        last_forward_read=last_forward_read,
        first_backward_read=first_backward_read,
    )


def _place(moves: Sequence[_Move], kept: dict[int, _Move], window_bytes: int, marker: int) -> dict[int, _Placement]:
    """Release and reload positions of all moves under the in-flight window.

    ``kept`` storages are in memory when backward begins, so until they are read they use up the window.
    """
    release: dict[int, int] = {}
    leaving: collections.deque[_Move] = collections.deque()
    for move in sorted(moves, key=lambda move: (move.complete, move.candidate.storage.idx)):
        leaving.append(move)
        while len(leaving) > 1 and sum(other.size_bytes for other in leaving) > window_bytes:
            done = leaving.popleft()
            release[done.candidate.storage.idx] = max(move.complete, done.last_forward_read + 1)
    for move in leaving:
        release[move.candidate.storage.idx] = marker

    reload: dict[int, int] = {}
    returning: collections.deque[_Move] = collections.deque()
    place = marker + 1
    for move in sorted(
        [*moves, *kept.values()], key=lambda move: (move.first_backward_read, move.candidate.storage.idx)
    ):
        while returning and sum(other.size_bytes for other in returning) + move.size_bytes > window_bytes:
            place = returning.popleft().first_backward_read
        returning.append(move)
        if move.candidate.storage.idx not in kept:
            reload[move.candidate.storage.idx] = min(place, move.first_backward_read)
    return {idx: _Placement(release=min(release[idx], marker), reload=reload[idx]) for idx in release}


def _apply(intervals: dict[int, LiveInterval], placements: dict[int, _Placement]) -> list[LiveInterval]:
    result: list[LiveInterval] = []
    for idx, interval in intervals.items():
        placement = placements.get(idx)
        if placement is None:
            result.append(interval)
        else:
            result += split_interval(interval, release=placement.release, reload=placement.reload)
    return result


def _fit_budget(
    moves: Sequence[_Move],
    profile_of: Callable[[Sequence[_Move]], tuple[dict[int, _Placement], MemoryProfile]],
    before: MemoryProfile,
    budget_bytes: int | None,
) -> tuple[dict[int, _Placement], MemoryProfile]:
    """The fewest storages, latest reuse first (Belady), that bring the peak under the budget.

    Without a budget: under the peak that offloading all of them reaches. Where the peak stands elsewhere, such as among
    the gradients at the end of backward, what is needed again soon stays in memory at no cost.
    """
    # The latest reuse is the earliest in forward and the last in backward.
    order = sorted(moves, key=lambda move: (move.complete - move.first_backward_read, move.candidate.storage.idx))
    best = profile_of(order)
    if budget_bytes is None:
        budget_bytes = best[1].peak_bytes
    if before.peak_bytes <= budget_bytes:
        return {}, before
    if best[1].peak_bytes > budget_bytes:
        raise BudgetError(
            f"memory_budget_bytes is {budget_bytes}, but the predicted activation peak of this graph cannot get below "
            f"{best[1].peak_bytes} bytes (without offloading: {before.peak_bytes}). Raise the budget to at least that, "
            "or lower the batch size, min_tensor_bytes or in_flight_bytes."
        )
    low, high = 1, len(order)
    while low < high:
        middle = (low + high) // 2
        found = profile_of(order[:middle])
        if found[1].peak_bytes <= budget_bytes:
            best, high = found, middle
        else:
            low = middle + 1
    return best


def _decide(move: _Move, placement: _Placement) -> Offload:
    representative = move.candidate.representative
    assert representative is not None
    views = len(move.candidate.saved_nodes)
    return Offload(
        representative=representative.name,
        offload=move.complete,
        release=placement.release,
        reload=placement.reload,
        wait=move.first_backward_read,
        reason="away between forward and backward" + (f"; {views} saved views share it" if views > 1 else ""),
    )


def _describe_storage(candidate: Candidate, intervals: dict[int, LiveInterval], decision: Decision) -> SavedStorage:
    node = candidate.representative or candidate.saved_nodes[0]
    value = node.meta["val"]
    interval = intervals.get(candidate.storage.idx)
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
