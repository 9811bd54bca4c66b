"""The simulation, checked by hand: every number below can be verified with pencil and paper.

A node takes one second, and the disk moves 10 bytes per second, unless a test says otherwise.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import transfer_problems

from ssdtrain_fx.hardware import Channel
from ssdtrain_fx.passes.planning.place_transfers import place
from ssdtrain_fx.passes.planning.simulate import (
    Simulation,
    host_bytes,
    live_bytes,
    peak_bytes,
    simulate,
    simulate_within,
)
from ssdtrain_fx.passes.planning.transfer_problem import HostTier, Movable, Placement, Step, TransferProblem
from ssdtrain_fx.testing import toy_hardware

A = Movable(idx=0, size_bytes=20, live_start=0, offload=1, earliest_release=1, wait=9, live_end=10)
B = Movable(idx=1, size_bytes=20, live_start=1, offload=2, earliest_release=2, wait=8, live_end=9)
INSTANT = Channel(bytes_per_s=1e30)


def problem(*movables: Movable, num_nodes: int = 10, **hardware: Any) -> TransferProblem:
    """Ten nodes: forward is 0 to 4, the marker is 5."""
    return TransferProblem(
        node_s=(1.0,) * num_nodes,
        marker=5,
        fixed_live_bytes=(1,) * num_nodes,
        movables=movables,
        hardware=dataclasses.replace(toy_hardware(10), **hardware),
    )


def test_nothing_moves() -> None:
    result = simulate(problem(A, B), {})
    assert result.step_s == 10
    assert result.exposed_s == 0
    assert result.live_bytes == (21, 41, 41, 41, 41, 41, 41, 41, 41, 21)


def test_a_transfer_in_time_costs_nothing() -> None:
    """Written from 1 to 3, read from 7 to 9."""
    result = simulate(problem(A), {0: Placement(release=3, reload=7)})
    assert result.step_s == 10
    assert result.live_bytes == (21, 21, 21, 1, 1, 1, 1, 21, 21, 21)
    assert (result.write_busy_s, result.read_busy_s) == (2, 2)
    assert result.start_s == tuple(range(10))


def test_a_release_waits_for_the_write() -> None:
    """Written from 1 to 3, released at 2: the stall is one second, and all later nodes start later."""
    result = simulate(problem(A), {0: Placement(release=2, reload=6)})
    assert result.release_stall_s == {0: 1}
    assert result.wait_stall_s == {}
    assert result.exposed_s == result.stall_s == 1
    assert result.start_s == (0, 1, 3, 4, 5, 6, 7, 8, 9, 10)


def test_a_wait_waits_for_the_read() -> None:
    """The reload is right at the wait: the whole read is exposed."""
    result = simulate(problem(A), {0: Placement(release=4, reload=9)})
    assert result.wait_stall_s == {0: 2}
    assert result.exposed_s == 2


def test_writes_run_one_at_a_time() -> None:
    """A is written from 1 to 3, B from 3 to 5: the release of B at 3 stalls for 2 seconds."""
    result = simulate(problem(A, B), {0: Placement(3, 7), 1: Placement(3, 6)})
    assert result.release_stall_s == {1: 2}


def test_reads_run_one_at_a_time() -> None:
    """B is read from 6 to 8. A is reloaded at 7, read from 8 to 10, and needed at 9."""
    result = simulate(problem(A, B), {0: Placement(5, 7), 1: Placement(5, 6)})
    assert result.wait_stall_s == {0: 1}


def test_a_release_needs_the_bytes_in_staging_not_on_disk() -> None:
    """20 bytes of staging hold all of A: it has left once it is copied, which takes no time here."""
    assert simulate(problem(A, staging_bytes=20), {0: Placement(1, 7)}).exposed_s == 0
    # There is room for the last byte of B when 20 of 40 bytes are written: at 3.
    result = simulate(problem(A, B, staging_bytes=20), {0: Placement(1, 7), 1: Placement(2, 6)})
    assert result.release_stall_s == {1: 1}
    assert result.staging_peak_bytes == 20


def test_a_storage_takes_whole_chunks_of_staging() -> None:
    """Both have 20 bytes. Where a chunk has 40, there is room for B once A is written, at 3."""
    placements = {0: Placement(1, 7), 1: Placement(2, 6)}
    assert simulate(problem(A, B, staging_bytes=40, staging_chunk_bytes=20), placements).release_stall_s == {}
    result = simulate(problem(A, B, staging_bytes=40, staging_chunk_bytes=40), placements)
    assert result.release_stall_s == {1: 1}
    assert result.staging_peak_bytes == 40
    # With 15 bytes more, 7.5 bytes of A may be unwritten, which is at 2.25.
    more = problem(A, B, staging_bytes=55, staging_chunk_bytes=40)
    assert simulate(more, placements).release_stall_s == {1: 0.25}
    assert place(more, more.movables, 1.0)[1].release == 3


def test_copies_on_the_compute_thread_take_its_time() -> None:
    """A copy of 20 bytes takes 2 seconds out and 1 in. Each op takes half a second. The write runs at the same time."""
    result = simulate(
        problem(
            A,
            copies_block_compute=True,
            staging_bytes=100,
            copy_out=Channel(bytes_per_s=10),
            copy_in=Channel(bytes_per_s=20),
            offload_s=0.5,
            reload_s=0.5,
        ),
        {0: Placement(1, 6)},
    )
    assert result.stall_s == 0
    assert result.exposed_s == 2 + 0.5 + 1 + 0.5


def test_copies_beside_compute_delay_only_the_release() -> None:
    """The copy of A takes 2 seconds, from 1 to 3."""
    result = simulate(
        problem(A, staging_bytes=100, copy_out=Channel(bytes_per_s=10)), {0: Placement(release=2, reload=6)}
    )
    assert result.release_stall_s == {0: 1}


def test_latency_counts_once_for_each_transfer() -> None:
    slow = Channel(bytes_per_s=10, latency_s=0.5)
    result = simulate(problem(A, write=slow, read=slow), {0: Placement(3, 7)})
    assert result.release_stall_s == {0: 0.5}
    assert result.wait_stall_s == {0: 0.5}  # reload at 7.5, read by 10, needed at 9.5
    assert (result.write_busy_s, result.read_busy_s) == (2.5, 2.5)


def test_late_writes_and_reads_share_the_disk() -> None:
    """A is queued at 1, and 40 more bytes at 2: without reads, the disk writes until 7. The reload of A is at 6.

    The last 10 bytes of the writes and 10 bytes of A run together and take 2 seconds instead of 1. The other 10 bytes
    take 1 more. A is reloaded at 9, where it is needed. With the reload at 7 it would be reloaded at 9 too, because the
    read would run alone at the full rate.
    """
    big = dataclasses.replace(B, size_bytes=40, wait=18, live_end=19)
    placements = {0: Placement(1, 6), 1: Placement(2, 12)}
    halves = simulate(problem(A, big, num_nodes=20, staging_bytes=100), placements)
    assert halves.wait_stall_s == {}
    less = simulate(problem(A, big, num_nodes=20, staging_bytes=100, share_when_both=0.4), placements)
    assert less.wait_stall_s == {0: pytest.approx(0.5)}


def test_what_is_still_in_staging_is_not_read() -> None:
    """100 bytes are written from 2 to 12. The reload at 8 is served from staging."""
    big = dataclasses.replace(B, size_bytes=100)
    result = simulate(problem(big, staging_bytes=100), {1: Placement(2, 8)})
    assert result.forwarded_bytes == 100
    assert result.read_busy_s == 0
    assert result.exposed_s == 0


# The host tier: staging of 100 bytes, copies of 10 bytes per second out and 20 in.


def with_host(*movables: Movable, budget_bytes: int = 40, **hardware: Any) -> TransferProblem:
    staged: dict[str, Any] = {
        "device": "toy GPU",
        "staging_bytes": 100,
        "copy_out": Channel(bytes_per_s=10),
        "copy_in": Channel(bytes_per_s=20),
    }
    host = HostTier(budget_bytes=budget_bytes)
    return dataclasses.replace(problem(*movables, **{**staged, **hardware}), host=host)


def on_host(release: int, reload: int) -> Placement:
    return Placement(release, reload, tier="host")


def test_the_host_tier_costs_the_copies_only() -> None:
    """Copied out from 1 to 3 and in from 8 to 9. Held from the offload until the wait, at nodes 1 to 8."""
    result = simulate(with_host(A), {0: on_host(3, 8)}, record=True)
    assert result.exposed_s == 0
    assert result.live_bytes == (21, 21, 21, 1, 1, 1, 1, 1, 21, 21)
    assert (result.write_busy_s, result.read_busy_s, result.forwarded_bytes) == (0, 0, 0)
    assert transfers(result, "copy_out") == [(0, 1, 3)]
    assert transfers(result, "copy_in") == [(0, 8, 9)]
    assert host_bytes(with_host(A), {0: on_host(3, 8)}) == (0, 20, 20, 20, 20, 20, 20, 20, 20, 0)
    assert result.host_peak_bytes == result.staging_peak_bytes == 20


def test_copies_to_the_host_tier_take_their_turn() -> None:
    """A goes to the SSD and is copied from 1 to 3. B goes to the host tier and is copied from 3 to 5, so its release at
    3 stalls for 2 seconds. B alone does not stall."""
    result = simulate(with_host(A, B), {0: Placement(3, 7), 1: on_host(3, 6)})
    assert result.release_stall_s == {1: 2}
    assert simulate(with_host(A, B), {1: on_host(4, 6)}).exposed_s == 0


def test_copies_back_stand_in_line_but_not_behind_reads() -> None:
    """B is read from 6 to 8. The copy of A begins at 7 and takes a second, beside the read."""
    result = simulate(with_host(A, B, copy_out=INSTANT), {0: on_host(5, 7), 1: Placement(5, 6)}, record=True)
    assert transfers(result, "read") == [(1, 6, 8)]
    assert transfers(result, "copy_in") == [(0, 7, 8)]
    # Both are reloaded at 7 by copies of 2 seconds: A from 7 to 9, B from 9 to 11. B is needed at 8, so its wait stalls
    # for 3 seconds.
    slow = with_host(A, B, copy_out=INSTANT, copy_in=Channel(bytes_per_s=10))
    result = simulate(slow, {0: on_host(5, 7), 1: on_host(5, 7)}, record=True)
    assert transfers(result, "copy_in") == [(0, 7, 9), (1, 9, 11)]
    assert result.wait_stall_s == {1: 3}


def test_what_the_host_tier_holds_is_no_room_for_writes() -> None:
    """20 bytes of staging. A fills them at 1 and stays. B is offloaded at 2, written from 2 to 4, and leaves at 4."""
    small = with_host(A, B, staging_bytes=20, copy_out=INSTANT)
    result = simulate(small, {0: on_host(2, 7), 1: Placement(2, 6)})
    assert result.release_stall_s == {1: 2}
    assert result.staging_peak_bytes == 20
    # With the tiers exchanged, A is written from 1 to 3, and until 3 there is no room for B.
    result = simulate(small, {0: Placement(1, 7), 1: on_host(2, 6)})
    assert result.release_stall_s == {1: 1}


def test_what_stays_on_the_host_leaves_the_disk_to_others() -> None:
    """With B on the SSD too, the read of A would wait for its turn; see test_reads_run_one_at_a_time."""
    assert simulate(with_host(A, B, copy_out=INSTANT), {0: Placement(5, 7), 1: on_host(5, 7)}).exposed_s == 0


def test_the_host_tier_gives_out_whole_pieces() -> None:
    chunked = with_host(A, budget_bytes=32, staging_chunk_bytes=16)
    assert simulate(chunked, {0: on_host(3, 8)}).host_peak_bytes == 32
    hardware = chunked.hardware
    assert [hardware.staged_bytes(size_bytes) for size_bytes in (0, 1, 16, 17)] == [0, 16, 16, 32]


def test_the_host_tier_holds_no_more_than_its_budget() -> None:
    with pytest.raises(ValueError, match=r"fit this problem: 40 bytes in HostTier\(budget_bytes=39\)\."):
        simulate(with_host(A, B, budget_bytes=39), {0: on_host(5, 7), 1: on_host(5, 7)})
    with pytest.raises(ValueError, match="do not fit this problem: no host tier for storage 0"):
        simulate(problem(A), {0: on_host(5, 7)})


@given(problem=transfer_problems(), draw=st.data())
def test_tiers_change_channels_and_nothing_else(problem: TransferProblem, draw: st.DataObject) -> None:
    """Tiers do not change the live bytes, only storages of the SSD tier use the SSD, and staging is not exceeded."""
    total_bytes = sum(problem.hardware.staged_bytes(movable.size_bytes) for movable in problem.movables)
    hardware = dataclasses.replace(problem.hardware, device="toy GPU", copies_block_compute=False)
    hardware = dataclasses.replace(hardware, staging_bytes=total_bytes + hardware.staging_bytes)
    problem = dataclasses.replace(problem, hardware=hardware, host=HostTier(budget_bytes=total_bytes))
    placed = place(problem, problem.movables, 0.8)
    staying = draw.draw(st.sets(st.sampled_from(sorted(placed))) if placed else st.just(set[int]()))
    tiered = {idx: dataclasses.replace(one, tier="host" if idx in staying else "ssd") for idx, one in placed.items()}
    result = simulate(problem, tiered, record=True)
    assert result.live_bytes == simulate(problem, placed).live_bytes
    ssd = [movable.size_bytes for movable in problem.movables if movable.idx not in staying]
    assert result.write_busy_s == pytest.approx(sum(map(hardware.write.transfer_s, ssd)))
    assert {one.idx for one in result.transfers if one.channel == "write"} == placed.keys() - staying
    assert {idx for idx, _, _ in transfers(result, "copy_out")} == staying
    assert {idx for idx, _, _ in transfers(result, "copy_in")} == staying
    assert result.host_peak_bytes == max(host_bytes(problem, tiered), default=0)
    assert result.staging_peak_bytes <= hardware.staging_bytes
    released = {one.idx: one.end_s for one in result.events if one.step in (Step.RELEASE, Step.RELEASE_AT_ONCE)}
    waited = {one.idx: one.end_s for one in result.events if one.step is Step.WAIT}
    assert all(end_s <= released[idx] for idx, _, end_s in transfers(result, "copy_out"))
    assert all(end_s <= waited[idx] for idx, _, end_s in transfers(result, "copy_in"))


def transfers(result: Simulation, channel: str) -> list[tuple[int, float, float]]:
    return [(one.idx, one.begin_s, one.end_s) for one in result.transfers if one.channel == channel]


def test_transfers_are_reported_with_their_times() -> None:
    """A is written from 1 to 3, B from 3 to 5. B is read from 6 to 8, A from 8 to 10."""
    placements = {0: Placement(release=5, reload=7), 1: Placement(release=5, reload=6)}
    result = simulate(problem(A, B), placements, record=True)
    assert transfers(result, "write") == [(0, 1, 3), (1, 3, 5)]
    assert transfers(result, "read") == [(1, 6, 8), (0, 8, 10)]


def test_a_write_waits_for_its_turn_and_slows_down_beside_a_read() -> None:
    """At 4 bytes per second, A is written from 1 to 6. From 6 on, B is written and A is read, each at half the rate."""
    slow: dict[str, Any] = {"write": Channel(bytes_per_s=4), "read": Channel(bytes_per_s=4), "staging_bytes": 100}
    result = simulate(
        problem(A, B, **slow), {0: Placement(release=3, reload=6), 1: Placement(release=3, reload=8)}, record=True
    )
    assert transfers(result, "write") == [(0, 1, 6), (1, 6, 16)]
    assert transfers(result, "read") == [(0, 6, 16), (1, 16, 21)]


def test_a_reload_from_staging_is_reported_as_such() -> None:
    result = simulate(
        problem(A, staging_bytes=100, write=Channel(bytes_per_s=2)), {0: Placement(release=2, reload=7)}, record=True
    )
    assert transfers(result, "write") == [(0, 1, 11)]
    assert transfers(result, "read") == []
    ((_, begin_s, end_s),) = transfers(result, "staging")
    assert (begin_s, end_s) == (7, pytest.approx(7))


def test_stalls_are_reported_with_their_op() -> None:
    """Released a second too early."""
    result = simulate(problem(A), {0: Placement(release=2, reload=6)}, record=True)
    assert [(one.step, one.begin_s, one.end_s) for one in result.events] == [
        (Step.OFFLOAD, 1, 1),
        (Step.RELEASE, 2, 3),
        (Step.RELOAD, 7, 7),
        (Step.WAIT, 10, 10),
    ]


@given(transfer_problems())
def test_transfers_take_turns_and_add_up(random_problem: TransferProblem) -> None:
    """On any machine, writes run one at a time and in order, none before its offload. If reads do not slow writes down,
    each takes as long as alone."""
    placements = place(random_problem, random_problem.movables, 1.0)
    result = simulate(random_problem, placements, record=True)
    writes, reads = transfers(result, "write"), transfers(result, "read")
    assert len(writes) == len(placements) == len(reads) + len(transfers(result, "staging"))
    for channel in (writes, reads):
        for (_, begin_s, end_s), (_, next_s, _) in itertools.pairwise(channel):
            assert begin_s <= end_s <= next_s + 1e-9
    offered_s = {one.idx: one.begin_s for one in result.events if one.step is Step.OFFLOAD}
    assert all(begin_s >= offered_s[idx] - 1e-9 for idx, begin_s, _ in writes)
    assert sum(end_s - begin_s for _, begin_s, end_s in writes) >= result.write_busy_s * (1 - 1e-9)
    if random_problem.hardware.share_when_both == 1:
        assert sum(end_s - begin_s for _, begin_s, end_s in writes) == pytest.approx(result.write_busy_s)
        assert sum(end_s - begin_s for _, begin_s, end_s in reads) == pytest.approx(result.read_busy_s)
    taken_s = sum(one.end_s - one.begin_s for one in result.events)
    assert taken_s == pytest.approx(result.exposed_s, abs=1e-9)


def test_nothing_is_reported_unless_requested() -> None:
    result = simulate(problem(A), {0: Placement(release=3, reload=7)})
    assert (result.events, result.transfers) == ((), ())


@given(transfer_problems(), st.sampled_from([0.8, 1.0, 4.0]), st.floats(0, 2), st.integers(0, 2**32))
def test_giving_up_early_gives_up_on_nothing_that_is_allowed(
    drawn: TransferProblem, ssd_speedup: float, share: float, seed: int
) -> None:
    """With a limit on the exposed time, the result is that of the full simulation if this stays within the limit, and
    None otherwise."""
    chosen = random.Random(seed).sample(drawn.movables, k=len(drawn.movables) // 2)
    placements = place(drawn, chosen, ssd_speedup)
    full = simulate(drawn, placements)
    for allowed_s in (share * full.exposed_s, full.exposed_s):
        found = simulate_within(drawn, placements, allowed_s=allowed_s)
        assert found == (full if full.exposed_s <= allowed_s else None)


@given(transfer_problems(), st.integers(0, 2**32))
def test_live_bytes_count_what_is_there(drawn: TransferProblem, seed: int) -> None:
    """Compared with a sum over all storages at each position."""
    placements = place(drawn, random.Random(seed).sample(drawn.movables, k=len(drawn.movables) // 2), 1.0)

    def is_there(movable: Movable, position: int) -> bool:
        placement = placements.get(movable.idx)
        away = placement is not None and placement.release <= position < placement.reload
        return movable.live_start <= position < movable.live_end and not away

    expected = tuple(
        fixed + sum(movable.size_bytes for movable in drawn.movables if is_there(movable, position))
        for position, fixed in enumerate(drawn.fixed_live_bytes)
    )
    assert live_bytes(drawn, placements) == expected
    assert peak_bytes(drawn, placements) == max(expected)
