"""Steps in planned time: they take at least that, the host is ahead, and tensors leave as planned.

These tests do not compare times closely, because other processes may need the processor. The benchmark
``simulated_clock.py`` does.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import unittest.mock
from typing import TYPE_CHECKING, Any

import pytest
import torch
from device_under_test import DEVICE, TYPE, gpu
from paced import PacedDisk, PacedFile, PacedTraining
from replay import Replay, Scale, moving_bytes
from test_training import Gpt

from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.passes.planning.place_transfers import choose_all
from ssdtrain_fx.projection.trace import trace
from ssdtrain_fx.projection.transformer import Shape
from ssdtrain_fx.runtime.book.traffic import Direction
from ssdtrain_fx.testing import toy_hardware

if TYPE_CHECKING:
    from simulated_device import Simulator

pytestmark = pytest.mark.quick_on_cuda
CHUNK_BYTES = 4096
LAYERS = 3
DISK: Hardware = toy_hardware(
    device="simulated",
    write=Channel(bytes_per_s=4e6),
    read=Channel(bytes_per_s=4e6),
    copy_out=Channel(bytes_per_s=4e7),
    copy_in=Channel(bytes_per_s=4e7),
    flops_per_s={"float32": 2e8},
    memory_bytes_per_s=4e7,
    staging_bytes=32 * CHUNK_BYTES,
)
"""A step of the small GPT takes about half a second."""


def training(sim: Simulator, ssd_dir: str, hardware: Hardware = DISK, **options: Any) -> PacedTraining:
    chosen: dict[str, Any] = {
        "inner": "aot_eager",
        "policy": "auto",
        "min_tensor_bytes": 4096,
        "recompute": False,
        "replan": "off",
        "io": "posix",
        "ssd_dir": ssd_dir,
        "host_budget_bytes": hardware.staging_bytes,
        **options,
    }
    config = OffloadConfig(**chosen)
    return PacedTraining(sim, Gpt(LAYERS).to(TYPE), config, hardware, chunk_bytes=CHUNK_BYTES)


def tokens() -> torch.Tensor:
    return torch.randint(64, (4, 16)).to(TYPE)


def test_a_span_takes_its_time_and_no_more(sim: Simulator) -> None:
    """Three spans of 20 ms that the host enqueues at once: the clock of the device is exact, late threads or not."""
    x = torch.zeros(8, device=TYPE)
    sim.take_ends_s()
    for _ in range(3):
        with sim.paced(0.02):
            x += 1
    enqueued_s = time.perf_counter()
    sim.clock_s()
    assert time.perf_counter() - enqueued_s > 0.02
    ends_s = sim.take_ends_s()
    assert [later - earlier for earlier, later in itertools.pairwise(ends_s)] == pytest.approx([0.02, 0.02], abs=1e-6)
    assert x.tolist() == [3.0] * 8


def test_a_stream_that_waits_begins_when_the_other_one_is_over(sim: Simulator) -> None:
    x, side = torch.zeros(8, device=TYPE), gpu.Stream(device=DEVICE)
    with sim.paced(0.03):
        x += 1
    event = gpu.Event()
    event.record(gpu.current_stream())
    side.wait_event(event)
    with sim.paced(0.01, side):
        pass
    assert sim.clock_s(side) - sim.clock_s() == pytest.approx(0.01, abs=1e-6)


def test_copies_take_their_bytes_by_their_rate(sim: Simulator) -> None:
    x, pinned = torch.zeros(4096, dtype=torch.uint8, device=TYPE), torch.zeros(4096, dtype=torch.uint8).pin_memory()
    sim.pace_copies(out_bytes_per_s=4096 / 0.02, in_bytes_per_s=4096 / 0.05)
    try:
        sim.take_ends_s()
        with sim.paced(0.01):  # what follows does not wait for the host
            pass
        pinned.copy_(x, non_blocking=True)
        x.copy_(pinned, non_blocking=True)
        sim.clock_s()
    finally:
        sim.pace_copies()
    span, out, back = sim.take_ends_s()
    assert (out - span, back - out) == (pytest.approx(0.02, abs=1e-6), pytest.approx(0.05, abs=1e-6))


def test_directions_share_the_disk(sim: Simulator) -> None:
    """A write of 4 s and a read of 1 s, each at half its rate while both are busy: the read ends at 2 s, the write at
    5 s, and a write of 1 s after it at 6 s."""
    hardware = dataclasses.replace(DISK, write=Channel(bytes_per_s=1.0), read=Channel(bytes_per_s=1.0))
    disk = PacedDisk(hardware, lambda: 0.0)
    requests = [
        disk.request(direction, size)
        for direction, size in ((Direction.WRITE, 4), (Direction.READ, 1), (Direction.WRITE, 1))
    ]
    for now_s in (1.0, 1.5, 5.5, 7.0):
        disk.advance(now_s)
    assert [request.end_s for request in requests] == pytest.approx([5.0, 2.0, 6.0])
    assert disk.busy_s == pytest.approx([6.0, 2.0])


def test_what_is_planned_to_move_moves(sim: Simulator, ssd_dir: str) -> None:
    """The host is ahead of the device and has to wait for buffers and for reads. That is no stall while the device
    computes, so nothing stays in memory for it. A step takes about two seconds."""
    slow = Channel(bytes_per_s=DISK.write.bytes_per_s / 4)
    hardware = dataclasses.replace(
        DISK.computing_slower(4), write=slow, read=slow, staging_bytes=8 * CHUNK_BYTES, share_when_both=1.0
    )
    with training(sim, ssd_dir, hardware, max_slowdown=0.02).running() as paced:
        steps = [paced.train(tokens()) for _ in range(3)]
        plan = paced.step.plan
    assert plan.offloaded_bytes > 20 * CHUNK_BYTES
    assert steps[-1].statistics.kept_for_time_bytes < plan.offloaded_bytes / 2


def test_the_host_is_ahead_of_the_device(sim: Simulator, ssd_dir: str) -> None:
    """Where nothing stalls, the host has enqueued more than a layer of forward before the device has computed it. A
    busy machine needs a slower device for that."""
    for times_slower in (4, 4, 16):
        with training(sim, ssd_dir, DISK.computing_slower(times_slower), max_slowdown=0.0).running() as paced:
            for _ in range(2):
                ahead = [one for one in paced.train(tokens()).ahead if one.is_forward]
                if max(one.nodes for one in ahead) > len(ahead) / LAYERS:
                    return
    raise AssertionError("the host was never ahead by a layer")


def test_a_step_takes_the_planned_time_at_least(sim: Simulator, ssd_dir: str) -> None:
    with training(sim, ssd_dir, policy="all").running() as paced:
        paced.train(tokens())
        step = paced.train(tokens())
        plan = paced.step.plan
    assert plan.exposed_s > 0.1 * plan.step_s
    assert step.device_s > plan.step_s
    assert all(earlier <= later for earlier, later in itertools.pairwise(step.start_s))
    assert step.statistics.bytes_written > 0


SMALL = Shape(family="gpt", layers=2, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=1024, sequence=512)


@pytest.mark.only_cuda
@pytest.mark.parametrize("is_direct", [False, True])
def test_a_plan_is_replayed(sim: Simulator, ssd_dir: str, is_direct: bool) -> None:
    """A GPT of two layers, everything of which moves: the peak is the planned one, and every tensor comes back."""
    hardware = dataclasses.replace(DISK, staging_bytes=0 if is_direct else 64 * CHUNK_BYTES)
    problem = dataclasses.replace(trace(SMALL, micro_batch=4, hardware=hardware), host=None)
    choice = choose_all(problem)
    scale = Scale(byte_share=1 / 256, times_slower=2.0 / (problem.step_s + choice.simulation.exposed_s))
    assert len(choice.placements) > 10
    with Replay(sim, problem, choice, scale, ssd_dir=ssd_dir, chunk_bytes=CHUNK_BYTES, is_direct=is_direct) as replay:
        steps = [replay.run() for _ in range(2)]
    planned = moving_bytes(problem, choice)
    assert planned.peak_bytes < 0.7 * planned.kept_peak_bytes
    for step in steps:
        assert step.statistics.offloads == step.statistics.reloads == len(choice.placements)
        assert step.wrong_bytes == 0
        assert step.peak_bytes == pytest.approx(planned.peak_bytes, rel=0.05)  # blocks of the allocator
        assert step.device_s > problem.step_s


@pytest.mark.only_cuda
def test_a_replay_notices_bytes_that_are_wrong(sim: Simulator, ssd_dir: str) -> None:
    problem = dataclasses.replace(trace(SMALL, micro_batch=4, hardware=DISK), host=None)
    scale = Scale(byte_share=1 / 256, times_slower=0.5 / problem.step_s)
    with (
        unittest.mock.patch.object(PacedFile, "read", return_value=None),
        Replay(sim, problem, choose_all(problem), scale, ssd_dir=ssd_dir, chunk_bytes=CHUNK_BYTES) as replay,
    ):
        assert replay.run().wrong_bytes > 0
