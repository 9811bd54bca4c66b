"""Steps that take the time that the planner assumes, on the simulated device and a disk in memory.

Everything between is the package itself: ops, engine, I/O threads, staging, side streams. So what differs from the
planner's simulation is a fault of the one or the other:

    nodes     each takes its planned seconds of the compute stream; its kernels are small and run within that time
    copies    between pinned memory and the device, at the rates of the hardware profile
    disk      one queue per direction, with the rates, the latency and the sharing of the profile

Times are real, so choose seconds: what Python takes then does not count.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from device_under_test import gpu
from runtime_fakes import MemoryFile
from torch import Tensor, fx

from ssdtrain_fx import OffloadConfig, Statistics
from ssdtrain_fx.compiler.aot_eager import compile_with_aot_eager
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, RELOAD
from ssdtrain_fx.passes.pipeline import OffloadedStep
from ssdtrain_fx.runtime import ops
from ssdtrain_fx.runtime.book.traffic import Direction
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.engines import Engines
from ssdtrain_fx.runtime.lanes.open_lanes import Parts

if TYPE_CHECKING:
    from simulated_device import Simulator


class PacedDisk:
    """Queues of transfers in two directions. Each is served at its rate, and at a share of it while both are busy.

    A latency comes after a transfer and does not keep the next one waiting, as on a drive with a deep queue.
    """

    def __init__(self, hardware: Hardware, clock: Callable[[], float] = time.perf_counter) -> None:
        self._channels: tuple[Channel, Channel] = (hardware.write, hardware.read)
        self._share = hardware.share_when_both
        self._clock = clock
        self._changed = threading.Condition()
        self._queues: tuple[collections.deque[_Request], ...] = (collections.deque(), collections.deque())
        self._now_s = clock()
        self.busy_s = [0.0, 0.0]
        """For how long each direction had something to do, by :class:`Direction`."""

    def transfer(self, direction: Direction, byte_count: int) -> None:
        """Return when so many bytes have been moved, after everything that was requested before."""
        request = self.request(direction, byte_count)
        with self._changed:
            while not request.is_over:
                self._changed.wait(max(0.0, self._end_s(request) - self._clock()))
                self.advance(self._clock())
        left_s = request.end_s + self._channels[direction].latency_s - self._clock()
        if left_s > 0:
            time.sleep(left_s)

    def request(self, direction: Direction, byte_count: int) -> _Request:
        request = _Request(direction, byte_count / self._channels[direction].bytes_per_s)
        with self._changed:
            self.advance(self._clock())
            self._queues[direction].append(request)
            self._changed.notify_all()  # the others are served more slowly now
        return request

    def advance(self, now_s: float) -> None:
        """Serve the queues until ``now_s``."""
        while now_s > self._now_s:
            passed_s = now_s - self._now_s
            heads = [queue[0] for queue in self._queues if queue]
            if not heads:
                self._now_s = now_s
                return
            speed = self._share if len(heads) == 2 else 1.0
            passed_s = min(passed_s, *(head.left_s / speed for head in heads))
            self._now_s = min(now_s, self._now_s + passed_s)
            for head in heads:
                self.busy_s[head.direction] += passed_s
                head.left_s -= passed_s * speed
                if head.left_s <= 1e-9:
                    head.end_s, head.is_over = self._now_s, True
                    self._queues[head.direction].popleft()

    def _end_s(self, request: _Request) -> float:
        """When ``request`` would be over if no other came and the other direction ended first: it is asked again."""
        queue = self._queues[request.direction]
        return (
            self._now_s
            + sum(one.left_s for one in itertools.takewhile(lambda one: one is not request, queue))
            + (request.left_s)
        )


@dataclasses.dataclass(slots=True, eq=False)
class _Request:
    direction: Direction
    left_s: float
    """Seconds that the disk still needs for it, alone."""
    end_s: float = 0.0
    is_over: bool = False


class PacedFile(MemoryFile):
    """A file on a :class:`PacedDisk`."""

    def __init__(self, directory: str, disk: PacedDisk) -> None:
        super().__init__(directory)
        self._disk = disk

    def write(self, data: memoryview, offset_bytes: int) -> None:
        self._disk.transfer(Direction.WRITE, len(data))
        super().write(data, offset_bytes)

    def read(self, data: memoryview, offset_bytes: int) -> None:
        self._disk.transfer(Direction.READ, len(data))
        super().read(data, offset_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Ahead:
    """How far the host was ahead of the device when it enqueued a node."""

    node: str
    module: str
    is_forward: bool
    nodes: int
    """Nodes that take time and were enqueued, but not over."""
    seconds: float
    """What these take together."""
    at_s: float
    """When, by ``time.perf_counter``."""


class RunAhead:
    """How far the host is ahead of the device. Ask it before each span of the current stream."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._enqueued_s: list[float] = []

    def ask(self, duration_s: float) -> tuple[int, float]:
        """Spans that were enqueued but are not over, and their seconds. The next one takes ``duration_s``."""
        counts = self._simulator.count_paced()
        waiting = counts.enqueued - counts.over
        ahead_s = sum(self._enqueued_s[len(self._enqueued_s) - waiting :])
        self._enqueued_s.append(duration_s)
        return waiting, ahead_s


