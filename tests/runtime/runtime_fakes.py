"""Stand-ins for the file and the GPU that tests drive, so that every race can be set up without sleeping."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.aio.kernel import WRITE, Aio, AioUnavailableError
from ssdtrain_fx.runtime.lanes.lane import Lane
from ssdtrain_fx.runtime.lanes.open_lanes import Lanes, Parts
from ssdtrain_fx.runtime.lanes.threads.kvikio_choice import Kvikio
from ssdtrain_fx.runtime.lanes.threads.thread_lane import ThreadLane
from ssdtrain_fx.runtime.memory.cuda import CudaMover
from ssdtrain_fx.runtime.memory.raw_memory import bytes_at
from ssdtrain_fx.runtime.memory.staging import StagingPool
from ssdtrain_fx.runtime.policy.patience import Clock
from ssdtrain_fx.runtime.storage.spill_file import ChunkFile


class GrowingBytes:
    """Bytes in memory that grow and shrink as a file does, up to ``capacity_bytes``."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.capacity_bytes: int | None = None
        self._lock = threading.Lock()

    def grow(self, size_bytes: int) -> OSError | None:
        if self.capacity_bytes is not None and size_bytes > self.capacity_bytes:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with self._lock:
            self.data.extend(bytes(max(0, size_bytes - len(self.data))))
        return None

    def shrink(self, size_bytes: int, from_bytes: int) -> None:
        with self._lock:
            if len(self.data) == from_bytes:
                del self.data[size_bytes:]


class MemoryFile(GrowingBytes):
    """A file in memory. ``write_error`` and ``read_error`` say which transfers fail, by index; events hold them up."""

    def __init__(self, directory: str = "/nowhere") -> None:
        super().__init__()
        self.path = f"{directory}/(fake file)"
        self.io_path = "fake"
        self.direct = False
        self.cuda: FakeCuda | None = None
        """The device of :func:`engine_on`; None for a CPU."""
        self.stripe_bytes: int | None = None
        self.write_error: Callable[[int], OSError | None] = lambda index: None
        self.read_error: Callable[[int], OSError | None] = lambda index: None
        self.writes_may_go_on = threading.Event()
        self.writes_may_go_on.set()
        self.reads_may_go_on = threading.Event()
        self.reads_may_go_on.set()
        self.write_begun = threading.Semaphore(0)
        self.read_begun = threading.Semaphore(0)
        self.write_count = 0
        self.read_count = 0
        self.begun: list[tuple[str, int]] = []
        """Every transfer in the order in which they began: "read" or "write", and the offset."""
        self.closed = False
        self.aio: FakeAio

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def locate(self, offset_bytes: int) -> tuple[int, int]:
        return -1, offset_bytes

    def write(self, data: memoryview, offset_bytes: int) -> None:
        with self._lock:
            index, self.write_count = self.write_count, self.write_count + 1
            self.begun.append(("write", offset_bytes))
        self.write_begun.release()
        assert self.writes_may_go_on.wait(60)
        error = self.write_error(index)
        if error is not None:
            raise error
        with self._lock:
            self.data[offset_bytes : offset_bytes + len(data)] = data

    def read(self, data: memoryview, offset_bytes: int) -> None:
        with self._lock:
            index, self.read_count = self.read_count, self.read_count + 1
            self.begun.append(("read", offset_bytes))
        self.read_begun.release()
        assert self.reads_may_go_on.wait(60)
        error = self.read_error(index)
        if error is not None:
            raise error
        with self._lock:
            data[:] = self.data[offset_bytes : offset_bytes + len(data)]

    def close(self) -> None:
        self.closed = True


def each_file(*kinds: Literal["aio", "threads", "cuda"]) -> object:
    """A fixture for ``file = each_file(...)``: a file whose engine uses a lane of each of these kinds in turn."""

    @pytest.fixture(params=kinds, name="file")
    def fixture(request: pytest.FixtureRequest) -> MemoryFile:
        file = MemoryFile()
        file.direct = request.param == "aio"
        file.cuda = FakeCuda() if request.param == "cuda" else None
        return file

    return fixture


