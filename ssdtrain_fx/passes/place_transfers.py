"""Which storages move, and where their releases and reloads stand: the fast planner, on numbers only.

1. *Place.* For a given set of storages the clock says when each one has left and when its read has to begin:

       release   at the first node that starts when the storage has left
       reload    at the last node that starts early enough for the read to be over in front of the wait; reads are
                 packed backwards from their waits, so that each is as late as possible

   Both positions are the best ones for memory under the channel's order, so a set has one placement at one ``haste``.
   Haste h places as if the SSD were h times as fast as it is: what is asked for later than the SSD can serve it stalls,
   and takes less memory. h < 1 leaves time in reserve.

2. *Rank.* Storages that relieve the present peak, until it stands where nothing can move. Two orders are tried: latest
   reuse first (Belady), which is best where the SSD is short of time, and most bytes per second of the compute stream
   first, which is best where the stream is.

3. *Choose.* Take storages in that order, in runs of growing length, and keep what the simulation accepts: within
   the time allowed, and no higher peak than without it. Where time is short, exchange single storages for as long as
   that lowers the peak. Then drop what does not help the peak.

Every judgement comes from :func:`~ssdtrain_fx.passes.simulate.simulate`. With n storages and m nodes one simulation is
O(n log n + m); their number grows with log n, plus at most MAX_REFUSALS for storages that are refused, and at most
MAX_EXCHANGES.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from ssdtrain_fx.passes.simulate import Simulation, live_bytes, simulate
from ssdtrain_fx.passes.transfer_problem import Movable, Placement, Placements, TransferProblem

HASTES = (0.8, 1.0, 2.0, 4.0, float("inf"))
"""Tried in this order. 0.8 leaves a quarter of the transfer time in reserve for what the clock does not know."""
MAX_REFUSALS = 64
"""Storages that may be refused before the planner gives up on the rest. A guess."""

MAX_EXCHANGES = 300
"""Exchanges that may be tried. Enough for graphs of two layers to come within 3 % of the optimum."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A placement and what the simulation says of it."""

    placements: dict[int, Placement]
    simulation: Simulation
    haste: float

    @property
    def peak_bytes(self) -> int:
        return self.simulation.peak_bytes


def choose_lowest_peak(problem: TransferProblem, *, max_slowdown: float, hastes: Iterable[float] = HASTES) -> Choice:
    """The lowest peak whose exposed time is at most ``max_slowdown`` of the step; then the fewest storages for it."""
    allowed_s = max_slowdown * problem.step_s
    best = _choice(problem, [], 1.0)
    for haste, ranked in _ranks(problem, hastes):
        found = _grow(problem, ranked, haste, allowed_s=allowed_s, goal_bytes=0)
        if found.peak_bytes < best.peak_bytes:
            best = found
    best = _polish(problem, best, allowed_s=allowed_s)
    return _thin(problem, best, goal_bytes=best.peak_bytes, allowed_s=allowed_s)


def choose_cheapest(problem: TransferProblem, *, budget_bytes: int, hastes: Iterable[float] = HASTES) -> Choice | None:
    """The least exposed time whose peak is at most ``budget_bytes``; None where no placement gets there."""
    best: Choice | None = None
    for haste, ranked in _ranks(problem, hastes):
        found = _grow(problem, ranked, haste, allowed_s=float("inf"), goal_bytes=budget_bytes)
        if found.peak_bytes > budget_bytes:
            continue
        found = _thin(problem, found, goal_bytes=budget_bytes, allowed_s=float("inf"))
        if best is None or found.simulation.exposed_s < best.simulation.exposed_s:
            best = found
    return best


def choose_all(problem: TransferProblem) -> Choice:
    """Move everything, whatever it costs."""
    return _choice(problem, problem.movables, HASTES[0])


def floor_bytes(problem: TransferProblem) -> int:
    """The working-set floor: the peak when everything is away wherever nothing reads it, at any cost in time."""
    return _choice(problem, problem.movables, float("inf")).peak_bytes


def place(problem: TransferProblem, chosen: Iterable[Movable], haste: float) -> dict[int, Placement]:
    """Release and reload positions of ``chosen``, as if the SSD were ``haste`` times as fast."""
    chosen = sorted(chosen, key=lambda movable: (movable.complete, movable.idx))
    start_s = _start_times(problem, chosen)
    releases = _place_releases(problem, chosen, start_s, haste)
    reloads = _place_reloads(problem, chosen, start_s, haste)
    return {movable.idx: Placement(releases[movable.idx], reloads[movable.idx]) for movable in chosen}


