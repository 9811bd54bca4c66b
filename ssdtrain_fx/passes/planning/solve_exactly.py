"""The lowest peak that any choice can reach within a slowdown, by mixed-integer programming (HiGHS).

A choice keeps, offloads or recomputes each storage, and places what is offloaded.

It is meant for evaluating planners on small graphs, not for training.

    minimise    peak
    such that   peak >= live bytes at every position
                a storage is away only when the clock allows it
                the step takes at most (1 + max_slowdown) * step_s

The clock follows the rules of :mod:`ssdtrain_fx.passes.planning.simulate`. Each rule is kept or relaxed, never
tightened:

    offload, reload   Take ``blocks_out_s`` and ``blocks_in_s`` of the compute stream. Ops at one position have the same
                      order as in the simulation.
    write             Writes run in the order of ``offload``. A write may begin when its offload is reached.
    release           Stalls until the storage has left: it is copied, one copy at a time, and all but the last
                      ``staging_bytes`` of the bytes offloaded so far are on the SSD.
                      Relaxed: the write latencies of as many storages as fit into staging are not counted.
    read              A read has the SSD to itself and begins when its reload is reached. The read with the earliest
                      wait goes first, and may interrupt another one.
                      Relaxed: the simulation reads after ``blocks_in_s``, and in the order of ``reload``.
    recomputation     Takes its seconds before the node at the wait, after all waits there. It frees the storage between
                      its last read in forward and its wait. What it reads must be back by then, and must not be
                      recomputed itself.
                      Relaxed: temporaries are not counted. The reload of a source that ends there takes its
                      ``blocks_in_s`` after the waits.
    forwarding        A storage needs no read if it may still be in staging when it is reloaded. This assumes that all
                      storages are offloaded and that reads always slow down the writes.
                      Relaxed: in the simulation it must really be in staging.

Hence ``lower_bound_bytes`` is a lower bound for every choice that the simulation allows. The placements found here
may take longer in the simulation. The caller has to simulate them: if they stay within the time there too, they are
optimal.

Storage k has one 0-1 variable per slot: in forward "released by this slot", in backward "still away in this slot". With
them, every transfer condition is a sum of bytes, so the relaxation is already close to the optimum:

    bytes released by slot p, offloaded from j on     <=  write rate * time from j to p  +  staging
    bytes away at p that are waited for until q       <=  read rate  * time from p to q

Not every position is a slot. Let h[p] be the live bytes at p without offloading. Let floor be the peak with every
storage away wherever it can be; no placement has a lower peak.

* Unless h[p] > max(h[p - 1], floor), all releases before p can be moved before p + 1. The bytes at p are then at most
  those at p - 1, or floor, and a later release never stalls for longer.
* Unless h[p - 1] > max(h[p], floor), all reloads before p can be moved before p - 1, except those whose wait is at p.
  This is the same argument in reverse: node p starts no later, and the reads begin earlier.
* Recomputation changes none of this: towards the marker, it only frees more. But sources may have to be back where a
  storage is recomputed, and may live until there, so these positions and the next ones are slots.
* Between two positions where a storage can start, leave, be reloaded or end, only the fixed bytes change. The position
  with the most fixed bytes represents all others.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import optimize, sparse

from ssdtrain_fx.passes.planning.remakes import Remake, with_remakes
from ssdtrain_fx.passes.planning.simulate import ROUNDING
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Placement, Placements, TransferProblem

SCALE = 1000.0
"""The program scales the step and the highest peak to this number, far above the solver's tolerance of 1e-6."""
TOLERANCE = 1e-7
"""Relative. Steps and peaks that differ by less count as equal."""

