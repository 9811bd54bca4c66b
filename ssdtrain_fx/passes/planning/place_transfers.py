"""The fast planner: choose which storages to offload, and place their releases and reloads.

1. *Place.* For a given set of storages, a clock without stalls tells when each one has left and when its read has to
   begin:

       release   at the first node that starts after the storage has left
       reload    at the last node that starts early enough for the read to finish before the wait; reads are packed
                 backwards from their waits, so that each is as late as possible

   Given the order of transfers, no other positions need less memory, so a set has one placement for each
   ``ssd_speedup``. The placement assumes an SSD that is ``ssd_speedup`` times as fast as the real one. Above 1,
   storages take less memory, but the stream stalls where the SSD cannot keep up. Below 1, time is left in reserve.

2. *Rank.* Pick storages that lower the current peak, until no storage can lower it. Two orders are tried. Latest reuse
   first (Belady) is best where SSD time is scarce. Most bytes per second of compute-stream time first is best where the
   compute stream is the bottleneck.

3. *Choose.* Add storages in that order, in runs of growing length. Keep a run if the simulation stays within the
   allowed time and the peak does not rise. Where time is scarce, a local search then changes single storages and
   positions for as long as the peak falls. Finally, drop storages that do not lower the peak.

:func:`~ssdtrain_fx.passes.planning.simulate.simulate` makes every judgement. One simulation of n storages and m nodes
takes O(n log n + m). The number of simulations grows with log n, plus at most MAX_REFUSALS refused storages, plus the
tries of the local search.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from ssdtrain_fx.passes.planning.assign_tiers import fill_host_tier
from ssdtrain_fx.passes.planning.simulate import Simulation, live_bytes, peak_bytes, simulate, simulate_within
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Placement, Placements, TransferProblem

SSD_SPEEDUPS = (0.8, 1.0, 2.0, 4.0, float("inf"))
"""Tried in this order. 0.8 leaves a quarter of the transfer time in reserve for effects that are not simulated."""
MAX_REFUSALS = 64
"""Storages that may be refused before the planner gives up on the rest. A guess."""

MAX_TRIED_POSITIONS = 300_000
"""Limit of the local search: tries times positions. Small graphs are searched well, large ones stay fast. A guess."""
SMALL_PROBLEM = 12
"""With at most this many movables, the local search also starts from single storages and pairs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A placement and its simulation."""

    placements: dict[int, Placement]
    simulation: Simulation
    ssd_speedup: float
    """The placement is for an SSD that is this many times as fast; below 1 leaves time in reserve."""

    @property
    def peak_bytes(self) -> int:
        return self.simulation.peak_bytes


def choose_lowest_peak(
    problem: TransferProblem,
    *,
    max_slowdown: float,
    ssd_speedups: Iterable[float] = SSD_SPEEDUPS,
    max_tried_positions: int = MAX_TRIED_POSITIONS,
) -> Choice:
    """Find the lowest peak that exposes at most ``max_slowdown`` of the step, with few storages offloaded.

    If the storages that must move expose more alone, no other one is offloaded.
    """
    allowed_s = max_slowdown * problem.step_s
    found = [
        _grow(problem, ranked, ssd_speedup, allowed_s=allowed_s, goal_bytes=0)
        for ssd_speedup, ranked in _ranks(problem, ssd_speedups)
    ]
    found += _beginnings(problem, ssd_speedups, allowed_s=allowed_s)
    found.sort(key=lambda choice: choice.peak_bytes)  # stable: the smaller ssd_speedup wins
    best = found[0]
    floor = floor_bytes(problem)
    tries = max_tried_positions // max(1, len(problem.node_s))
    for start in found:
        improved, tries = _improve(problem, start, allowed_s=allowed_s, floor=floor, tries=tries)
        if improved.peak_bytes < best.peak_bytes:
            best = improved
    return _drop_unneeded(problem, best, goal_bytes=best.peak_bytes, allowed_s=allowed_s)


def choose_cheapest(
    problem: TransferProblem, *, budget_bytes: int, ssd_speedups: Iterable[float] = SSD_SPEEDUPS
) -> Choice | None:
    """Find the least exposed time with a peak of at most ``budget_bytes``. Return None if no placement reaches it."""
    best: Choice | None = None
    for ssd_speedup, ranked in _ranks(problem, ssd_speedups):
        found = _grow(problem, ranked, ssd_speedup, allowed_s=float("inf"), goal_bytes=budget_bytes)
        if found.peak_bytes > budget_bytes:
            continue
        found = _drop_unneeded(problem, found, goal_bytes=budget_bytes, allowed_s=float("inf"))
        if best is None or found.simulation.exposed_s < best.simulation.exposed_s:
            best = found
    return best


def choose_all(problem: TransferProblem) -> Choice:
    """Offload every storage, at any cost in time."""
    return _choice(problem, problem.movables, SSD_SPEEDUPS[0])


def floor_bytes(problem: TransferProblem) -> int:
    """The working-set floor: the peak when every storage is away wherever it is not needed, at any cost in time."""
    return peak_bytes(problem, place_all(problem))


def place_all(problem: TransferProblem) -> dict[int, Placement]:
    """Every storage is away wherever it is not needed, as if transfers took no time."""
    return _place_filled(problem, problem.movables, float("inf"))


def place(
    problem: TransferProblem, chosen: Iterable[Movable], ssd_speedup: float, *, on_host: Collection[int] = frozenset()
) -> dict[int, Placement]:
    """Place the releases and reloads of ``chosen``, as if the SSD and the copies were ``ssd_speedup`` times as fast.

    Args:
        on_host: indices of the storages that the host tier holds.
    """
    chosen = sorted(chosen, key=lambda movable: (movable.offload, movable.idx))
    clock = _Clock.of(problem, chosen)
    releases = _place_releases(problem, chosen, clock, ssd_speedup, on_host)
    reloads = _place_reloads(problem, chosen, clock, ssd_speedup, on_host)
    return {
        movable.idx: Placement(
            releases[movable.idx], reloads[movable.idx], tier="host" if movable.idx in on_host else "ssd"
        )
        for movable in chosen
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Clock:
    """Times without stalls, including the ops of the chosen storages."""

    reached_s: list[float]
    """When the stream reaches each position, before the transfers there."""
    start_s: list[float]
    """When the stream starts the node at each position, after the transfers there."""

    @classmethod
    def of(cls, problem: TransferProblem, chosen: Iterable[Movable]) -> _Clock:
        extra_s = np.zeros(len(problem.node_s))
        times = problem.moving_times
        for movable in chosen:
            taken = times[movable.idx]
            extra_s[movable.offload] += taken.out_s
            extra_s[movable.wait] += taken.in_s
        reached_s = np.zeros(len(extra_s) + 1)
        np.cumsum(problem.node_seconds + extra_s, out=reached_s[1:])
        return cls(reached_s[:-1].tolist(), (reached_s[:-1] + extra_s).tolist())


def _place_releases(
    problem: TransferProblem,
    chosen: Sequence[Movable],
    clock: _Clock,
    ssd_speedup: float,
    on_host: Collection[int] = frozenset(),
) -> dict[int, int]:
    hardware, marker, times = problem.hardware, problem.marker, problem.moving_times
    room_bytes = hardware.staging_bytes
    releases: dict[int, int] = {}
    copied_s = written_s = 0.0
    queued = 0
    writes: list[tuple[int, float, float]] = []
    """For each write: the staging that it and all before it take, how much of its own it fills, and when it ends."""
    oldest = 0
    for movable in chosen:
        size_bytes, offload = movable.size_bytes, movable.offload
        staged_bytes = hardware.staged_bytes(size_bytes)
        if movable.idx in on_host:
            room_bytes -= staged_bytes
        else:
            queued += staged_bytes
            written_s = max(written_s, clock.reached_s[offload]) + times[movable.idx].write_s / ssd_speedup
            writes.append((queued, size_bytes / staged_bytes, written_s))
        left_s = clock.start_s[offload]
        if not hardware.copies_block_compute:
            left_s = max(copied_s, left_s) + hardware.copy_out.transfer_s(size_bytes) / ssd_speedup
        must_be_written = min(queued, queued - room_bytes)
        if must_be_written > 0:
            while writes[oldest][0] < must_be_written:
                oldest += 1
            end, filled, end_s = writes[oldest]
            unwritten = (end - must_be_written) * filled
            left_s = max(left_s, end_s - unwritten / hardware.write.bytes_per_s / ssd_speedup)
        copied_s = left_s
        if movable.earliest_release <= offload and left_s <= clock.start_s[offload]:
            releases[movable.idx] = offload
        else:
            first = max(movable.earliest_release, min(offload + 1, marker))
            releases[movable.idx] = bisect.bisect_left(clock.reached_s, left_s, first, marker)
    return releases


def _place_reloads(
    problem: TransferProblem,
    chosen: Sequence[Movable],
    clock: _Clock,
    ssd_speedup: float,
    on_host: Collection[int] = frozenset(),
) -> dict[int, int]:
    hardware, reached_s, marker, times = problem.hardware, clock.reached_s, problem.marker, problem.moving_times
    reloads: dict[int, int] = {}
    next_read_s = next_copy_s = float("inf")
    for movable in sorted(chosen, key=lambda movable: (-movable.wait, -movable.idx)):
        needed_s = reached_s[movable.wait]
        if movable.idx in on_host:
            copy_s = 0.0 if hardware.copies_block_compute else hardware.copy_in.transfer_s(movable.size_bytes)
            begin_s = next_copy_s = min(needed_s, next_copy_s) - copy_s / ssd_speedup
        else:
            begin_s = next_read_s = min(needed_s, next_read_s) - times[movable.idx].read_s / ssd_speedup
        last = bisect.bisect_right(reached_s, begin_s, marker + 1, movable.wait + 1) - 1
        reloads[movable.idx] = max(last, marker + 1)
    return reloads


def _place_filled(problem: TransferProblem, chosen: Sequence[Movable], ssd_speedup: float) -> dict[int, Placement]:
    return place(problem, chosen, ssd_speedup, on_host=fill_host_tier(problem.host, chosen, problem.hardware))


def _choice(problem: TransferProblem, chosen: Sequence[Movable], ssd_speedup: float) -> Choice:
    placements = _place_filled(problem, chosen, ssd_speedup)
    return Choice(placements, simulate(problem, placements), ssd_speedup)


def _choice_within(
    problem: TransferProblem, chosen: Sequence[Movable], ssd_speedup: float, *, allowed_s: float, allowed_bytes: int
) -> Choice | None:
    """The same, or None if the exposed time is above ``allowed_s`` or the peak is above ``allowed_bytes``.

    Most choices are refused by their peak. That check comes first, because the simulation takes the most time.
    """
    placements = _place_filled(problem, chosen, ssd_speedup)
    if peak_bytes(problem, placements) > allowed_bytes:
        return None
    simulation = simulate_within(problem, placements, allowed_s=allowed_s)
    return None if simulation is None else Choice(placements, simulation, ssd_speedup)


def _grow(
    problem: TransferProblem, ranked: Sequence[Movable], ssd_speedup: float, *, allowed_s: float, goal_bytes: int
) -> Choice:
    """Add storages in the order of their rank for as long as the simulation accepts them."""
    chosen = list(problem.wished)
    best = _choice(problem, chosen, ssd_speedup)
    best_bytes = best.peak_bytes
    waiting = _optional(ranked)
    refusals = 0
    run = 1
    while waiting and best_bytes > goal_bytes and refusals < MAX_REFUSALS:
        run = min(run, len(waiting))
        more = [*chosen, *waiting[:run]]
        found = _choice_within(problem, more, ssd_speedup, allowed_s=allowed_s, allowed_bytes=best_bytes)
        if found is not None:
            chosen = more
            del waiting[:run]
            best, best_bytes = found, found.peak_bytes
            run *= 2
        elif run > 1:
            run = max(1, run // 4)
        else:
            del waiting[0]
            refusals += 1
    return best


def _beginnings(problem: TransferProblem, ssd_speedups: Iterable[float], *, allowed_s: float) -> Iterable[Choice]:
    """More starting points for the local search in small problems: all sets of one or two storages."""
    if len(problem.movables) > SMALL_PROBLEM:
        return
    for ssd_speedup, count in itertools.product(ssd_speedups, (1, 2)):
        for chosen in itertools.combinations(_optional(problem.movables), count):
            found = _choice(problem, (*problem.wished, *chosen), ssd_speedup)
            if found.simulation.exposed_s <= allowed_s:
                yield found


def _improve(
    problem: TransferProblem, choice: Choice, *, allowed_s: float, floor: int, tries: int
) -> tuple[Choice, int]:
    """Local search: change one or a few storages at a time, for as long as that lowers the peak, or leaves fewer
    positions at its height.

    Return the best choice and how many of the ``tries`` are left.
    """
    best, best_peak = choice, _highest(choice.simulation.live_bytes)
    improved = True
    while improved and best_peak[0] > floor:
        improved = False
        for placements in _neighbours(problem, best):
            if tries == 0:
                return best, 0
            tries -= 1
            found_bytes = peak_bytes(problem, placements)  # the fast check first
            if found_bytes > best_peak[0]:
                continue
            if found_bytes == best_peak[0] and _highest(live_bytes(problem, placements)) >= best_peak:
                continue
            simulation = simulate_within(problem, placements, allowed_s=allowed_s)
            if simulation is not None:
                best, improved = Choice(placements, simulation, best.ssd_speedup), True
                best_peak = _highest(simulation.live_bytes)
                break
    return best, tries


def _highest(profile: Sequence[int]) -> tuple[int, int]:
    """The peak, and at how many positions it is reached."""
    peak = max(profile, default=0)
    return peak, profile.count(peak)


def _neighbours(problem: TransferProblem, choice: Choice) -> Iterable[dict[int, Placement]]:
    """Placements with less at the peak: a later reload, an earlier release, one more storage, or an exchange."""
    peak_position = choice.simulation.live_bytes.index(choice.peak_bytes)
    placements = choice.placements
    by_idx = {movable.idx: movable for movable in problem.movables}

    def squeezed(idx: int, placement: Placement) -> Placement:
        movable = by_idx[idx]
        if placement.reload <= peak_position < movable.wait:
            return Placement(placement.release, peak_position + 1, placement.tier)
        if max(movable.earliest_release, movable.offload) <= peak_position < placement.release:
            return Placement(peak_position, placement.reload, placement.tier)
        return placement

    for idx, placement in placements.items():
        tighter = squeezed(idx, placement)
        if tighter != placement:
            yield {**placements, idx: tighter}

    chosen = [by_idx[idx] for idx in placements]
    others = [
        movable
        for movable in problem.movables
        if movable.idx not in placements and movable.earliest_release <= peak_position < movable.wait
    ]
    others.sort(key=lambda movable: (-movable.size_bytes, movable.earliest_release - movable.wait, movable.idx))
    # Smallest first: they free the most time per byte.
    drops = sorted(
        _optional(chosen), key=lambda movable: (movable.size_bytes, movable.wait - movable.offload, movable.idx)
    )
    for added, dropped in itertools.product(others, _drops(drops)):
        moved = [*(movable for movable in chosen if movable not in dropped), added]
        found = place(problem, moved, choice.ssd_speedup, on_host=fill_host_tier(problem.host, moved, problem.hardware))
        tighter = squeezed(added.idx, found[added.idx])
        starts = [found]
        if problem.host is None:  # where the others were put before, which earlier improvements may have changed
            starts.append({idx: placements.get(idx, placement) for idx, placement in found.items()})
        for start in starts:
            yield start
            if tighter != found[added.idx]:
                yield {**start, added.idx: tighter}


def _optional(movables: Iterable[Movable]) -> list[Movable]:
    return [movable for movable in movables if not movable.must_move]


def _drops(movables: Sequence[Movable]) -> Iterable[tuple[Movable, ...]]:
    """The sets to drop: none, each movable alone, and each with its successor."""
    yield ()
    for movable in movables:
        yield (movable,)
    yield from itertools.pairwise(movables)


def _drop_unneeded(problem: TransferProblem, choice: Choice, *, goal_bytes: int, allowed_s: float) -> Choice:
    """Drop storages, soonest reuse first, for as long as the peak stays at or below ``goal_bytes``."""
    chosen = [movable for movable in problem.movables if movable.idx in choice.placements]
    order = sorted(_optional(chosen), key=lambda movable: (movable.wait - movable.offload, movable.idx))
    best = choice
    refusals = 0
    run = max(1, len(order) // 2)
    first = 0
    while first < len(order) and refusals < MAX_REFUSALS:
        run = min(run, len(order) - first)
        dropped = {movable.idx for movable in order[first : first + run]}
        kept = [movable for movable in chosen if movable.idx not in dropped]
        still_allowed_s = min(allowed_s, best.simulation.exposed_s + 1e-12)
        found = _choice_within(problem, kept, choice.ssd_speedup, allowed_s=still_allowed_s, allowed_bytes=goal_bytes)
        if found is not None:
            chosen, best = kept, found
            first += run
            run *= 2
        elif run > 1:
            run = max(1, run // 4)
        else:
            first += 1
            refusals += 1
    return best


def _ranks(problem: TransferProblem, ssd_speedups: Iterable[float]) -> Iterable[tuple[float, list[Movable]]]:
    """The orders to try at each ``ssd_speedup``, without duplicates."""

    def latest_reuse(movable: Movable) -> tuple[float, ...]:
        return (movable.earliest_release - movable.wait, -movable.size_bytes, movable.idx)

    def bytes_per_s(movable: Movable) -> tuple[float, ...]:
        taken = problem.moving_times[movable.idx]
        return ((taken.out_s + taken.in_s) / max(1, movable.size_bytes), *latest_reuse(movable))

    clock = _Clock.of(problem, ())
    for ssd_speedup in ssd_speedups:
        alone: dict[int, Placement] = {}
        for movable in problem.movables:
            releases = _place_releases(problem, [movable], clock, ssd_speedup)
            reloads = _place_reloads(problem, [movable], clock, ssd_speedup)
            alone[movable.idx] = Placement(releases[movable.idx], reloads[movable.idx])
        first = _rank(problem, sorted(problem.movables, key=latest_reuse), alone)
        yield ssd_speedup, first
        second = _rank(problem, sorted(problem.movables, key=bytes_per_s), alone)
        if second != first:
            yield ssd_speedup, second


def _rank(problem: TransferProblem, waiting: Sequence[Movable], alone: Placements) -> list[Movable]:
    """The storages of ``waiting`` that lower the peak, in the order in which they do.

    The next storage is always the first whose span covers the current peak. The span is where it would be away if it
    were the only offloaded storage. Its bytes are then subtracted there.
    """
    profile = problem.kept_live_bytes.copy()
    release = np.array([alone[movable.idx].release for movable in waiting], dtype=np.int64)
    reload = np.array([alone[movable.idx].reload for movable in waiting], dtype=np.int64)
    ranked: list[Movable] = []
    while len(ranked) < len(waiting):
        position = profile.argmax()
        covering = (release <= position) & (position < reload)
        found = int(covering.argmax())
        if not covering[found]:
            break
        profile[release[found] : reload[found]] -= waiting[found].size_bytes
        reload[found] = release[found]  # an empty span: it is not found again
        ranked.append(waiting[found])
    return ranked