class FakeAio:
    """Simulates the kernel with one thread per request; events of the file hold the threads.

    ``depth`` requests fit into the queue, none while ``refusals`` last. ``shorten`` returns how many bytes of a
    transfer are done, by its index."""

    def __init__(self, file: MemoryFile) -> None:
        self.depth = 128
        self.refusals = 0
        self.shorten: Callable[[int, int], int] = lambda index, length: length
        self.blocked = threading.Event()
        self.closed = False
        self.in_flight = 0
        self.submitted: list[tuple[int, int, int]] = []
        self._file = file
        self._over = threading.Condition()
        self._ended: list[tuple[int, int]] = []
        self._answers: list[tuple[int, int]] = []

    def submit(self, opcode: int, descriptor: int, address: int, length: int, offset: int, cookie: int) -> bool:
        assert not self.closed
        assert address % 4096 == length % 4096 == offset % 4096 == 0
        if self.refusals or self.in_flight >= self.depth:
            self.refusals -= self.refusals > 0
            return False
        length = self.shorten(len(self.submitted), length)
        self.submitted.append((opcode, offset, length))
        with self._over:
            self.in_flight += 1
        threading.Thread(target=self._work, args=(opcode, address, length, offset, cookie), daemon=True).start()
        return True

    def _work(self, opcode: int, address: int, length: int, offset: int, cookie: int) -> None:
        memory = bytes_at(address, length)
        try:
            (self._file.write if opcode == WRITE else self._file.read)(memory, offset)
        except OSError as error:
            length = -(error.errno or errno.EIO)
        with self._over:
            self.in_flight -= 1
            self._ended.append((cookie, length))
            self._over.notify_all()

    def reap(self, timeout_s: float) -> None:
        with self._over:
            if timeout_s and not self._ended:
                self.blocked.set()
                self._over.wait_for(lambda: bool(self._ended), timeout_s)
                self.blocked.clear()
            self._answers += self._ended
            self._ended = []

    def answers(self) -> list[tuple[int, int]]:
        answers, self._answers = self._answers, []
        return answers

    def finish_all(self) -> None:
        with self._over:
            assert self._over.wait_for(lambda: not self.in_flight, 60)

    def close(self) -> None:
        self.finish_all()
        self.closed = True


def no_aio() -> Aio:
    """For engines whose threads move CPU tensors."""
    raise AioUnavailableError("a test wants threads")


@contextlib.contextmanager
def engine_on(file: MemoryFile, directory: str, **options: object) -> Iterator[Engine]:
    """An engine with chunks of 4096 bytes on ``file``. It uses a :class:`FakeAio` if ``file.direct``, and ``file.cuda``
    if there is one."""
    config = EngineConfig(ssd_dir=directory, **options)  # type: ignore[arg-type]
    with open_engine(file, config) as engine:
        try:
            yield engine
        finally:
            file.writes_may_go_on.set()
            file.reads_may_go_on.set()
            if file.cuda is not None:
                file.cuda.finish_all()


def open_engine(file: MemoryFile, config: EngineConfig, clock: Clock = time.perf_counter) -> Engine:
    """See :func:`engine_on`."""
    if file.cuda is not None:
        return StandInEngine(config, file, file.cuda, clock=clock)
    file.aio = FakeAio(file)
    return Engine(
        config,
        Parts(
            open_file=lambda _: file,
            open_aio=lambda: file.aio,
            chunk_bytes=4096,
            clock=clock,
            read_memory_limit=lambda: None,
        ),
    )


def offload(
    engine: Engine, x: Tensor, name: str = "x", *, deferred: bool = False, exclusive: bool = False, **hints: Any
) -> Tensor:
    """Offload, release, and overwrite ``x`` as a compiler might, unless the engine may hold it."""
    token = engine.offload(x, name, **hints)
    token = engine.release(token, x, deferred=deferred, exclusive=exclusive)
    if x.numel() and not (deferred or exclusive):
        x.fill_(1)
    return token