def _start_times(problem: TransferProblem, chosen: Sequence[Movable]) -> list[float]:
    """When each node starts if nothing stalls; the time of the ops themselves included. One more entry for the end."""
    extra_s = [0.0] * (len(problem.node_s) + 1)
    for movable in chosen:
        extra_s[movable.complete] += problem.blocks_out_s(movable.size_bytes)
        extra_s[movable.wait] += problem.blocks_in_s(movable.size_bytes)
    return list(itertools.accumulate(map(sum, zip((0.0, *problem.node_s), extra_s, strict=True))))


def _place_releases(
    problem: TransferProblem, chosen: Sequence[Movable], start_s: Sequence[float], haste: float
) -> dict[int, int]:
    hardware, marker = problem.hardware, problem.marker
    releases: dict[int, int] = {}
    copied_s = 0.0
    queued = 0
    finished: list[tuple[int, float]] = []
    """Of each write: bytes queued up to its end, and when it ends."""
    oldest = 0
    for movable in chosen:
        size_bytes, begin_s = movable.size_bytes, start_s[movable.complete]
        queued += size_bytes
        last_s = finished[-1][1] if finished else 0.0
        written_s = max(last_s, begin_s - problem.blocks_out_s(size_bytes))
        written_s += hardware.write.transfer_s(size_bytes) / haste
        finished.append((queued, written_s))
        left_s = begin_s
        if not hardware.copies_block_compute:
            left_s = max(copied_s, begin_s) + hardware.copy_out.transfer_s(size_bytes) / haste
        # There is room in staging once all but the last `staging_bytes` are written.
        while oldest < len(finished) and finished[oldest][0] <= queued - hardware.staging_bytes:
            oldest += 1
        if queued > hardware.staging_bytes:
            end, end_s = finished[min(oldest, len(finished) - 1)]
            behind_s = (end - (queued - hardware.staging_bytes)) / hardware.write.bytes_per_s / haste
            left_s = max(left_s, end_s - behind_s)
        copied_s = left_s
        first = bisect.bisect_left(start_s, left_s, movable.earliest_release, marker)
        releases[movable.idx] = first
    return releases


def _place_reloads(
    problem: TransferProblem, chosen: Sequence[Movable], start_s: Sequence[float], haste: float
) -> dict[int, int]:
    hardware, marker = problem.hardware, problem.marker
    reloads: dict[int, int] = {}
    next_begin_s = float("inf")
    for movable in sorted(chosen, key=lambda movable: (-movable.wait, -movable.idx)):
        wait_s = start_s[movable.wait] - problem.blocks_in_s(movable.size_bytes)
        next_begin_s = min(wait_s, next_begin_s) - hardware.read.transfer_s(movable.size_bytes) / haste
        last = bisect.bisect_right(start_s, next_begin_s, marker + 1, movable.wait + 1) - 1
        reloads[movable.idx] = min(max(last, marker + 1), movable.wait)
    return reloads


def _choice(problem: TransferProblem, chosen: Iterable[Movable], haste: float) -> Choice:
    placements = place(problem, chosen, haste)
    return Choice(placements, simulate(problem, placements), haste)


