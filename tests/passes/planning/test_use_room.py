"""What rows save is spent on further storages."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import layered_problem, transfer_problems

from ssdtrain_fx.passes.planning.place_transfers import choose_lowest_peak, floor_bytes
from ssdtrain_fx.passes.planning.simulate import ROUNDING, simulate
from ssdtrain_fx.passes.planning.transfer_problem import TransferProblem
from ssdtrain_fx.passes.planning.use_room import choose_within_time


def with_rows(problem: TransferProblem, share: float) -> TransferProblem:
    """Ops take a hundredth of the step for each storage, and this share of it in a row."""
    op_s = problem.step_s / 200
    hardware = dataclasses.replace(
        problem.hardware,
        copies_block_compute=True,
        offload_s=op_s,
        reload_s=op_s,
        next_offload_s=share * op_s,
        next_reload_s=share * op_s,
    )
    return dataclasses.replace(problem, hardware=hardware)


@given(transfer_problems(max_movables=12, max_positions=60), st.floats(0.0, 0.3), st.sampled_from([0.0, 0.2, 1.0]))
def test_the_time_is_kept_and_the_peak_is_no_higher(
    problem: TransferProblem, max_slowdown: float, share: float
) -> None:
    problem = with_rows(problem, share)
    alone = choose_lowest_peak(problem, max_slowdown=max_slowdown)
    found = choose_within_time(problem, max_slowdown=max_slowdown, floor_bytes=floor_bytes(problem))
    assert found.peak_bytes <= alone.peak_bytes
    assert found.simulation.exposed_s <= (max_slowdown + ROUNDING) * problem.step_s
    assert found.simulation == simulate(problem, found.placements)


@pytest.mark.parametrize("max_slowdown", [0.03, 0.06, 0.1])
def test_more_storages_move_where_rows_save_time(max_slowdown: float) -> None:
    problem = with_rows(layered_problem(16, hidden=5.0), 0.2)
    alone = choose_lowest_peak(problem, max_slowdown=max_slowdown)
    found = choose_within_time(problem, max_slowdown=max_slowdown, floor_bytes=floor_bytes(problem))
    assert len(found.placements) > 1.2 * len(alone.placements)
    assert found.peak_bytes < alone.peak_bytes