def fetch(engine: Engine, token: Tensor, like: Tensor, stride: tuple[int, ...] | None = None) -> Tensor:
    """Reload and wait."""
    y = engine.reload(token, like.size(), like.stride() if stride is None else stride, like.dtype, like.device)
    engine.wait(y, token)
    return y


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._done = threading.Event()

    def record(self, stream: FakeStream) -> None:
        stream.note("record", self)
        if self._cuda.device_is_fast or (self._cuda.only_copies_are_slow and stream is self._cuda.current):
            self._done.set()
        else:
            self._cuda.unfinished.append(self)
            self._cuda.slow_work_begun.release()

    def finish(self) -> None:
        self._done.set()

    def query(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        self._cuda.host_syncs.append(threading.current_thread().name)
        assert self._done.wait(60)


class FakeStream:
    def __init__(self, name: str, *, keeps_log: bool) -> None:
        self.name = name
        self.log: list[tuple[str, object]] = []
        self._keeps_log = keeps_log

    def wait_event(self, event: FakeEvent) -> None:
        self.note("wait", event)

    def note(self, verb: str, event: FakeEvent) -> None:
        if self._keeps_log:
            self.log.append((verb, event))

    def events(self, verb: str) -> list[object]:
        return [event for logged, event in self.log if logged == verb]


class HandClock:
    """Stands still until a thread moves it; any thread may do so."""

    def __init__(self) -> None:
        self._now_s = 100.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self._now_s

    def move(self, seconds: float) -> None:
        with self._lock:
            self._now_s += seconds


class _Runtime:
    def __init__(self) -> None:
        self.registered: collections.Counter[int] = collections.Counter()

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.registered[address] += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered[address] -= 1
        return 0


class FakeCuda:
    """The part of ``torch.cuda`` that the runtime uses. "GPU" tensors are in ordinary memory and copies happen at once.
    It simulates only when the device *reports* that it has finished."""

    def __init__(self, *, device_is_fast: bool = True, keeps_log: bool = True) -> None:
        """``keeps_log=False`` for thousands of steps: a log grows, and its events are cycles."""
        self.device_is_fast = device_is_fast
        self.only_copies_are_slow = False
        """Work on the current stream is over at once, whatever ``device_is_fast`` says."""
        self._keeps_log = keeps_log
        self.unfinished: list[FakeEvent] = []
        self.slow_work_begun = threading.Semaphore(0)
        self.host_syncs: list[str] = []
        self.current = FakeStream("current", keeps_log=keeps_log)
        self.side_streams: list[FakeStream] = []
        self.runtime = _Runtime()

    def is_available(self) -> bool:
        return True

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def Stream(self, device: torch.device) -> FakeStream:
        stream = FakeStream(("out", "back")[len(self.side_streams)], keeps_log=self._keeps_log)
        self.side_streams.append(stream)
        return stream

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        yield

    def cudart(self) -> _Runtime:
        return self.runtime

    def finish_all(self) -> None:
        """The device finishes all events, and is fast from now on."""
        self.device_is_fast = True
        for event in self.unfinished:
            event.finish()


class KvikioStandInEngine(Engine):
    """CPU tensors take the path of CUDA tensors that go through KvikIO; ``module`` replaces KvikIO."""

    def __init__(
        self,
        config: EngineConfig,
        module: object,
        cuda: FakeCuda | None = None,
        *,
        chunk_bytes: int | None = None,
        handles: Iterator[int] | None = None,
        **parts: Any,
    ) -> None:
        def make_lane(lanes: Lanes, device_type: str) -> Lane:
            lane = lanes.make("cuda")
            lane.chunk_bytes = chunk_bytes or lane.chunk_bytes
            return lane

        parts |= {"cuda": cuda or FakeCuda(), "choose_kvikio": lambda *_: Kvikio(module, gds=True)}
        super().__init__(config, Parts(make_lane=make_lane, chunk_bytes=chunk_bytes, **parts), handles=handles)


class StandInEngine(Engine):
    """CPU tensors take the path of CUDA tensors."""

    def __init__(
        self,
        config: EngineConfig,
        file: ChunkFile,
        cuda: FakeCuda,
        *,
        thread_count: int = 4,
        chunk_bytes: int = 4096,
        clock: Clock = time.perf_counter,
        handles: Iterator[int] | None = None,
    ) -> None:
        self.pool = StagingPool(config.host_budget_bytes or 256 * chunk_bytes, chunk_bytes)

        def make_lane(lanes: Lanes, device_type: str) -> Lane:
            mover = CudaMover(cuda)
            return ThreadLane(lanes.ledger, mover, self.pool, thread_count=thread_count, checksum=config.checksum)

        parts = Parts(open_file=lambda _: file, make_lane=make_lane, clock=clock, read_memory_limit=lambda: None)
        super().__init__(config, parts, handles=handles)