class PacedBackend:
    """A Dynamo backend: ``inner="aot_eager"`` in planned time. It keeps what it planned and what it saw."""

    in_step = False
    """The host waits for the device before every op that moves something, as the planner's simulation assumes."""

    def __init__(self, simulator: Simulator, config: OffloadConfig) -> None:
        self._simulator = simulator
        self._config = config
        self.steps: list[OffloadedStep] = []
        self.ahead: list[Ahead] = []
        """Of every node that takes time, since it was last cleared."""
        self._seconds: dict[str, float] = {}
        self._modules: dict[str, str] = {}
        self._forward: set[str] = set()
        self._run_ahead = RunAhead(simulator)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_with_aot_eager(gm, example_inputs, self._config, observe=self._observe, compiler=self._compile)

    def _observe(self, step: OffloadedStep) -> None:
        self.steps.append(step)
        assert step.timeline is not None
        assert not step.plan.recomputed
        before = step.timeline.before
        starts_s = [*(node.start_s for node in before.nodes), before.step_s]
        for node, (start_s, end_s) in zip(before.nodes, itertools.pairwise(starts_s), strict=True):
            self._seconds[node.name] = end_s - start_s
            self._modules[node.name] = node.module
        self._forward.update(node.name for node in before.nodes[: before.marker])

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        backend = self

        class Paced(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                duration_s = backend._seconds.get(n.name, 0.0) if n.op == "call_function" else 0.0
                if duration_s <= 0:
                    if backend.in_step and n.target in (OFFLOAD, RELOAD):
                        gpu.current_stream().synchronize()
                    return super().run_node(n)
                backend._note(n.name, duration_s)
                with backend._simulator.paced(duration_s):
                    return super().run_node(n)

        def run(args: list[Any]) -> Any:
            return Paced(gm).boxed_run(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def starts_s(self, ends_s: Sequence[float], began_s: float) -> tuple[float, ...]:
        """When the nodes of the last step started, given when they ended."""
        return tuple(end_s - self._seconds[one.node] - began_s for one, end_s in zip(self.ahead, ends_s, strict=True))

    def _note(self, name: str, duration_s: float) -> None:
        nodes, ahead_s = self._run_ahead.ask(duration_s)
        at_s = time.perf_counter()
        self.ahead.append(Ahead(name, self._modules[name], name in self._forward, nodes, ahead_s, at_s))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PacedStep:
    """One step that was trained."""

    device_s: float
    """From the call of the model to the end of the last node, by the clock of the device."""
    wall_s: float
    """Until the host knew that."""
    statistics: Statistics
    ahead: Sequence[Ahead]
    """Of every node that takes time."""
    start_s: Sequence[float]
    """When the device began these nodes, since the model was called."""
    latest_s: float
    """By how much the device was late at most. Large: the machine was too busy for these times."""


class PacedTraining:
    """A model whose steps take planned time."""

    def __init__(
        self,
        simulator: Simulator,
        model: Callable[..., Tensor],
        config: OffloadConfig,
        hardware: Hardware,
        *,
        chunk_bytes: int,
        rates: Hardware | None = None,
        staging_bytes: int | None = None,
        admission: bool = True,
    ) -> None:
        """``rates`` are those that the disk and the copies have, and ``staging_bytes`` is what the engine gets, if they
        differ from what was planned for. Without ``admission``, everything moves, whatever it costs."""
        self.backend = PacedBackend(simulator, dataclasses.replace(config, hardware=hardware))
        self._simulator = simulator
        self._rates = hardware if rates is None else rates
        self._staging_bytes = hardware.staging_bytes if staging_bytes is None else staging_bytes
        self._admission = admission
        self._chunk_bytes = chunk_bytes
        torch._dynamo.reset()
        self._compiled: Any = torch.compile(model, backend=self.backend)

    @contextlib.contextmanager
    def running(self) -> Iterator[PacedTraining]:
        """Within the block, engines have the paced disk."""
        disk = PacedDisk(self._rates)

        def open_engine(config: EngineConfig, handles: Iterator[int]) -> Engine:
            parts = Parts(open_file=lambda found: PacedFile(found[0], disk), chunk_bytes=self._chunk_bytes)
            config = dataclasses.replace(config, host_budget_bytes=self._staging_bytes)
            if not self._admission:
                config = dataclasses.replace(config, max_stall_share=None)
            return Engine(config, parts, handles=handles)

        engines = Engines(open_engine)
        with (
            mock.patch.object(ops, "_engines", engines),
            mock.patch("ssdtrain_fx.config.pinned_chunk_bytes", return_value=self._chunk_bytes),
        ):
            self._simulator.pace_copies(self._rates.copy_out.bytes_per_s, self._rates.copy_in.bytes_per_s)
            try:
                yield self
            finally:
                self._simulator.pace_copies()
                engines.close()

    @property
    def step(self) -> OffloadedStep:
        """What was planned, after the first call of :meth:`train`."""
        (step,) = self.backend.steps
        return step

    def train(self, *batch: Tensor) -> PacedStep:
        gpu.synchronize()
        before = ops.statistics()
        self._simulator.count_paced()
        self._simulator.take_ends_s()
        self.backend.ahead.clear()
        began_s = time.perf_counter()
        loss = self._compiled(*batch)
        loss.backward()
        ended_s = self._simulator.clock_s()
        wall_s = time.perf_counter() - began_s
        del loss
        return PacedStep(
            device_s=ended_s - began_s,
            wall_s=wall_s,
            statistics=ops.statistics().since(before),
            ahead=tuple(self.backend.ahead),
            start_s=self.backend.starts_s(self._simulator.take_ends_s(), began_s),
            latest_s=self._simulator.count_paced().latest_s,
        )
