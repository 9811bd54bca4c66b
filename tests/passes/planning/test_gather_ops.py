"""Ops in rows. A node takes one second, and the disk moves 10 bytes per second."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import transfer_problems

from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.planning.gather_ops import ROOM_SHARE, gather_ops
from ssdtrain_fx.passes.planning.place_transfers import SSD_SPEEDUPS, Choice, place
from ssdtrain_fx.passes.planning.simulate import ROUNDING, simulate, simulate_within
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Placement, TransferProblem
from ssdtrain_fx.testing import toy_hardware

A = Movable(idx=0, size_bytes=4, live_start=0, offload=1, earliest_release=1, wait=19, live_end=20)
B = Movable(idx=1, size_bytes=4, live_start=1, offload=2, earliest_release=2, wait=18, live_end=19)
C = Movable(idx=2, size_bytes=4, live_start=4, offload=5, earliest_release=5, wait=15, live_end=16)
APART = {0: Placement(2, 18), 1: Placement(3, 17), 2: Placement(6, 14)}
COSTS = {"copies_block_compute": True, "offload_s": 0.1, "reload_s": 0.1, "next_offload_s": 0.02, "next_reload_s": 0.03}


def problem(*movables: Movable, live_bytes: int = 0, at: int = 9, **hardware: float | None) -> TransferProblem:
    """Twenty nodes: forward is 0 to 8, the marker is 9. ``live_bytes`` are live ``at`` one position besides."""
    fixed = [1] * 20
    fixed[9] = 112  # rows may fill memory up to 100
    fixed[at] += live_bytes
    return TransferProblem(
        node_s=(1.0,) * 20,
        marker=9,
        fixed_live_bytes=tuple(fixed),
        movables=movables,
        hardware=dataclasses.replace(toy_hardware(10), **{**COSTS, **hardware}),
    )


def choice_of(given_problem: TransferProblem, placements: dict[int, Placement]) -> Choice:
    return Choice(placements, simulate(given_problem, placements), 1.0)


def gather(given_problem: TransferProblem) -> dict[int, Placement]:
    return gather_ops(given_problem, choice_of(given_problem, APART)).placements


def test_offloads_wait_for_the_next_one_and_waits_come_with_the_one_before() -> None:
    """Three writes from 5 on take 1.5 s, so all have left at 7; three reads before 15 take as long."""
    found = gather(problem(A, B, C))
    assert {placement.offload for placement in found.values()} == {5}
    assert {placement.wait for placement in found.values()} == {15}
    assert max(placement.release for placement in found.values()) == 7
    assert min(placement.reload for placement in found.values()) == 13


def test_a_storage_that_follows_in_a_row_takes_less_time() -> None:
    given_problem = problem(A, B, C)
    apart, together = (simulate(given_problem, placements) for placements in (APART, gather(given_problem)))
    assert apart.exposed_s == pytest.approx(0.6)
    assert together.exposed_s == pytest.approx(0.1 + 2 * 0.02 + 0.1 + 2 * 0.03)


def test_releases_and_reloads_go_to_where_the_next_row_is() -> None:
    """There is no room for all three at 5, while they are written. A and B may stay until C is offloaded."""
    found = gather(problem(A, B, C, live_bytes=90, at=5))
    assert [found[idx].offload for idx in range(3)] == [2, 2, 5]
    assert [found[idx].release for idx in range(3)] == [5, 5, 6]


def test_releases_and_reloads_form_rows_of_their_own() -> None:
    """There is no room for all three at 6. A and B may stay until C leaves, which is after the last row of offloads."""
    found = gather(problem(A, B, C, live_bytes=97, at=6))
    assert [found[idx].offload for idx in range(3)] == [2, 2, 5]
    assert [found[idx].release for idx in range(3)] == [6, 6, 6]


@pytest.mark.parametrize("at", [3, 4])
def test_no_row_where_memory_is_full(at: int) -> None:
    """C takes 5 bytes at 4. With 90 more there is room for one of the others until 5, with 97 for none."""
    with_room, full = (gather(problem(A, B, C, live_bytes=live_bytes, at=at)) for live_bytes in (80, 97))
    assert [placement.offload for placement in with_room.values()] == [5, 5, 5]
    assert 5 not in (full[0].offload, full[1].offload)


def test_memory_is_filled_up_to_a_share_of_the_peak() -> None:
    """In a row, A and B take 8 bytes of 9 that are live at 2."""

    def offload_of_a(peak_bytes: int) -> int | None:
        fixed = (1,) * 9 + (peak_bytes,) + (1,) * 10
        return gather(dataclasses.replace(problem(A, B, C), fixed_live_bytes=fixed))[0].offload

    fits = math.ceil(9 / ROOM_SHARE)
    assert offload_of_a(fits) == 2
    assert offload_of_a(fits - 1) is None


@pytest.mark.parametrize(
    "hardware",
    [{"next_offload_s": None}, {"copies_block_compute": False}, {"next_offload_s": 0.1, "next_reload_s": 0.1}],
)
def test_nothing_moves_where_rows_save_nothing(hardware: dict[str, float | None]) -> None:
    assert gather(problem(A, B, C, **hardware)) == APART


def with_rows(hardware: Hardware, rng: random.Random) -> Hardware:
    share = rng.choice([0.0, 0.3, 1.0])
    return dataclasses.replace(
        hardware,
        copies_block_compute=True,
        next_offload_s=share * hardware.offload_s,
        next_reload_s=share * hardware.reload_s,
    )


@given(
    transfer_problems(max_movables=12, max_positions=60),
    st.sampled_from(SSD_SPEEDUPS),
    st.randoms(use_true_random=False),
)
def test_rows_are_legal_and_cost_nothing(
    given_problem: TransferProblem, ssd_speedup: float, rng: random.Random
) -> None:
    """Every op stays within its bounds, no storage is added or dropped, and neither peak nor time rises. Memory is only
    used up to the limit where it was below."""
    given_problem = dataclasses.replace(given_problem, hardware=with_rows(given_problem.hardware, rng))
    choice = choice_of(given_problem, place(given_problem, given_problem.movables, ssd_speedup))
    limit_bytes = int(ROOM_SHARE * choice.peak_bytes)
    found = gather_ops(given_problem, choice)
    assert found.placements.keys() == choice.placements.keys()
    for movable in given_problem.movables:
        before, after = choice.placements[movable.idx], found.placements[movable.idx]
        offload, wait = after.offload_of(movable), after.wait_of(movable)
        assert movable.offload <= offload <= after.release <= given_problem.marker
        assert before.release <= after.release
        assert given_problem.marker < after.reload <= min(wait, before.reload)
        assert wait <= movable.wait
    assert found.simulation == simulate(given_problem, found.placements)
    assert found.simulation.exposed_s <= choice.simulation.exposed_s
    for was_bytes, is_bytes in zip(choice.simulation.live_bytes, found.simulation.live_bytes, strict=True):
        assert is_bytes <= max(was_bytes, limit_bytes)
    # The bound that refuses plans early knows of rows.
    allowed_s = found.simulation.exposed_s + ROUNDING * given_problem.step_s
    assert simulate_within(given_problem, found.placements, allowed_s=allowed_s) is not None
