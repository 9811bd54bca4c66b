"""A disk that fails on schedule, for all kinds of lanes.

::

    disk = FaultyDisk(Fault("write", 3, Fail(errno.EIO)), Fault("read", None, Late(0.01)))
    with disk.engine("aio", directory) as engine: ...

Operations are counted from 0, separately for each kind, in the order in which they reach the disk.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import errno
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

from runtime_fakes import FakeCuda, GrowingBytes, KvikioStandInEngine, StandInEngine, no_aio
from torch import Tensor

from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.aio.kernel import WRITE
from ssdtrain_fx.runtime.lanes.open_lanes import Parts
from ssdtrain_fx.runtime.storage.spill_file import bytes_done

CHUNK_BYTES = 4096
PATIENCE_S = 2.0
"""The ``io_timeout_s`` of all engines, unless they ask for less. A second passes at every look at the clock while the
disk hangs."""

LaneKind = Literal["aio", "source", "threads", "cuda", "kvikio"]
"""``source`` is native AIO without staging: tensors that contain a whole page are written directly."""
Operation = Literal["write", "read", "grow"]


@dataclasses.dataclass(frozen=True)
class Fail:
    """No bytes are moved, and the operation fails with this error."""

    errno: int


@dataclasses.dataclass(frozen=True)
class Short:
    """Only the first bytes are moved, and the disk reports that."""

    byte_count: int


@dataclasses.dataclass(frozen=True)
class Torn:
    """Only the first bytes are moved, the rest become zeros, and the disk reports that all bytes were moved."""

    byte_count: int


@dataclasses.dataclass(frozen=True)
class Flip:
    """All bytes are moved, and one byte of the transfer changes on the way."""

    byte: int
    mask: int = 1


@dataclasses.dataclass(frozen=True)
class Late:
    """The operation takes longer."""

    delay_s: float


@dataclasses.dataclass(frozen=True)
class Hang:
    """The operation does not complete before :meth:`FaultyDisk.let_go`; then all bytes are moved."""


Effect = Fail | Short | Torn | Flip | Late | Hang


@dataclasses.dataclass(frozen=True)
class Fault:
    """``effect`` on operation ``number`` of one kind, or on all operations of that kind if ``number`` is None."""

    operation: Operation
    number: int | None
    effect: Effect


class FaultyDisk(GrowingBytes):
    """Bytes in memory with a schedule of faults, which may be changed at any time."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__()
        self.faults = list(faults)
        self.chunk_bytes = CHUNK_BYTES
        self.cuda = FakeCuda()
        """The stand-in for the device of the lanes "cuda" and "kvikio"."""
        self.kvikio = FaultyKvikio(self)
        self.files: list[FaultyFile] = []
        self.counts: collections.Counter[Operation] = collections.Counter()
        self.struck: list[tuple[Operation, int]] = []
        """The operations that were hit by a fault, with their offsets."""
        self.hanging = threading.Event()
        """Set once an operation hangs."""
        self.changed = threading.Condition()
        self.may_answer = False
        self._now_s = 0.0

    @property
    def is_hanging(self) -> bool:
        return self.hanging.is_set() and not self.may_answer

    def clock(self) -> float:
        """Stands still while the disk works. While it hangs, a second passes at every call."""
        if self.is_hanging:
            self._now_s += 1
        return self._now_s

    def hang(self) -> None:
        self.hanging.set()
        with self.changed:
            self.changed.wait_for(lambda: self.may_answer)

    def let_go(self) -> None:
        """Complete the operations that hang. No operation hangs afterwards."""
        with self.changed:
            self.may_answer = True
            self.changed.notify_all()

    def begin(self, operation: Operation, offset_bytes: int) -> list[Effect]:
        """Count an operation and return the faults that hit it."""
        with self._lock:
            number = self.counts[operation]
            self.counts[operation] += 1
            effects = [f.effect for f in self.faults if f.operation == operation and f.number in (None, number)]
            if effects:
                self.struck.append((operation, offset_bytes))
            return effects

    def carry_out(self, operation: Operation, effects: list[Effect], memory: memoryview, offset_bytes: int) -> int:
        """Move bytes with ``effects``. Returns the number of bytes that the disk reports. Raises OSError."""
        moved = said = len(memory)
        for effect in effects:
            match effect:
                case Fail(number):
                    raise OSError(number, os.strerror(number))
                case Late(delay_s):
                    time.sleep(delay_s)
                case Short(byte_count):
                    moved = said = min(moved, byte_count)
                case Torn() | Flip() | Hang():
                    pass
        end_bytes = offset_bytes + moved
        with self._lock:
            if operation == "write":
                self.data[offset_bytes:end_bytes] = memory[:moved]
            else:
                memory[:moved] = self.data[offset_bytes:end_bytes]
            # No view of `data` may be left when the lock is free: it could not grow.
            with memoryview(self.data) as file, file[offset_bytes:end_bytes] as written:
                place = written if operation == "write" else memory[:moved]
                for effect in effects:
                    if isinstance(effect, Torn):
                        place[effect.byte_count :] = bytes(len(place) - effect.byte_count)
                    elif isinstance(effect, Flip) and effect.byte < moved:
                        place[effect.byte] ^= effect.mask
        return said

    @contextlib.contextmanager
    def engine(self, lane: LaneKind, directory: str, **options: Any) -> Iterator[Engine]:
        """An engine on this disk with chunks of 4096 bytes. Operations that hang complete before it is closed."""
        with self.open_engine(lane, EngineConfig(ssd_dir=directory, **options)) as engine:
            try:
                yield engine
            finally:
                self.let_go()
                self.cuda.finish_all()

    def check_closed(self) -> None:
        """Check that no file and no handle is open."""
        assert all(file.closed for file in self.files)
        assert self.kvikio.open_count == 0

    def open_engine(self, lane: LaneKind, config: EngineConfig, handles: Iterator[int] | None = None) -> Engine:
        config = dataclasses.replace(config, io_timeout_s=min(PATIENCE_S, config.io_timeout_s or math.inf))
        file = FaultyFile(self, direct=lane in ("aio", "source"))
        common: dict[str, Any] = {"chunk_bytes": self.chunk_bytes, "clock": self.clock}
        if lane == "cuda":
            engine = StandInEngine(config, file, self.cuda, handles=handles, **common)
        elif lane == "kvikio":
            engine = KvikioStandInEngine(
                config, self.kvikio, self.cuda, open_file=lambda _: file, handles=handles, **common
            )
        else:
            open_aio = no_aio if lane == "threads" else lambda: FaultyAio(self)
            common["from_source_bytes"] = 1 if lane == "source" else sys.maxsize
            engine = Engine(config, Parts(open_file=lambda _: file, open_aio=open_aio, **common), handles=handles)
        self.files.append(file)
        return engine


