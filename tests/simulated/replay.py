"""The plan of a large model, on the simulated device: every op of the runtime, at a share of its bytes and slower.

The planner's numbers are enough: nodes take their planned time and compute nothing, and tensors have the planned sizes,
positions and lives. Engine, threads, staging, side streams and the order of all ops are those of training. Each tensor
holds a number of its own, which is compared on the device when backward has it again.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from device_under_test import DEVICE, gpu
from paced import PacedDisk, PacedFile, RunAhead
from torch import Tensor

from ssdtrain_fx import Statistics
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.passes.decisions.plan_offloads import planned_times
from ssdtrain_fx.passes.planning.place_transfers import Choice
from ssdtrain_fx.passes.planning.simulate import blocked_s, ops_in_order, peak_bytes
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Step, TransferProblem
from ssdtrain_fx.runtime.book.traffic import Direction
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.handles.tokens import Owner
from ssdtrain_fx.runtime.lanes.open_lanes import Parts
from ssdtrain_fx.runtime.lanes.threads.kvikio_choice import Kvikio
from ssdtrain_fx.runtime.lanes.threads.staged import BUFFERS_FOR_READS

if TYPE_CHECKING:
    from simulated_device import Simulator


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """What the replay makes of one byte and of one second."""

    byte_share: float
    times_slower: float

    def tensor_bytes(self, size_bytes: int) -> int:
        """At least 1, so that every tensor has an address."""
        return max(1, round(size_bytes * self.byte_share))

    def rates(self, hardware: Hardware) -> Hardware:
        """``hardware`` for whom the plan takes as long, times :attr:`times_slower`."""

        def channel(one: Channel) -> Channel:
            bytes_per_s = one.bytes_per_s * self.byte_share / self.times_slower
            return Channel(bytes_per_s=bytes_per_s, latency_s=one.latency_s * self.times_slower)

        return dataclasses.replace(
            hardware,
            write=channel(hardware.write),
            read=channel(hardware.read),
            copy_out=channel(hardware.copy_out),
            copy_in=channel(hardware.copy_in),
            staging_bytes=round(hardware.staging_bytes * self.byte_share),
        )


class _PacedDrive:
    """KvikIO over a paced disk that reads and writes device memory, whatever the streams do."""

    def __init__(self, simulator: Simulator, disk: PacedDisk) -> None:
        self._simulator = simulator
        self._disk = disk
        self._chunks: dict[int, bytes] = {}

    def CuFile(self, path: str, mode: str) -> _PacedDrive:
        return self

    def pwrite(self, data: Tensor, *, size: int, file_offset: int, task_size: int) -> _PacedDrive:
        self._disk.transfer(Direction.WRITE, size)
        self._chunks[file_offset] = self._simulator.peek(data)
        self._size = size
        return self

    def pread(self, data: Tensor, *, size: int, file_offset: int, task_size: int) -> _PacedDrive:
        self._disk.transfer(Direction.READ, size)
        self._simulator.poke(data, self._chunks[file_offset])
        self._size = size
        return self

    def get(self) -> int:
        return self._size

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedStep:
    """One step. Seconds are those of the replay, divided by :attr:`Scale.times_slower`."""

    device_s: float
    """By the clock of the device."""
    peak_bytes: float
    """Of the tensors that may move, as the device saw it, divided by :attr:`Scale.byte_share`."""
    wrong_bytes: int
    """Of all tensors that came back."""
    ahead_s: Sequence[tuple[int, float]]
    """By how much the host was ahead, at each node that takes time: position and seconds."""
    late_s: float
    """By how much the device was late at most. Large: the machine was too busy for these times."""
    statistics: Statistics


class Replay:
    """An engine on a paced disk, and a plan. Use it as a context manager."""

    def __init__(
        self,
        simulator: Simulator,
        problem: TransferProblem,
        choice: Choice,
        scale: Scale,
        *,
        ssd_dir: str,
        chunk_bytes: int,
        max_stall_share: float | None = None,
        is_direct: bool = False,
    ) -> None:
        """``chunk_bytes`` are those of the replay. ``is_direct``: through KvikIO, without staging."""
        self._simulator = simulator
        self._problem = problem
        self._choice = choice
        self._scale = scale
        self._rates = scale.rates(problem.hardware)
        self._ops = collections.defaultdict[int, list[tuple[Step, Movable]]](list)
        for at, step, movable in ops_in_order(problem, choice.placements):
            self._ops[at].append((step, movable))
        self._born = collections.defaultdict[int, tuple[list[Movable], list[Movable]]](lambda: ([], []))
        """Before the ops of a position, and after them."""
        self._dying = collections.defaultdict[int, list[Movable]](list)
        for movable in problem.movables:
            self._born[movable.live_start][movable.offload > movable.live_start].append(movable)
            placement = choice.placements.get(movable.idx)
            # A kernel may write its result in place of what it reads, which then ends, in the plan, where that begins.
            last = movable.live_end if placement is None else max(movable.live_end, placement.wait_of(movable) + 1)
            self._dying[last].append(movable)
        reloaded = [
            movable.idx
            for at in sorted(self._ops)
            for step, movable in self._ops[at]
            if step in (Step.RELOAD_AT_ONCE, Step.RELOAD)
        ]
        self._reload_order = {idx: order for order, idx in enumerate(reloaded)}
        disk = PacedDisk(self._rates)
        config = EngineConfig(
            ssd_dir=ssd_dir,
            io="posix",
            # The engine keeps a buffer for reads, which counts more for the fewer buffers of a replay.
            host_budget_bytes=self._rates.staging_bytes + BUFFERS_FOR_READS * chunk_bytes,
            max_stall_share=max_stall_share,
        )
        parts = Parts(open_file=lambda found: PacedFile(found[0], disk), chunk_bytes=chunk_bytes)
        if is_direct:
            drive = Kvikio(_PacedDrive(simulator, disk), gds=True)
            parts = dataclasses.replace(parts, choose_kvikio=lambda *_: drive)
        self._engine = Engine(config, parts)
        self._ops_s = blocked_s(problem, choice.placements)
        self._tensors: dict[int, Tensor] = {}
        self._owners: dict[int, Owner] = {}
        self._wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def __enter__(self) -> Replay:
        self._simulator.pace_copies(self._rates.copy_out.bytes_per_s, self._rates.copy_in.bytes_per_s)
        return self

    def __exit__(self, *_: object) -> None:
        self._simulator.pace_copies()
        self._engine.close()

    def run(self) -> ReplayedStep:
        problem, times_slower = self._problem, self._scale.times_slower
        gpu.synchronize()
        before = self._engine.statistics()
        self._simulator.count_paced()
        gpu.reset_peak_memory_stats()
        base_bytes = gpu.memory_allocated()
        self._wrong.zero_()
        ahead: list[tuple[int, float]] = []
        run_ahead = RunAhead(self._simulator)
        began_s = time.perf_counter()
        for at, node_s in enumerate(problem.node_s):
            for movable in self._dying.get(at, ()):
                self._tensors.pop(movable.idx, None)
            early, late = self._born.get(at, ((), ()))
            self._make(early)
            for step, movable in self._ops.get(at, ()):
                self._move(step, movable)
            self._make(late)
            if node_s > 0:
                duration_s = node_s * times_slower
                ahead.append((at, run_ahead.ask(duration_s)[1] / times_slower))
                with self._simulator.paced(duration_s):
                    self._wrong += 0
        ended_s = self._simulator.clock_s()
        peak_bytes = gpu.max_memory_allocated() - base_bytes
        self._tensors.clear()
        return ReplayedStep(
            device_s=(ended_s - began_s) / times_slower,
            peak_bytes=peak_bytes / self._scale.byte_share,
            wrong_bytes=int(self._wrong.item()),
            ahead_s=ahead,
            late_s=self._simulator.count_paced().latest_s / times_slower,
            statistics=self._engine.statistics().since(before),
        )

    def _make(self, movables: Iterable[Movable]) -> None:
        for movable in movables:
            byte_count = self._scale.tensor_bytes(movable.size_bytes)
            self._tensors[movable.idx] = x = torch.empty(byte_count, dtype=torch.uint8, device=DEVICE)
            with self._simulator.paced(0.0):
                x.fill_(_number(movable))

    def _delay(self, seconds: float) -> None:
        """Ops delay the device where the host has no time for them."""
        if seconds > 0:
            with self._simulator.paced(seconds * self._scale.times_slower):
                self._wrong += 0

    def _move(self, step: Step, movable: Movable) -> None:
        engine, idx = self._engine, movable.idx
        if step is Step.OFFLOAD:
            self._delay(self._ops_s[idx][0])
            times = planned_times(self._choice, movable)
            slower = self._scale.times_slower
            self._owners[idx] = engine.offload(
                self._tensors[idx],
                f"movable_{idx}",
                out_s=times.out_s * slower,
                back_s=times.back_s * slower,
                stall_s=times.stall_s * slower,
                host=self._choice.placements[idx].tier == "host",
                reload_order=self._reload_order[idx],
            )
        elif step in (Step.RELEASE, Step.RELEASE_AT_ONCE):
            engine.release(self._owners[idx], self._tensors.pop(idx), exclusive=True)
        elif step is Step.WAIT:
            engine.wait(self._tensors[idx], self._owners.pop(idx))
            self._tensors[idx] = engine.hand_over(self._tensors[idx])
            with self._simulator.paced(0.0):
                self._wrong += (self._tensors[idx] != _number(movable)).sum()
        else:
            self._delay(self._ops_s[idx][1])
            self._tensors[idx] = engine.reload(self._owners[idx], (self._scale.tensor_bytes(movable.size_bytes),))


def _number(movable: Movable) -> int:
    return movable.idx % 251 + 1


class MovingBytes(NamedTuple):
    """Peaks of the tensors that may move."""

    kept_peak_bytes: int
    """Without offloading."""
    peak_bytes: int
    """With the plan."""


def moving_bytes(problem: TransferProblem, choice: Choice) -> MovingBytes:
    alone = dataclasses.replace(problem, fixed_live_bytes=(0,) * len(problem.node_s))
    return MovingBytes(int(alone.kept_live_bytes.max()), peak_bytes(alone, choice.placements))


def layers_ahead(
    problem: TransferProblem, ahead_s: Sequence[tuple[int, float]], layers: int
) -> tuple[list[float], list[float]]:
    """In forward and in backward, by how many layers the host was ahead where a layer began, which takes as long as the
    others. At the begin of forward, it cannot be ahead."""
    found: tuple[list[float], list[float]] = [], []
    marker, elapsed_s = problem.marker, problem.elapsed_s
    for is_backward, (begin, end) in enumerate(((0, marker), (marker, len(problem.node_s)))):
        layer_s = (elapsed_s[end] - elapsed_s[begin]) / layers
        seen = -1 if is_backward else 0
        for at, seconds in ahead_s:
            if begin <= at < end:
                layer = int((elapsed_s[at] - elapsed_s[begin]) / layer_s)
                if layer > seen:
                    seen = layer
                    found[is_backward].append(seconds / layer_s)
    return found