def _grow(
    problem: TransferProblem, ranked: Sequence[Movable], haste: float, *, allowed_s: float, goal_bytes: int
) -> Choice:
    """Take storages in the order of their rank for as long as the simulation accepts them."""
    chosen: list[Movable] = []
    best = _choice(problem, chosen, haste)
    waiting = list(ranked)
    refusals = 0
    run = 1
    while waiting and best.peak_bytes > goal_bytes and refusals < MAX_REFUSALS:
        run = min(run, len(waiting))
        found = _choice(problem, [*chosen, *waiting[:run]], haste)
        accepted = found.simulation.exposed_s <= allowed_s and found.peak_bytes <= best.peak_bytes
        if accepted:
            chosen += waiting[:run]
            del waiting[:run]
            best = found
            run *= 2
        elif run > 1:
            run = max(1, run // 4)
        else:
            del waiting[0]
            refusals += 1
    return best


def _polish(problem: TransferProblem, choice: Choice, *, allowed_s: float) -> Choice:
    """Move one storage that covers the peak instead of one or two others, for as long as that lowers the peak."""
    best = choice
    tried = 0
    improved = True
    while improved and tried < MAX_EXCHANGES:
        improved = False
        peak_position = best.simulation.live_bytes.index(best.peak_bytes)
        chosen = [movable for movable in problem.movables if movable.idx in best.placements]
        others = [
            movable
            for movable in problem.movables
            if movable.idx not in best.placements and movable.earliest_release <= peak_position < movable.wait
        ]
        others.sort(key=lambda movable: (-movable.size_bytes, movable.earliest_release - movable.wait, movable.idx))
        # The smallest first: they free the most time for the fewest bytes.
        drops = sorted(chosen, key=lambda movable: (movable.size_bytes, movable.wait - movable.complete, movable.idx))
        for added, dropped in itertools.product(others, _drops(drops)):
            if sum(movable.size_bytes for movable in dropped) > added.size_bytes and len(dropped) > 1:
                continue
            tried += 1
            found = _choice(problem, [*(movable for movable in chosen if movable not in dropped), added], best.haste)
            if found.simulation.exposed_s <= allowed_s and found.peak_bytes < best.peak_bytes:
                best, improved = found, True
                break
            if tried >= MAX_EXCHANGES:
                break
    return best


def _drops(movables: Sequence[Movable]) -> Iterable[tuple[Movable, ...]]:
    """Nothing, each one, and each with the one behind it."""
    yield ()
    for movable in movables:
        yield (movable,)
    yield from itertools.pairwise(movables)


def _thin(problem: TransferProblem, choice: Choice, *, goal_bytes: int, allowed_s: float) -> Choice:
    """Leave in memory what need not move: soonest reuse first, for as long as the peak stays at ``goal_bytes``."""
    chosen = [movable for movable in problem.movables if movable.idx in choice.placements]
    order = sorted(chosen, key=lambda movable: (movable.wait - movable.complete, movable.idx))
    best = choice
    refusals = 0
    run = max(1, len(order) // 2)
    first = 0
    while first < len(order) and refusals < MAX_REFUSALS:
        run = min(run, len(order) - first)
        dropped = {movable.idx for movable in order[first : first + run]}
        kept = [movable for movable in chosen if movable.idx not in dropped]
        found = _choice(problem, kept, choice.haste)
        if found.peak_bytes <= goal_bytes and found.simulation.exposed_s <= min(
            allowed_s, best.simulation.exposed_s + 1e-12
        ):
            chosen, best = kept, found
            first += run
            run *= 2
        elif run > 1:
            run = max(1, run // 4)
        else:
            first += 1
            refusals += 1
    return best


def _ranks(problem: TransferProblem, hastes: Iterable[float]) -> Iterable[tuple[float, list[Movable]]]:
    """The orders to try at every haste; equal ones once."""

    def latest_reuse(movable: Movable) -> tuple[float, ...]:
        return (movable.earliest_release - movable.wait, -movable.size_bytes, movable.idx)

    def bytes_per_s(movable: Movable) -> tuple[float, ...]:
        cost_s = problem.blocks_out_s(movable.size_bytes) + problem.blocks_in_s(movable.size_bytes)
        return (cost_s / max(1, movable.size_bytes), *latest_reuse(movable))

    start_s = _start_times(problem, ())
    for haste in hastes:
        alone: dict[int, Placement] = {}
        for movable in problem.movables:
            releases = _place_releases(problem, [movable], start_s, haste)
            reloads = _place_reloads(problem, [movable], start_s, haste)
            alone[movable.idx] = Placement(releases[movable.idx], reloads[movable.idx])
        first = _rank(problem, sorted(problem.movables, key=latest_reuse), alone)
        yield haste, first
        second = _rank(problem, sorted(problem.movables, key=bytes_per_s), alone)
        if second != first:
            yield haste, second


def _rank(problem: TransferProblem, waiting: list[Movable], alone: Placements) -> list[Movable]:
    """Those of ``waiting`` that relieve the peak, in the order in which they do.

    Each one takes its bytes out of the span where it would be away if it had the SSD to itself. The next one is the
    first whose span covers the present peak.
    """
    profile = np.array(live_bytes(problem, {}), dtype=np.int64)
    ranked: list[Movable] = []
    while waiting:
        position = int(profile.argmax())
        covering = (i for i, m in enumerate(waiting) if alone[m.idx].release <= position < alone[m.idx].reload)
        found = next(covering, None)
        if found is None:
            break
        movable = waiting.pop(found)
        placement = alone[movable.idx]
        profile[placement.release : placement.reload] -= movable.size_bytes
        ranked.append(movable)
    return ranked