class FaultyFile:
    """The disk as a file, for lanes with threads."""

    path = "/nowhere/(faulty file)"
    io_path = "faulty"

    def __init__(self, disk: FaultyDisk, *, direct: bool) -> None:
        self.direct = direct
        self.stripe_bytes: int | None = None
        self.closed = False
        self._disk = disk

    @property
    def size_bytes(self) -> int:
        return len(self._disk.data)

    def locate(self, offset_bytes: int) -> tuple[int, int]:
        return -1, offset_bytes

    def grow(self, size_bytes: int) -> OSError | None:
        disk = self._disk
        if size_bytes <= self.size_bytes:
            return None
        effects = disk.begin("grow", size_bytes)
        if Hang() in effects:
            disk.hang()
        for effect in effects:
            if isinstance(effect, Fail):
                return OSError(effect.errno, os.strerror(effect.errno))
        return disk.grow(size_bytes)

    def shrink(self, size_bytes: int, from_bytes: int) -> None:
        self._disk.shrink(size_bytes, from_bytes)

    def write(self, data: memoryview, offset_bytes: int) -> None:
        self._transfer("write", data, offset_bytes)

    def read(self, data: memoryview, offset_bytes: int) -> None:
        self._transfer("read", data, offset_bytes)

    def close(self) -> None:
        assert not self._disk.is_hanging
        self.closed = True

    def _transfer(self, operation: Operation, data: memoryview, offset_bytes: int) -> None:
        assert not self.closed
        done = 0
        while done < len(data):
            effects = self._disk.begin(operation, offset_bytes + done)
            if Hang() in effects:
                self._disk.hang()
            count = self._disk.carry_out(operation, effects, data[done:], offset_bytes + done)
            done = bytes_done(done, count, len(data), operation, offset_bytes, self.path)


