"""Ops side by side: the peak, the time and the order of things stay."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from problems import transfer_problems

from ssdtrain_fx.passes.gather_ops import gather_ops
from ssdtrain_fx.passes.place_transfers import Choice, choose_lowest_peak
from ssdtrain_fx.passes.simulate import live_bytes, simulate
from ssdtrain_fx.passes.transfer_problem import Movable, Placement, TransferProblem
from ssdtrain_fx.testing import toy_hardware

A = Movable(idx=0, size_bytes=20, start=0, complete=1, earliest_release=2, wait=10, end=11)
B = Movable(idx=1, size_bytes=20, start=3, complete=4, earliest_release=5, wait=8, end=9)


def problem(fixed_live_bytes: tuple[int, ...] = (1,) * 12) -> TransferProblem:
    """Twelve nodes; forward is 0 to 5, the marker 6."""
    return TransferProblem(
        node_s=(1.0,) * 12,
        marker=6,
        fixed_live_bytes=fixed_live_bytes,
        movables=(A, B),
        hardware=dataclasses.replace(toy_hardware(1e3), copies_block_compute=True),
    )


def choice_of(one: TransferProblem) -> Choice:
    placements = {0: Placement(release=2, reload=9), 1: Placement(release=5, reload=7)}
    return Choice(placements, simulate(one, placements), haste=1.0)


def test_a_release_joins_an_offload_and_a_reload_joins_a_wait() -> None:
    tall = problem((100, *(1,) * 10, 100))
    found = gather_ops(tall, choice_of(tall))
    assert found.placements == {0: Placement(release=4, reload=8), 1: Placement(release=5, reload=7)}
    assert found.simulation == simulate(tall, found.placements)


def test_not_where_a_peak_would_rise() -> None:
    """Forward has its peak where a would stay, backward where it would come."""
    flat = problem((1, 1, 41, 41, 1, 1, 1, 1, 21, 1, 1, 1))
    choice = choice_of(flat)
    assert gather_ops(flat, choice).placements == choice.placements


def test_ops_of_a_gpu_stay_where_they_are() -> None:
    gpu = dataclasses.replace(problem(), hardware=toy_hardware(1e3))
    choice = choice_of(gpu)
    assert gather_ops(gpu, choice) is choice


@given(transfer_problems(), st.sampled_from([0.02, 0.5]))
def test_no_higher_peak_no_more_time_and_legal_positions(problem: TransferProblem, max_slowdown: float) -> None:
    hardware = dataclasses.replace(problem.hardware, copies_block_compute=True)
    problem = dataclasses.replace(problem, hardware=hardware, host=None)
    choice = choose_lowest_peak(problem, max_slowdown=max_slowdown)
    found = gather_ops(problem, choice)
    assert found.placements.keys() == choice.placements.keys()
    assert found.peak_bytes <= choice.peak_bytes
    assert found.simulation.exposed_s <= choice.simulation.exposed_s + 1e-9 * problem.step_s
    assert tuple(live_bytes(problem, found.placements)) == found.simulation.live_bytes
    for movable in problem.movables:
        if movable.idx in found.placements:
            before, after = choice.placements[movable.idx], found.placements[movable.idx]
            assert before.release <= after.release <= problem.marker
            assert problem.marker < after.reload <= before.reload