Term = tuple[int | None, float]
"""(variable, coefficient). The term of variable None is 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExactSolution:
    """The best placements found, and how far they can be from the optimum."""

    placements: Placements
    remade: tuple[int, ...]
    """The storages that are recomputed."""
    peak_bytes: int
    step_s: float
    """By the clock of this module, with every transfer as early as possible."""
    lower_bound_bytes: int
    """No placement has a lower peak."""
    gap: float
    """(peak - lower bound) / peak."""
    proven: bool
    """Whether the gap is at most the requested one."""
    slots: int
    """Number of positions with variables."""


def solve_exactly(
    problem: TransferProblem,
    *,
    max_slowdown: float,
    remakes: Sequence[Remake] = (),
    time_limit_s: float = 60,
    relative_gap: float = 0.005,
    compress: bool = True,
) -> ExactSolution:
    """Find the placements with the lowest peak whose step takes at most ``(1 + max_slowdown) * step_s``.

    At the time limit, the best placements so far are returned. In the worst case nothing is offloaded, which is always
    allowed.

    Args:
        remakes: the storages that may be recomputed. Their seconds count as added time.
        time_limit_s: limits the search. Building the program and the final linear program take additional time.
        compress: False gives every position its own variables. The optimum is the same; this is for tests.
    """
    peak_bytes = max(_live_bytes(problem), default=0)
    slots = _find_slots(problem, remakes, compress=compress)
    if not problem.movables:
        return ExactSolution({}, (), peak_bytes, problem.step_s, peak_bytes, 0.0, True, 0)
    program = _Program(problem, max_slowdown, slots, remakes)
    found = program.solve(time_limit_s=time_limit_s, relative_gap=relative_gap)
    lower_bound_bytes = max(program.floor_bytes, math.ceil(found.bound_bytes * (1 - TOLERANCE)))
    placements: Placements = {}
    remade: tuple[int, ...] = ()
    step_s = problem.step_s
    if found.values is not None:
        candidate, made = program.placements(found.values), program.remade(found.values)
        left = with_remakes(problem, [one for one in remakes if one.idx in made])
        candidate_peak_bytes = max(_live_bytes(left, candidate), default=0)
        if candidate_peak_bytes < peak_bytes:
            placements, remade, peak_bytes = candidate, made, candidate_peak_bytes
            step_s = program.shortest_step_s(found.values)
    lower_bound_bytes = min(lower_bound_bytes, peak_bytes)
    gap = (peak_bytes - lower_bound_bytes) / peak_bytes if peak_bytes else 0.0
    return ExactSolution(
        placements=placements,
        remade=remade,
        peak_bytes=peak_bytes,
        step_s=step_s,
        lower_bound_bytes=lower_bound_bytes,
        gap=gap,
        proven=gap <= max(relative_gap, 2 * TOLERANCE),
        slots=program.slot_count,
    )


def bound_in_parts_bytes(
    problem: TransferProblem, *, max_slowdown: float, remakes: Sequence[Remake] = (), time_limit_s: float = 60
) -> int:
    """No choice has a lower peak, even if it may move any part of a storage and keep the rest.

    The variables of :func:`solve_exactly` may then lie between 0 and 1. A part is charged its share of the seconds of
    the ops, so many parts cost no more than one, and this bound is too low rather than too high. What is recomputed is
    recomputed as a whole.
    """
    slots = _find_slots(problem, remakes, compress=True)
    if not problem.movables:
        return max(slots.keep_all_bytes, default=0)
    program = _Program(problem, max_slowdown, slots, remakes, in_parts=True)
    found = program.solve(time_limit_s=time_limit_s, relative_gap=TOLERANCE)
    return max(program.floor_bytes, math.ceil(found.bound_bytes * (1 - TOLERANCE)))


# -- positions ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Slots:
    """The positions where ops may be placed, and where the live bytes are constrained."""

    release_at: tuple[int, ...]
    """The last one is the marker."""
    reload_at: tuple[int, ...]
    """A reload may also be placed at its wait."""
    memory_at: tuple[int, ...]
    keep_all_bytes: tuple[int, ...]
    floor_bytes: int


def _find_slots(problem: TransferProblem, remakes: Sequence[Remake], *, compress: bool) -> _Slots:
    marker, num_positions = problem.marker, len(problem.node_s)
    keep_all = _live_bytes(problem)
    everywhere = {movable.idx: Placement(movable.earliest_release, movable.wait) for movable in problem.movables}
    floor_bytes = max(_live_bytes(problem, everywhere), default=0)
    if not compress:
        return _Slots(
            release_at=tuple(range(marker + 1)),
            reload_at=tuple(range(marker + 1, num_positions)),
            memory_at=tuple(range(num_positions)),
            keep_all_bytes=keep_all,
            floor_bytes=floor_bytes,
        )
    rises = [p for p in range(1, marker) if keep_all[p] > max(keep_all[p - 1], floor_bytes)]
    drops = [p for p in range(marker + 2, num_positions) if keep_all[p - 1] > max(keep_all[p], floor_bytes)]
    made = {one.idx for one in remakes}
    made_at = {movable.wait for movable in problem.movables if movable.idx in made}
    release_at = (*rises, marker)
    after_made = {position + 1 for position in made_at if position + 1 < num_positions}
    reload_at = tuple(sorted({marker + 1, *drops, *made_at, *after_made}))
    changes = {0, num_positions, *release_at, *reload_at}
    for movable in problem.movables:
        changes |= {movable.live_start, movable.wait, movable.live_end}
        changes |= {movable.earliest_release} if movable.idx in made else set[int]()
    memory_at = [
        max(range(start, end), key=lambda p: problem.fixed_live_bytes[p])
        for start, end in itertools.pairwise(sorted(changes))
    ]
    return _Slots(
        release_at=release_at,
        reload_at=reload_at,
        memory_at=tuple(p for p in memory_at if keep_all[p] > floor_bytes),
        keep_all_bytes=keep_all,
        floor_bytes=floor_bytes,
    )


def _live_bytes(problem: TransferProblem, placements: Placements | None = None) -> tuple[int, ...]:
    change = [0] * (len(problem.node_s) + 1)
    for movable in problem.movables:
        spans = [(movable.live_start, movable.live_end)]
        placement = (placements or {}).get(movable.idx)
        if placement is not None:
            spans = [(movable.live_start, placement.release), (placement.reload, movable.live_end)]
        for start, end in spans:
            change[start] += movable.size_bytes
            change[end] -= movable.size_bytes
    moved = itertools.accumulate(change[:-1])
    return tuple(fixed + more for fixed, more in zip(problem.fixed_live_bytes, moved, strict=True))


# -- the program -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    values: Sequence[float] | None
    bound_bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Away:
    """The variables of one storage."""

    movable: Movable
    release_at: tuple[int, ...]
    released: tuple[int, ...]
    """Variables "released at release_at[i] or before". The last one tells whether the storage is offloaded at all."""
    reload_at: tuple[int, ...]
    """The last one is the wait."""
    still_away: tuple[int, ...]
    """Variables "reloaded after reload_at[i]". There is none for the wait."""

    @property
    def moved(self) -> int:
        return self.released[-1]

    def at(self, position: int, marker: int) -> int | None:
        """The variable that tells whether the storage is away at ``position``, or None if it never is."""
        if position <= marker:
            slot = bisect.bisect_right(self.release_at, position)
            return self.released[slot - 1] if slot else None
        if position >= self.movable.wait:
            return None
        slot = bisect.bisect_right(self.reload_at, position)
        return self.still_away[slot - 1] if slot else self.moved


class _Program:
    """Variables and rows. Each row requires a sum of terms to be at least a number. Times are in ``unit_s``."""

    def __init__(
        self,
        problem: TransferProblem,
        max_slowdown: float,
        slots: _Slots,
        remakes: Sequence[Remake],
        *,
        in_parts: bool = False,
    ) -> None:
        self.problem = problem
        self._in_parts = in_parts
        self._remakes = remakes
        self.floor_bytes = slots.floor_bytes
        self._slots = slots
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._is_integer: list[bool] = []
        self._row_of: list[int] = []
        self._column_of: list[int] = []
        self._coefficient: list[float] = []
        self._at_least: list[float] = []

        self._unit_s = (problem.step_s or 1.0) / SCALE
        self._unit_bytes = (max(slots.keep_all_bytes, default=0) or 1) / SCALE
        self._clock = [0.0, *itertools.accumulate(seconds / self._unit_s for seconds in problem.node_s)]
        """When each position is reached without transfers."""
        self._slack = (max_slowdown + TOLERANCE) * self._clock[-1]
        self._head_start = self._find_staging_head_start()

        self._peak = self._add_variable(self.floor_bytes / self._unit_bytes, SCALE)
        self._away = [self._add_away(movable) for movable in problem.movables]
        self._remade = {one.idx: self._add_variable(0.0, 1.0, is_integer=True) for one in remakes}
        self._add_recomputations()
        self._add_memory()
        self._before, self._after = self._add_stream()
        self._add_writes()
        self._add_reads()

    @property
    def slot_count(self) -> int:
        return len(self._slots.release_at) + len({p for away in self._away for p in away.reload_at})

    # -- solving -------------------------------------------------------------------------------------------------------

    def solve(self, *, time_limit_s: float, relative_gap: float) -> _Found:
        result = self._run(
            self._peak,
            self._lower,
            self._upper,
            self._is_integer,
            {"time_limit": time_limit_s, "mip_rel_gap": relative_gap},
        )
        bound = result.mip_dual_bound if any(self._is_integer) else result.fun  # a linear program has no dual bound
        if bound is None or not math.isfinite(bound):
            bound = 0.0
        values = None if result.x is None else [float(value) for value in result.x]
        return _Found(values, bound * self._unit_bytes)

    def placements(self, values: Sequence[float]) -> Placements:
        """Convert the 0-1 variables to placements."""
        placements: dict[int, Placement] = {}
        for away in self._away:
            if values[away.moved] > 0.5:
                release = sum(values[variable] < 0.5 for variable in away.released)
                reload = sum(values[variable] > 0.5 for variable in away.still_away)
                placements[away.movable.idx] = Placement(away.release_at[release], away.reload_at[reload])
        return placements

    def remade(self, values: Sequence[float]) -> tuple[int, ...]:
        """The storages that are recomputed."""
        return tuple(idx for idx, variable in self._remade.items() if values[variable] > 0.5)

    def shortest_step_s(self, values: Sequence[float]) -> float:
        """Time of the step with the 0-1 variables fixed and every transfer as early as possible."""
        lower, upper = list(self._lower), list(self._upper)
        for variable, is_integer in enumerate(self._is_integer):
            if is_integer:
                lower[variable] = upper[variable] = round(values[variable])
        end = self._before[len(self.problem.node_s)]
        result = self._run(end, lower, upper, [False] * len(lower), {})
        return float((values if result.x is None else result.x)[end]) * self._unit_s

    def _run(
        self,
        minimised: int,
        lower: Sequence[float],
        upper: Sequence[float],
        is_integer: Sequence[bool],
        options: dict[str, float],
    ) -> Any:
        objective = np.zeros(len(lower))
        objective[minimised] = 1.0
        rows: Any = sparse.csr_array(
            (self._coefficient, (self._row_of, self._column_of)), shape=(len(self._at_least), len(lower))
        )
        # scipy's type stubs say float where its documentation says array.
        at_least: Any = np.array(self._at_least)
        variable_bounds: Any = (np.array(lower), np.array(upper))
        bounds = optimize.Bounds(*variable_bounds)
        constraint = optimize.LinearConstraint(rows, at_least, np.inf)
        return optimize.milp(
            objective,
            integrality=np.array(is_integer, dtype=int),
            bounds=bounds,
            constraints=constraint,
            options=options,
        )

    # -- building ------------------------------------------------------------------------------------------------------

    def _add_variable(self, lower: float, upper: float, *, is_integer: bool = False) -> int:
        self._lower.append(lower)
        self._upper.append(upper)
        self._is_integer.append(is_integer)
        return len(self._lower) - 1

    def _add_row(self, terms: Iterable[Term], at_least: float = 0.0) -> None:
        row = len(self._at_least)
        for variable, coefficient in terms:
            if variable is not None and coefficient:
                self._row_of.append(row)
                self._column_of.append(variable)
                self._coefficient.append(coefficient)
        self._at_least.append(at_least)

    def _add_away(self, movable: Movable) -> _Away:
        marker = self.problem.marker
        release_at = tuple(p for p in self._slots.release_at if p >= movable.earliest_release)
        reload_at = (*(p for p in self._slots.reload_at if p < movable.wait), movable.wait)
        whole = not self._in_parts
        released = tuple(
            self._add_variable(0.0, float(self._in_parts or self._can_have_left(movable, p)), is_integer=whole)
            for p in release_at
        )
        still_away = tuple(self._add_variable(0.0, 1.0, is_integer=whole) for _ in reload_at[:-1])
        for earlier, later in itertools.pairwise(released):
            self._add_row([(later, 1.0), (earlier, -1.0)])
        for earlier, later in itertools.pairwise([released[-1], *still_away]):
            self._add_row([(earlier, 1.0), (later, -1.0)])
        assert release_at[-1] == marker
        return _Away(movable, release_at, released, reload_at, still_away)

    def _add_recomputations(self) -> None:
        """A storage is kept, offloaded or recomputed; what it is recomputed from is in memory."""
        by_idx = {away.movable.idx: away for away in self._away}
        for one in self._remakes:
            remade, made = self._remade[one.idx], by_idx[one.idx]
            self._add_row([(made.moved, -1.0), (remade, -1.0)], -1.0)
            for source in one.sources:
                if source in self._remade:
                    self._add_row([(self._remade[source], -1.0), (remade, -1.0)], -1.0)
                if source in by_idx:
                    away = by_idx[source].at(made.movable.wait, self.problem.marker)
                    self._add_row([(away, -1.0), (remade, -1.0)], -1.0)

    def _can_have_left(self, movable: Movable, position: int) -> bool:
        """Whether the storage can have left by ``position`` if it is the only one offloaded."""
        least = max(self._blocks_out(movable) + self._copy_out(movable), self._write(movable) - self._head_start)
        return least <= self._clock[position] - self._clock[movable.offload] + self._slack

    def _add_memory(self) -> None:
        """The peak is at least the live bytes."""
        for position in self._slots.memory_at:
            terms: list[Term] = [(self._peak, 1.0)]
            for away in self._away:
                if away.movable.live_start <= position < away.movable.live_end:
                    variable = away.at(position, self.problem.marker)
                    terms.append((variable, away.movable.size_bytes / self._unit_bytes))
                if away.movable.earliest_release <= position < away.movable.wait:
                    terms.append((self._remade.get(away.movable.idx), away.movable.size_bytes / self._unit_bytes))
            terms += self._add_longer_lives(position)
            self._add_row(terms, self._slots.keep_all_bytes[position] / self._unit_bytes)

    def _add_longer_lives(self, position: int) -> list[Term]:
        """Storages that live at ``position`` only because others are recomputed from them there or later."""
        by_idx = {away.movable.idx: away.movable for away in self._away}
        longer: dict[int, int] = {}
        for one in self._remakes:
            for source in one.sources:
                if source in by_idx and by_idx[source].live_end <= position <= by_idx[one.idx].wait:
                    if source not in longer:
                        longer[source] = self._add_variable(0.0, 1.0)
                    self._add_row([(longer[source], 1.0), (self._remade[one.idx], -1.0)])
        return [(variable, -by_idx[source].size_bytes / self._unit_bytes) for source, variable in longer.items()]

    def _add_stream(self) -> tuple[dict[int, int], dict[int, int]]:
        """Add two times per position: before and after its offloads in forward, before and after its waits in backward.

        A release stalls before the first of them, or before the second if its offload is at the same position. A reload
        whose wait is at a later position takes its time after the second.
        """
        marker, num_positions = self.problem.marker, len(self.problem.node_s)
        offloads = {away.movable.offload for away in self._away}
        waits = {away.movable.wait for away in self._away}
        reloads = {p for p in self._slots.reload_at if p < max(waits, default=0)}
        positions = sorted({0, num_positions, *offloads, *self._slots.release_at, *reloads, *waits})
        before: dict[int, int] = {}
        after: dict[int, int] = {}
        for position in positions:
            start = self._clock[position]
            before[position] = after[position] = self._add_variable(start, start + self._slack)
            if position in offloads or position in waits:
                after[position] = self._add_variable(start, start + self._slack)
        for position, following in itertools.pairwise(positions):
            inside: list[Term] = []
            behind: list[Term] = []
            for away in self._away:
                blocks_in = self._blocks_in(away.movable)
                if away.movable.wait == position:
                    behind.append((self._remade.get(away.movable.idx), -self._remake(away.movable)))
                if away.movable.offload == position:
                    inside.append((away.moved, -self._blocks_out(away.movable)))
                elif away.movable.wait == position:
                    inside.append((away.at(position - 1, marker), -blocks_in))
                elif marker < position < away.movable.wait and position in away.reload_at:
                    behind += [(away.at(position - 1, marker), -blocks_in), (away.at(position, marker), blocks_in)]
            if after[position] != before[position]:
                self._add_row([(after[position], 1.0), (before[position], -1.0), *inside])
            terms: list[Term] = [(before[following], 1.0), (after[position], -1.0), *behind]
            self._add_row(terms, self._clock[following] - self._clock[position])
        return before, after

    def _add_writes(self) -> None:
        """A release ends only after its storage has left."""
        marker = self.problem.marker
        latest = self._clock[marker] + self._slack
        staging_is_scarce = sum(self._write(away.movable) for away in self._away) > self._head_start
        left_before: int | None = None
        written_before: int | None = None
        for idx, away in enumerate(self._away):
            movable, moved = away.movable, away.moved
            # Earlier offloads at the same position come first.
            begins: list[Term] = [(self._before[movable.offload], -1.0)]
            for other in self._away[:idx]:
                if other.movable.offload == movable.offload:
                    begins.append((other.moved, -self._blocks_out(other.movable)))
            left = self._add_variable(0.0, latest)
            copy_out = self._copy_out(movable)
            self._add_row([(left, 1.0), *begins, (moved, -self._blocks_out(movable) - copy_out)])
            if left_before is not None:
                self._add_row([(left, 1.0), (left_before, -1.0), (moved, -copy_out)])
            left_before = left
            if staging_is_scarce:
                written = self._add_variable(0.0, latest + self._head_start)
                self._add_row([(written, 1.0), *begins, (moved, -self._write(movable))])
                if written_before is not None:
                    self._add_row([(written, 1.0), (written_before, -1.0), (moved, -self._write(movable))])
                self._add_row([(left, 1.0), (written, -1.0)], -self._head_start)
                written_before = written
            for position, released in zip(away.release_at, away.released, strict=True):
                stream = self._after if position == movable.offload else self._before
                latest_start = latest - self._clock[position]
                self._add_row([(stream[position], 1.0), (left, -1.0), (released, -latest_start)], -latest_start)
        # The same in bytes. The rows above imply this for integer values; for fractional values it is much stronger.
        for position in self._slots.release_at:
            for first, away in enumerate(self._away):
                if away.movable.offload > position:
                    break
                time: list[Term] = [(self._after[position], 1.0), (self._before[away.movable.offload], -1.0)]
                gone = [(other.at(position, marker), other.movable) for other in self._away[first:]]
                passes = self._clock[position] - self._clock[away.movable.offload]
                for duration, extra in ((self._write, self._head_start), (self._copy_out, 0.0)):
                    terms: list[Term] = [(variable, -duration(movable)) for variable, movable in gone if variable]
                    if -sum(coefficient for _, coefficient in terms) > passes + extra:
                        self._add_row([*time, *terms], -extra)

    def _add_reads(self) -> None:
        """A wait at q ends after all reads that have not begun at p and whose waits are at q or before."""
        marker = self.problem.marker
        by_wait = sorted(self._away, key=lambda away: away.movable.wait)
        forwarded_until = {away.movable.idx: self._may_be_forwarded_until(away.movable) for away in by_wait}
        waits = sorted({away.movable.wait for away in by_wait})
        starts = [(p, self._after[p], p + 1) for p in self._slots.reload_at if p in self._after]
        starts += [(p, self._before[p], p) for p in waits]
        for position, start, first_wait in starts:
            terms: list[Term] = []
            for wait in waits:
                if wait < first_wait:
                    continue
                for away in by_wait:
                    if away.movable.wait == wait:
                        unread = away.at(max(position - 1, forwarded_until[away.movable.idx]), marker)
                        if unread is not None:
                            terms.append((unread, -self._read(away.movable)))
                early = self._add_early_reads(position, first_wait, wait, forwarded_until)
                if -sum(coefficient for _, coefficient in (*terms, *early)) > self._clock[wait] - self._clock[position]:
                    self._add_row([(self._after[wait], 1.0), (start, -1.0), *terms, *early])

    def _add_early_reads(
        self, position: int, first_wait: int, last_wait: int, forwarded_until: Mapping[int, int]
    ) -> list[Term]:
        """The reads of storages that are waited for later, but that one recomputed by ``last_wait`` is made from."""
        by_idx = {away.movable.idx: away for away in self._away}
        early: dict[int, int] = {}
        for one in self._remakes:
            if first_wait <= by_idx[one.idx].movable.wait <= last_wait:
                for source in one.sources:
                    away = by_idx.get(source)
                    if away is None or away.movable.wait <= last_wait:
                        continue
                    unread = away.at(max(position - 1, forwarded_until[source]), self.problem.marker)
                    if unread is not None:
                        if source not in early:
                            early[source] = self._add_variable(0.0, 1.0)
                        self._add_row([(early[source], 1.0), (unread, -1.0), (self._remade[one.idx], -1.0)], -1.0)
        return [(variable, -self._read(by_idx[source].movable)) for source, variable in early.items()]

    def _may_be_forwarded_until(self, movable: Movable) -> int:
        """The last position where the storage can still be in staging, or the marker if there is none."""
        marker = self.problem.marker
        unwritten, latest = 0.0, 0.0
        for other in reversed(self.problem.movables):
            if (other.offload, other.idx) <= (movable.offload, movable.idx):
                unwritten += self._write(other)
                latest = max(latest, unwritten - (self._clock[marker] - self._clock[other.offload]))
        latest = min(latest, self._head_start) / self.problem.hardware.share_when_both * (1 + ROUNDING)
        return max(marker, bisect.bisect_left(self._clock, self._clock[marker] + latest) - 1)

    # -- durations -----------------------------------------------------------------------------------------------------

    def _write(self, movable: Movable) -> float:
        return self._units(self.problem.hardware.write.transfer_s(movable.size_bytes))

    def _read(self, movable: Movable) -> float:
        return self._units(self.problem.hardware.read.transfer_s(movable.size_bytes))

    def _remake(self, movable: Movable) -> float:
        return sum(self._units(one.seconds) for one in self._remakes if one.idx == movable.idx)

    def _copy_out(self, movable: Movable) -> float:
        """Duration of a copy that runs beside compute."""
        hardware = self.problem.hardware
        if hardware.copies_block_compute:
            return 0.0
        return self._units(hardware.copy_out.transfer_s(movable.size_bytes))

    def _blocks_out(self, movable: Movable) -> float:
        return self._units(self.problem.blocks_out_s(movable.size_bytes))

    def _blocks_in(self, movable: Movable) -> float:
        return self._units(self.problem.blocks_in_s(movable.size_bytes))

    def _units(self, duration_s: float) -> float:
        """Convert seconds to ``unit_s``, capped at more than any step allows: huge coefficients hurt the solver."""
        return min(duration_s / self._unit_s, 2 * (self._clock[-1] + self._slack) + self._head_start)

    def _find_staging_head_start(self) -> float:
        """How long before the end of its write a storage may have left: the time to write all of staging."""
        hardware = self.problem.hardware
        sums = itertools.accumulate(sorted(movable.size_bytes for movable in self.problem.movables))
        most_storages = sum(size_bytes <= hardware.staging_bytes for size_bytes in sums)
        work_s = hardware.staging_bytes / hardware.write.bytes_per_s + most_storages * hardware.write.latency_s
        return work_s / self._unit_s