@dataclasses.dataclass(frozen=True, eq=False)
class _Request:
    cookie: int
    operation: Operation
    effects: list[Effect]
    memory: memoryview
    offset_bytes: int


class FaultyAio:
    """The disk as native AIO. There is no thread: requests are carried out when answers are requested."""

    depth = 16

    def __init__(self, disk: FaultyDisk) -> None:
        self._disk = disk
        self._submitted: list[_Request] = []
        self._answers: list[tuple[int, int]] = []

    def submit(self, opcode: int, descriptor: int, address: int, length: int, offset: int, cookie: int) -> bool:
        assert address % 4096 == length % 4096 == offset % 4096 == 0
        if len(self._submitted) >= self.depth:
            return False
        operation: Operation = "write" if opcode == WRITE else "read"
        effects = self._disk.begin(operation, offset)
        if Hang() in effects:
            self._disk.hanging.set()
        memory = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
        with self._disk.changed:
            self._submitted.append(_Request(cookie, operation, effects, memory, offset))
            self._disk.changed.notify_all()
        return True

    def reap(self, timeout_s: float) -> None:
        changed = self._disk.changed
        with changed:
            changed.wait_for(lambda: bool(self._ready()), timeout_s)
            ready = self._ready()
            for request in ready:
                self._submitted.remove(request)
        self._answers += [(request.cookie, self._result(request)) for request in ready]

    def _ready(self) -> list[_Request]:
        return [request for request in self._submitted if Hang() not in request.effects or self._disk.may_answer]

    def _result(self, request: _Request) -> int:
        try:
            return self._disk.carry_out(request.operation, request.effects, request.memory, request.offset_bytes)
        except OSError as error:
            return -(error.errno or errno.EIO)

    def answers(self) -> list[tuple[int, int]]:
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Like io_destroy, this would wait for the disk."""
        assert not self._disk.is_hanging


class FaultyKvikio:
    """The disk as the module ``kvikio``: its errors have no errno, and short transfers are not continued."""

    def __init__(self, disk: FaultyDisk) -> None:
        self.disk = disk
        self.open_count = 0

    def CuFile(self, path: str, flags: str) -> _Handle:
        assert (path, flags) == ("/proc/self/fd/-1", "r+")  # see FaultyFile.locate
        self.open_count += 1
        return _Handle(self)


class _Handle:
    def __init__(self, kvikio: FaultyKvikio) -> None:
        self._kvikio = kvikio
        self._closed = False

    def pwrite(self, data: Tensor, size: int, file_offset: int, task_size: int) -> _Future:
        return self._begin("write", data, size, file_offset, task_size)

    def pread(self, data: Tensor, size: int, file_offset: int, task_size: int) -> _Future:
        return self._begin("read", data, size, file_offset, task_size)

    def close(self) -> None:
        assert not self._kvikio.disk.is_hanging
        assert not self._closed
        self._closed = True
        self._kvikio.open_count -= 1

    def _begin(self, operation: Operation, data: Tensor, size: int, file_offset: int, task_size: int) -> _Future:
        assert not self._closed
        assert size == data.numel() == task_size  # with several tasks, some would continue after one has failed
        effects = self._kvikio.disk.begin(operation, file_offset)
        return _Future(self._kvikio.disk, operation, effects, data, file_offset)


class _Future:
    """The transfer is carried out by the thread that requests its result."""

    def __init__(
        self, disk: FaultyDisk, operation: Operation, effects: list[Effect], data: Tensor, offset_bytes: int
    ) -> None:
        self._disk = disk
        self._operation: Operation = operation
        self._effects = effects
        self._data: list[Tensor] = [data]
        self._offset_bytes = offset_bytes

    def get(self) -> int:
        data = self._data.pop()  # a second call raises, as in KvikIO
        if Hang() in self._effects:
            self._disk.hang()
        try:
            memory = memoryview(data.numpy())
            return self._disk.carry_out(self._operation, self._effects, memory, self._offset_bytes)
        except OSError as error:
            raise RuntimeError(f"POSIX error on p{self._operation}: {error.strerror}") from error
