"""When the reads of the next backward begin: in time for its waits, and no earlier than that takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from problems import make_hardware, transfer_problems

from ssdtrain_fx.hardware import Channel
from ssdtrain_fx.passes.planning.place_transfers import SSD_SPEEDUPS, place
from ssdtrain_fx.passes.planning.read_ahead import ahead_times, read_ahead_spans
from ssdtrain_fx.passes.planning.transfer_problem import Movable, TransferProblem

SIZE_BYTES = 100


def chain_problem(*, read_s: float) -> TransferProblem:
    """Three forward nodes make a, b and c. Backward waits for c, b and a before its nodes of 2, 1 and 1 s."""
    hardware = make_hardware(read=Channel(bytes_per_s=SIZE_BYTES / read_s / SSD_SPEEDUPS[0]))
    movables = [
        Movable(
            idx=idx,
            size_bytes=SIZE_BYTES,
            live_start=idx,
            offload=idx + 1,
            earliest_release=idx + 1,
            wait=6 - idx,
            live_end=7,
        )
        for idx in range(3)
    ]
    return TransferProblem(
        node_s=(1.0, 1.0, 1.0, 0.0, 2.0, 1.0, 1.0),
        marker=3,
        fixed_live_bytes=(0,) * 7,
        movables=tuple(movables),
        hardware=hardware,
    )


@pytest.mark.parametrize(
    ("read_s", "lead_s"),
    [
        (0.5, (0.0, 0.0, 0.5)),  # only c is needed before it can be read
        (1.5, (0.0, 0.0, 1.5)),  # b is read in the 2 s before its wait, a behind it
        (2.0, (0.0, 1.0, 3.0)),  # reads are back to back: a begins at 1 s, b at -1 s, c at -3 s
    ],
)
def test_a_read_begins_before_backward_where_its_wait_comes_too_soon(
    read_s: float, lead_s: tuple[float, float, float]
) -> None:
    problem = chain_problem(read_s=read_s)
    times = ahead_times(problem, place(problem, problem.movables, SSD_SPEEDUPS[0]))
    assert [times[idx].lead_s for idx in range(3)] == pytest.approx(lead_s)
    # After the wait for c, the next wait comes when 2 s are left, after that for b when 1 s is left.
    assert [times[idx].left_s for idx in range(3)] == pytest.approx([0.0, 1.0, 2.0])


def test_what_is_read_ahead_is_in_memory_from_the_last_wait_that_is_early_enough() -> None:
    problem = chain_problem(read_s=2.0)
    placements = place(problem, problem.movables, SSD_SPEEDUPS[0])
    spans = read_ahead_spans(problem, placements, ahead_times(problem, placements))
    # The lead of c is 3 s. At the wait for c nothing is used yet, so it begins at the next wait, for b, with 2 s left.
    assert [(span.start, span.end, span.size_bytes) for span in spans] == [(5, 7, SIZE_BYTES), (6, 7, SIZE_BYTES)]


@given(transfer_problems())
def test_reads_that_begin_ahead_take_turns_and_end_before_their_waits(problem: TransferProblem) -> None:
    placements = place(problem, problem.movables, SSD_SPEEDUPS[0])
    times = ahead_times(problem, placements)
    began_s, idle_from_s = problem.elapsed_s[problem.marker], -float("inf")
    for movable in sorted(problem.movables, key=lambda movable: (movable.wait, movable.idx)):
        lead_s = times[movable.idx].lead_s
        if lead_s == 0:
            break
        assert began_s - lead_s >= idle_from_s - 1e-9
        idle_from_s = began_s - lead_s + problem.hardware.read.transfer_s(movable.size_bytes) / SSD_SPEEDUPS[0]
        assert idle_from_s <= problem.elapsed_s[movable.wait] + 1e-9
