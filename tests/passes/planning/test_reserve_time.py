"""Time in reserve where memory is available. A node takes one second, and the disk moves 10 bytes per second."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from problems import seeded_problems, transfer_problems

from ssdtrain_fx.passes.planning.place_transfers import SSD_SPEEDUPS, Choice, place
from ssdtrain_fx.passes.planning.reserve_time import ROOM_SHARE, reserve_time
from ssdtrain_fx.passes.planning.simulate import ROUNDING, simulate
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Placement, TransferProblem
from ssdtrain_fx.testing import toy_hardware

A = Movable(idx=0, size_bytes=20, live_start=0, offload=1, earliest_release=1, wait=18, live_end=19)
B = Movable(idx=1, size_bytes=20, live_start=1, offload=3, earliest_release=3, wait=16, live_end=17)


def choice_of(problem: TransferProblem, placements: dict[int, Placement]) -> Choice:
    return Choice(placements, simulate(problem, placements), 1.0)


def problem(*movables: Movable, peak_at: int = 9, peak_bytes: int = 100) -> TransferProblem:
    """Twenty nodes: forward is 0 to 8, the marker is 9."""
    fixed = [1] * 20
    fixed[peak_at] = peak_bytes
    return TransferProblem(
        node_s=(1.0,) * 20,
        marker=9,
        fixed_live_bytes=tuple(fixed),
        movables=movables,
        hardware=toy_hardware(10),
    )


def test_a_read_and_a_write_get_four_times_their_time() -> None:
    """Both take two seconds. The write begins at 1; the release moves from 3 to 9, and the reload from 16 to 10."""
    found = reserve_time(problem(A), choice_of(problem(A), {0: Placement(release=3, reload=16)}))
    assert found.placements == {0: Placement(release=9, reload=10)}
    assert found.simulation == simulate(problem(A), found.placements)
    assert found.peak_bytes == 100


def test_what_comes_first_is_asked_for_first() -> None:
    both = problem(A, B)
    found = reserve_time(both, choice_of(both, {0: Placement(3, 16), 1: Placement(5, 14)}))
    assert found.placements[1].reload < found.placements[0].reload
    assert found.placements[0].release < found.placements[1].release


def test_memory_is_filled_up_to_the_share_and_no_further() -> None:
    """The tensor's 20 bytes fit where the live bytes with them stay within that share of 100."""
    fits = int(100 * ROOM_SHARE) - 20

    def reload_if_live_at_13(live_bytes: int) -> int:
        fixed = tuple(100 if at == 9 else live_bytes if at == 13 else 1 for at in range(20))
        given_problem = dataclasses.replace(problem(A), fixed_live_bytes=fixed)
        choice = choice_of(given_problem, {0: Placement(release=3, reload=16)})
        return reserve_time(given_problem, choice).placements[0].reload

    assert reload_if_live_at_13(fits + 1) == 14
    assert reload_if_live_at_13(fits) == 10


def test_where_the_peak_stands_nothing_is_asked_for_earlier() -> None:
    in_backward = problem(A, peak_at=15)
    found = reserve_time(in_backward, choice_of(in_backward, {0: Placement(release=3, reload=16)}))
    assert found.placements[0].reload == 16


def test_on_a_disk_of_half_the_rate_nothing_stalls() -> None:
    both = problem(A, B)
    tight = choice_of(both, {0: Placement(3, 16), 1: Placement(5, 14)})
    slow = dataclasses.replace(both, hardware=toy_hardware(5))
    assert simulate(slow, tight.placements).stall_s > 0
    assert simulate(slow, reserve_time(both, tight).placements).stall_s == 0


@given(transfer_problems(), st.sampled_from(SSD_SPEEDUPS))
def test_it_costs_no_memory_and_no_time(given_problem: TransferProblem, ssd_speedup: float) -> None:
    before = choice_of(given_problem, place(given_problem, given_problem.movables, ssd_speedup))
    after = reserve_time(given_problem, before)
    assert after.simulation == simulate(given_problem, after.placements)
    assert after.peak_bytes <= before.peak_bytes
    assert after.simulation.exposed_s <= before.simulation.exposed_s + 1e-9 * given_problem.step_s
    assert after.placements.keys() == before.placements.keys()
    for movable in given_problem.movables:
        was, now = before.placements[movable.idx], after.placements[movable.idx]
        assert given_problem.marker < now.reload <= was.reload
        assert was.release <= now.release <= given_problem.marker
        assert now.tier == was.tier


def test_on_a_disk_of_half_the_rate_random_steps_stall_less() -> None:
    """Not every step stalls less: an earlier read may meet the writes, or wait for another read."""
    count = less = more = 0
    for given_problem in seeded_problems(300, max_movables=8, max_positions=40):
        hardware = given_problem.hardware
        slower = dataclasses.replace(
            hardware,
            write=dataclasses.replace(hardware.write, bytes_per_s=hardware.write.bytes_per_s / 2),
            read=dataclasses.replace(hardware.read, bytes_per_s=hardware.read.bytes_per_s / 2),
        )
        slow = dataclasses.replace(given_problem, hardware=slower)
        before = choice_of(given_problem, place(given_problem, given_problem.movables, 1.0))
        after = reserve_time(given_problem, before)
        was_s, now_s = (simulate(slow, choice.placements).stall_s for choice in (before, after))
        count += 1
        less += now_s < was_s - ROUNDING * given_problem.step_s
        more += now_s > was_s + ROUNDING * given_problem.step_s
    assert less > count / 3
    assert more < count / 100
