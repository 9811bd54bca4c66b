"""The exact solver, compared with brute force, with itself without compression, and with the simulation.

The oracle walks through the step once per placement, with a clock, a write queue and a list of reads. It does not use
slots, variables or rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import layered_problem, make_hardware, random_problem, seeded_problems, transfer_problems

from ssdtrain_fx.hardware import Channel
from ssdtrain_fx.passes.planning.simulate import simulate
from ssdtrain_fx.passes.planning.solve_exactly import ExactSolution, bound_in_parts_bytes, solve_exactly
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Placement, Placements, TransferProblem

SLOWDOWNS = (0.0, 0.03, 0.15)
TOLERANCE = 2e-7
INFINITE = Channel(bytes_per_s=1e18)
HARDLY_MOVING = Channel(bytes_per_s=1e-6)


# -- the oracle --------------------------------------------------------------------------------------------------------


def peak_of(problem: TransferProblem, placements: Placements) -> int:
    def is_live(movable: Movable, position: int) -> bool:
        placement = placements.get(movable.idx)
        is_away = placement is not None and placement.release <= position < placement.reload
        return movable.live_start <= position < movable.live_end and not is_away

    return max(
        fixed + sum(movable.size_bytes for movable in problem.movables if is_live(movable, position))
        for position, fixed in enumerate(problem.fixed_live_bytes)
    )


@dataclasses.dataclass(slots=True)
class Reads:
    """One read channel. The read with the earliest wait goes first."""

    now: float = 0.0
    left_s: dict[Movable, float] = dataclasses.field(default_factory=dict[Movable, float])

    def run_until(self, time_s: float) -> None:
        while self.left_s and self.now < time_s:
            first = min(self.left_s, key=lambda movable: movable.wait)
            passed = min(self.left_s[first], time_s - self.now)
            self.now += passed
            self.left_s[first] -= passed
            if self.now < time_s:
                del self.left_s[first]
        self.now = max(self.now, time_s)

    def finish(self, movable: Movable) -> float:
        """Finish all reads whose wait is not after that of ``movable``. Return when they are done."""
        for other in [other for other in self.left_s if other.wait <= movable.wait]:
            self.now += self.left_s.pop(other)
        return self.now


def step_of(problem: TransferProblem, placements: Placements) -> float:
    """Time of the step by the clock that solve_exactly describes."""
    hardware = problem.hardware
    moved = [movable for movable in problem.movables if movable.idx in placements]
    now = copied = written = 0.0
    left: dict[int, float] = {}
    reads = Reads()
    for position, node_s in enumerate(problem.node_s):
        at_once = [m for m in moved if placements[m.idx].release == m.offload == position]
        for movable in moved:
            if placements[movable.idx].release == position and movable not in at_once:
                now = max(now, left[movable.idx])
        for movable in moved:
            if movable.offload == position:
                size = movable.size_bytes
                written = max(written, now) + hardware.write.transfer_s(size)
                now += problem.blocks_out_s(size)
                copied = max(copied, now)
                if not hardware.copies_block_compute:
                    copied += hardware.copy_out.transfer_s(size)
                copied = max(copied, written - staged_s(problem))
                left[movable.idx] = copied
        for movable in at_once:
            now = max(now, left[movable.idx])
        waiting = [movable for movable in moved if movable.wait == position]
        for asked_for in (
            [movable for movable in waiting if placements[movable.idx].reload == position],
            [movable for movable in moved if placements[movable.idx].reload == position != movable.wait],
        ):
            reads.run_until(now)
            for movable in asked_for:
                if sum(problem.node_s[problem.marker : position]) >= forwarding_s(problem, movable):
                    reads.left_s[movable] = hardware.read.transfer_s(movable.size_bytes)
            back = reads.finish(waiting[0]) if waiting else now
            now = max(now + sum(problem.blocks_in_s(movable.size_bytes) for movable in asked_for), back)
            waiting = []
        now += node_s
    return now


def staged_s(problem: TransferProblem) -> float:
    """The most work that staging can hold."""
    hardware = problem.hardware
    sizes = [movable.size_bytes for movable in problem.movables]
    count = max(count for count in range(len(sizes) + 1) if sum(sorted(sizes)[:count]) <= hardware.staging_bytes)
    return hardware.staging_bytes / hardware.write.bytes_per_s + count * hardware.write.latency_s


def forwarding_s(problem: TransferProblem, movable: Movable) -> float:
    """For how long after the marker ``movable`` may still be in staging."""
    last = problem.movables.index(movable)
    backlog = 0.0
    for first in range(last + 1):
        work = sum(problem.hardware.write.transfer_s(m.size_bytes) for m in problem.movables[first : last + 1])
        backlog = max(backlog, work - sum(problem.node_s[problem.movables[first].offload : problem.marker]))
    return min(backlog, staged_s(problem)) / problem.hardware.share_when_both


def all_placements(problem: TransferProblem) -> list[Placements]:
    options: list[list[Placement | None]] = []
    for movable in problem.movables:
        releases = range(movable.earliest_release, problem.marker + 1)
        reloads = range(problem.marker + 1, movable.wait + 1)
        options.append([None, *(Placement(*places) for places in itertools.product(releases, reloads))])
    indices = [movable.idx for movable in problem.movables]
    return [
        {idx: placement for idx, placement in zip(indices, choice, strict=True) if placement is not None}
        for choice in itertools.product(*options)
    ]


def least_peak(problem: TransferProblem, placements: list[Placements], limit_s: float) -> int:
    """The least peak within ``limit_s``. ``placements`` must be sorted by peak."""
    fits = (choice for choice in placements if not choice or step_of(problem, choice) <= limit_s)
    return peak_of(problem, next(fits))


def repr_size(problem: TransferProblem) -> str:
    return f"{len(problem.movables)}x{len(problem.node_s)}"


# -- against the oracle ------------------------------------------------------------------------------------------------


def assert_optimal(problem: TransferProblem) -> None:
    choices = sorted(all_placements(problem), key=lambda choice: peak_of(problem, choice))
    for max_slowdown in SLOWDOWNS:
        limit_s = (1 + max_slowdown) * problem.step_s
        solution = solve_exactly(problem, max_slowdown=max_slowdown, relative_gap=0)
        assert solution.proven
        assert_consistent(problem, solution, max_slowdown)
        assert least_peak(problem, choices, limit_s * (1 + TOLERANCE)) <= solution.peak_bytes
        assert solution.peak_bytes <= least_peak(problem, choices, limit_s * (1 - TOLERANCE))


def assert_consistent(problem: TransferProblem, solution: ExactSolution, max_slowdown: float) -> None:
    """Check that the fields of the solution are consistent."""
    for movable in problem.movables:
        placement = solution.placements.get(movable.idx)
        if placement is not None:
            assert movable.earliest_release <= placement.release <= problem.marker
            assert problem.marker < placement.reload <= movable.wait
    assert solution.peak_bytes == peak_of(problem, solution.placements)
    assert solution.lower_bound_bytes <= solution.peak_bytes <= peak_of(problem, {})
    assert math.isclose(solution.step_s, step_of(problem, solution.placements), rel_tol=TOLERANCE)
    assert solution.step_s <= (1 + max_slowdown) * problem.step_s * (1 + TOLERANCE)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_better_among_all_placements(seed: int) -> None:
    assert_optimal(random_problem(random.Random(seed), num_movables=1 + seed % 3, num_positions=6 + seed // 2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 112))
def test_nothing_is_better_among_all_placements_of_larger_problems(seed: int) -> None:
    num_movables = 4 if seed % 20 == 19 else 2 + seed % 2
    assert_optimal(random_problem(random.Random(seed), num_movables=num_movables, num_positions=8 + seed % 5))


@pytest.mark.parametrize("max_slowdown", SLOWDOWNS)
@pytest.mark.parametrize("seed", range(8))
def test_no_placement_that_the_simulation_allows_is_below_the_bound(seed: int, max_slowdown: float) -> None:
    problem = random_problem(random.Random(seed), num_movables=2 + seed % 2, num_positions=8 + seed % 5)
    limit_s = (1 + max_slowdown) * problem.step_s * (1 + TOLERANCE)
    bound_bytes = solve_exactly(problem, max_slowdown=max_slowdown, relative_gap=0).lower_bound_bytes
    for placements in all_placements(problem):
        if peak_of(problem, placements) < bound_bytes:
            assert simulate(problem, placements).step_s > limit_s


def test_a_storage_leaves_while_the_next_ones_are_made() -> None:
    """A write takes 2 s, a read 1 s, a node 1 s. Only x has enough time to be away.

    position   0    1    2    3    4    marker  6    7    8     9
    x          made [=offload=]release                    reload wait
    y               made                                  wait
    z                         made                   wait
    live       x    xy   xy   yz   yz   yz      yz   yz   xy    x        2 bytes each
    """
    movables = tuple(
        Movable(
            idx=idx,
            size_bytes=2,
            live_start=start,
            offload=start + 1,
            earliest_release=start + 1,
            wait=wait,
            live_end=wait + 1,
        )
        for idx, (start, wait) in enumerate([(0, 9), (1, 8), (3, 7)])
    )
    problem = TransferProblem(
        node_s=(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0),
        marker=5,
        fixed_live_bytes=(0,) * 10,
        movables=movables,
        hardware=make_hardware(write=Channel(bytes_per_s=1.0), read=Channel(bytes_per_s=2.0)),
    )
    assert peak_of(problem, {}) == 6
    solution = solve_exactly(problem, max_slowdown=0.0)
    assert solution.peak_bytes == 4
    assert solution.placements[0].release == 3
    assert solution.step_s == pytest.approx(9.0)
    z_earlier = dataclasses.replace(movables[2], live_start=2, offload=3, earliest_release=3)
    crowded = dataclasses.replace(problem, movables=(*movables[:2], z_earlier))
    assert solve_exactly(crowded, max_slowdown=0.0).peak_bytes == 6  # all three are live at 2, before x can have left


def test_a_stall_buys_a_lower_peak() -> None:
    """One storage takes 4 s to write, and nothing hides it: a release right after the offload costs 4 s of 10 s."""
    movable = Movable(idx=7, size_bytes=4, live_start=0, offload=1, earliest_release=1, wait=9, live_end=10)
    problem = TransferProblem(
        node_s=(1.0,) * 10,
        marker=4,
        fixed_live_bytes=(0, 9, 0, 0, 0, 0, 0, 0, 0, 0),
        movables=(movable,),
        hardware=make_hardware(write=Channel(bytes_per_s=1.0), read=Channel(bytes_per_s=4.0)),
    )
    assert solve_exactly(problem, max_slowdown=0.39).peak_bytes == 13
    bought = solve_exactly(problem, max_slowdown=0.41)
    assert bought.peak_bytes == 9
    assert bought.placements[7].release == 1
    assert bought.step_s == pytest.approx(14.0)
    staged = dataclasses.replace(problem, hardware=dataclasses.replace(problem.hardware, staging_bytes=3))
    assert solve_exactly(staged, max_slowdown=0.11).peak_bytes == 9  # only 1 s of the write is exposed


def in_pieces(problem: TransferProblem, count: int) -> TransferProblem:
    """Every storage as ``count`` storages of equal size, which is what may be moved of it in parts."""
    pieces = [
        dataclasses.replace(movable, idx=count * movable.idx + piece, size_bytes=movable.size_bytes // count)
        for movable in problem.movables
        for piece in range(count)
    ]
    return dataclasses.replace(problem, movables=tuple(pieces))


def test_a_part_leaves_where_the_whole_has_no_time() -> None:
    """The storage takes 8 s to write, and 4 s may be added: half of it can be away in the peak."""
    movable = Movable(idx=0, size_bytes=8, live_start=0, offload=1, earliest_release=1, wait=9, live_end=10)
    problem = TransferProblem(
        node_s=(1.0,) * 10,
        marker=4,
        fixed_live_bytes=(0, 90, 0, 0, 0, 0, 0, 0, 0, 0),
        movables=(movable,),
        hardware=make_hardware(write=Channel(bytes_per_s=1.0), read=Channel(bytes_per_s=8.0)),
    )
    assert solve_exactly(problem, max_slowdown=0.4).peak_bytes == 98
    assert solve_exactly(in_pieces(problem, 8), max_slowdown=0.4).peak_bytes == 94
    assert bound_in_parts_bytes(problem, max_slowdown=0.4) == 94


# -- properties --------------------------------------------------------------------------------------------------------


@given(problem=transfer_problems(), slowdowns=st.tuples(*[st.sampled_from([0.0, 0.01, 0.05, 0.2, 1.0])] * 2))
@settings(max_examples=20, deadline=None)
def test_more_slowdown_never_gives_a_higher_peak(problem: TransferProblem, slowdowns: tuple[float, float]) -> None:
    low, high = (solve_exactly(problem, max_slowdown=slowdown, relative_gap=0) for slowdown in sorted(slowdowns))
    assert_consistent(problem, low, min(slowdowns))
    assert_consistent(problem, high, max(slowdowns))
    assert high.peak_bytes <= low.peak_bytes


@given(problem=transfer_problems())
@settings(max_examples=20, deadline=None)
def test_an_infinitely_fast_disk_reaches_the_working_set(problem: TransferProblem) -> None:
    hardware = make_hardware(write=INFINITE, read=INFINITE, copy_bytes_per_s=1e18)
    everywhere = {movable.idx: Placement(movable.earliest_release, movable.wait) for movable in problem.movables}
    solution = solve_exactly(dataclasses.replace(problem, hardware=hardware), max_slowdown=0.0, relative_gap=0)
    assert solution.proven
    assert solution.peak_bytes == peak_of(problem, everywhere)


@given(problem=transfer_problems())
@settings(max_examples=20, deadline=None)
def test_a_disk_that_hardly_moves_keeps_everything(problem: TransferProblem) -> None:
    hardware = make_hardware(write=HARDLY_MOVING, read=HARDLY_MOVING)
    solution = solve_exactly(dataclasses.replace(problem, hardware=hardware), max_slowdown=0.0, relative_gap=0)
    assert solution.placements == {}
    assert solution.proven
    assert solution.peak_bytes == peak_of(problem, {})
    assert solution.step_s == problem.step_s


@pytest.mark.parametrize("max_slowdown", SLOWDOWNS)
@pytest.mark.parametrize("problem", seeded_problems(8, min_movables=3, max_movables=6, max_positions=24), ids=repr_size)
def test_leaving_positions_out_loses_nothing(problem: TransferProblem, max_slowdown: float) -> None:
    compressed = solve_exactly(problem, max_slowdown=max_slowdown, relative_gap=0)
    full = solve_exactly(problem, max_slowdown=max_slowdown, relative_gap=0, compress=False)
    assert compressed.slots < full.slots
    assert_consistent(problem, full, max_slowdown)
    assert compressed.peak_bytes == full.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_leaving_positions_out_loses_nothing_in_larger_problems(seed: int) -> None:
    for problem in seeded_problems(20, min_movables=2, max_movables=8, max_positions=30, seed=1 + seed):
        compressed, full = (
            solve_exactly(problem, max_slowdown=0.03, relative_gap=0, compress=compress) for compress in (True, False)
        )
        assert compressed.proven and full.proven
        assert compressed.peak_bytes == full.peak_bytes


@pytest.mark.parametrize("max_slowdown", SLOWDOWNS)
@pytest.mark.parametrize("problem", seeded_problems(8, max_movables=3, max_positions=12), ids=repr_size)
def test_no_choice_of_pieces_is_below_the_bound_in_parts(problem: TransferProblem, max_slowdown: float) -> None:
    even = [dataclasses.replace(movable, size_bytes=2 * movable.size_bytes) for movable in problem.movables]
    problem = dataclasses.replace(problem, movables=tuple(even))
    bound_bytes = bound_in_parts_bytes(problem, max_slowdown=max_slowdown)
    for pieces in (problem, in_pieces(problem, 2)):
        assert bound_bytes <= solve_exactly(pieces, max_slowdown=max_slowdown, relative_gap=0.0).peak_bytes


@pytest.mark.slow
def test_two_hundred_problems_are_solved() -> None:
    for problem in seeded_problems(200, max_movables=8, max_positions=40):
        solution = solve_exactly(problem, max_slowdown=0.03)
        assert solution.proven
        assert_consistent(problem, solution, 0.03)


def test_a_network_of_six_layers_is_solved() -> None:
    problem = layered_problem(6)
    solution = solve_exactly(problem, max_slowdown=0.02)
    assert_consistent(problem, solution, 0.02)
    assert solution.proven
    assert solution.gap <= 0.005
    assert solution.peak_bytes < peak_of(problem, {})


def test_when_time_is_over_the_bound_is_still_a_bound() -> None:
    problem = layered_problem(10)
    solution = solve_exactly(problem, max_slowdown=0.02, time_limit_s=0.05)
    assert_consistent(problem, solution, 0.02)
    everywhere = {movable.idx: Placement(movable.earliest_release, movable.wait) for movable in problem.movables}
    assert peak_of(problem, everywhere) <= solution.lower_bound_bytes


def test_nothing_to_move() -> None:
    problem = random_problem(random.Random(0), num_movables=0, num_positions=8)
    solution = solve_exactly(problem, max_slowdown=0.0)
    assert solution.proven
    assert solution.placements == {}
    assert solution.peak_bytes == solution.lower_bound_bytes == max(problem.fixed_live_bytes)
