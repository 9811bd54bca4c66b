"""Transfers between GPU memory and the file through KvikIO, direct where GPUDirect Storage is available.

:mod:`ssdtrain_fx.runtime.lanes.threads.kvikio_choice` decides whether it is used.

Guarantees:

* A transfer starts after the event that marks its memory as ready; KvikIO itself does not know torch's streams.
* Futures, tensors and the file are held until the transfer has finished, and every result is requested exactly once.
* When a transfer has failed, no part of it is in flight. KvikIO splits transfers into tasks, and before 26.10 it
  reports the first failure while other tasks still run: these could write to a slot or to memory that has been reused.
  So each transfer is one task, and the threads of the lane provide the parallelism.
* A tensor is dropped before its transfer is reported as finished. Errors hold the frames that they passed, which hold
  the tensor. So errors are kept without their tracebacks, and only the text of KvikIO's own errors is kept.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssdtrain_fx.runtime.alignment import round_up
from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Chunk, Fill
from ssdtrain_fx.runtime.book.traffic import Direction, Transfer
from ssdtrain_fx.runtime.lanes.threads.kvikio_choice import Kvikio
from ssdtrain_fx.runtime.lanes.threads.thread_lane import ThreadLane
from ssdtrain_fx.runtime.lanes.threads.transport import Queues, Transport
from ssdtrain_fx.runtime.lanes.threads.workers import Task
from ssdtrain_fx.runtime.memory.cuda import CudaMover
from ssdtrain_fx.runtime.memory.movers import Mark, Mover, Region
from ssdtrain_fx.runtime.memory.staging import StagingPool
from ssdtrain_fx.runtime.storage.spill_file import ChunkFile

CHUNK_BYTES = 16 << 20
"""Small enough that a large tensor keeps all threads of the lane busy. A guess, not measured."""


class DeviceFile:
    """The spill file, accessed through KvikIO, for CUDA tensors."""

    def __init__(self, kvikio: Any, file: ChunkFile) -> None:
        self._kvikio = kvikio
        self._file = file
        self._path = file.path
        self._lock = threading.Lock()
        self._handles: dict[int, Any] = {}
        """By descriptor."""

    def write(self, data: Tensor, offset_bytes: int) -> None:
        """Write all bytes of ``data`` (uint8, one dimension) to the file. Raises OSError."""
        self._transfer("write", data, offset_bytes)

    def read(self, data: Tensor, offset_bytes: int) -> None:
        """Fill ``data`` (uint8, one dimension) from the file. Raises OSError."""
        self._transfer("read", data, offset_bytes)

    def close(self) -> None:
        opened, self._handles = self._handles, {}
        with contextlib.ExitStack() as handles:  # closes all of them, whatever one of them raises
            for handle in opened.values():
                handles.callback(handle.close)

    def _handle(self, descriptor: int) -> Any:
        with self._lock:
            if descriptor not in self._handles:  # the file has no other name
                self._handles[descriptor] = self._kvikio.CuFile(f"/proc/self/fd/{descriptor}", "r+")
            return self._handles[descriptor]

    def _transfer(self, verb: str, data: Tensor, offset_bytes: int) -> None:
        descriptor, file_offset = self._file.locate(offset_bytes)
        size = data.numel()
        try:
            handle = self._handle(descriptor)
            start = handle.pwrite if verb == "write" else handle.pread
            count = start(data, size=size, file_offset=file_offset, task_size=size).get()
            problem = None if count == size else f"short KvikIO {verb}: {count} of {size} bytes"
        except RuntimeError as error:  # KvikIO's errors carry no errno
            problem = f"KvikIO {verb}: {error}"
        if problem is not None:  # not within the `except`, which would chain the two errors
            raise OSError(errno.EIO, problem, self._path)


class KvikioMover(CudaMover):
    """Events as on the staged path; the bytes need no staging."""

    enqueues = False


class KvikioTransport(Transport):
    """Chunks go SOURCE -> COPYING -> ON_DISK (or KEPT), without a staging buffer."""

    def __init__(self, queues: Queues, mover: Mover, device_file: DeviceFile) -> None:
        super().__init__(queues, mover)
        self._device_file = device_file

    def move_out(self, chunk: Chunk, source: Region) -> Task:
        return functools.partial(self._write_directly, chunk, [source])

    def bring_back(self, fill: Fill, chunk: Chunk, target: Region) -> Task:
        return functools.partial(self._read_directly, fill, chunk, target)

    def close(self) -> None:
        self._device_file.close()

    def _write_directly(self, chunk: Chunk, sources: list[Region]) -> None:
        transfer = self._begin_after(chunk.entry.ready, Direction.WRITE)
        began_ns = time.perf_counter_ns()
        # Popped: when `release` learns that the tensor has left, no reference to it may remain here.
        error, kept, end_s = self._save(chunk, sources.pop())
        if error is not None:
            with self._ledger.lock:
                self._ledger.upkeep.note_write_error(error)
            self._ledger.tidy()
        with self._ledger.lock:
            self._ends.transferred(transfer, chunk, end_s, error)
            self._ledger.source_is_safe(chunk)
            self._ends.trace("write", chunk, began_ns, error)
            self._ends.written(chunk, kept)
            self._queues.has_left(chunk)

    def _save(self, chunk: Chunk, source: Region) -> tuple[OSError | None, Tensor | None, float]:
        """Write ``chunk``. Returns the error, a copy of the bytes if there is an error, and the end of the transfer."""
        slot = chunk.entry.slot
        assert slot is not None
        data = source.as_bytes()[chunk.start : chunk.start + chunk.length]
        offset_bytes = slot.offset_bytes + chunk.start
        error = self._ledger.file.grow(offset_bytes + round_up(chunk.length))
        error = error or _error_of(self._device_file.write, data, offset_bytes)
        end_s = self._ledger.traffic.clock()
        kept = None if error is None else torch.empty(chunk.length, dtype=torch.uint8, device="cpu").copy_(data)
        return error, kept, end_s

    def _read_directly(self, fill: Fill, chunk: Chunk, target: Region) -> None:
        slot = chunk.entry.slot
        assert slot is not None
        transfer = self._begin_after(fill.ready, Direction.READ)
        began_ns = time.perf_counter_ns()
        data = target.as_bytes()[chunk.start : chunk.start + chunk.length]
        error = _error_of(self._device_file.read, data, slot.offset_bytes + chunk.start)
        end_s = self._ledger.traffic.clock()
        with self._ledger.lock:
            self._ends.transferred(transfer, chunk, end_s, error)
            self._ends.trace("read", chunk, began_ns, error)
            if error is None:
                self._ledger.counters.bytes_read += chunk.length
            else:
                fill.fail(error)
            self._queues.is_issued(fill, chunk, None, None)

    def _begin_after(self, ready: Mark, direction: Direction) -> Transfer:
        """Begin a transfer after the device is ready: the wait for the device says nothing about the disk."""
        self._mover.wait_host(ready)
        with self._ledger.lock:
            return self._ledger.traffic.begin(direction)


class KvikioLane(ThreadLane):
    """A lane for CUDA tensors that moves them through KvikIO."""

    def __init__(self, ledger: Ledger, kvikio: Kvikio, mover: CudaMover, drive_count: int = 1) -> None:
        super().__init__(
            ledger,
            mover,
            StagingPool(0),
            thread_count=mover.thread_count * drive_count,
            checksum=False,
            busy_with=drive_count,  # KvikIO has one thread by default
            make_transport=functools.partial(KvikioTransport, device_file=DeviceFile(kvikio.module, ledger.file)),
        )
        self.chunk_bytes = math.gcd(CHUNK_BYTES, ledger.file.stripe_bytes or CHUNK_BYTES)
        self.staging_bytes = self.planned_staging_bytes = 0
        self.io_path = "KvikIO with GPUDirect Storage" if kvikio.gds else "KvikIO through host memory"


def _error_of(transfer: Callable[[Tensor, int], None], data: Tensor, offset_bytes: int) -> OSError | None:
    """Run ``transfer`` and return the OSError that it raises, without its traceback."""
    try:
        transfer(data, offset_bytes)
    except OSError as error:
        return error.with_traceback(None)
    return None
