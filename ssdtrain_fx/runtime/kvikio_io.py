"""Straight from GPU memory to the file and back, through KvikIO, where GPUDirect Storage is there.

Whether it is used at all is decided in :mod:`ssdtrain_fx.runtime.kvikio_choice`.

Guarantees:

* A transfer starts after the event that says that the memory is ready; KvikIO itself knows nothing of torch's streams.
* Futures, tensors and the file are held until the transfer is over, and every result is asked for exactly once.
"""

from __future__ import annotations

import errno
import functools
import math
import threading
import time
from typing import Any

import torch
from torch import Tensor

from ssdtrain_fx.runtime.cuda import CudaMover
from ssdtrain_fx.runtime.kvikio_choice import Kvikio
from ssdtrain_fx.runtime.ledger import Chunk, ChunkState, Fill, Ledger
from ssdtrain_fx.runtime.movers import Region
from ssdtrain_fx.runtime.patience import Patience
from ssdtrain_fx.runtime.slots import round_up
from ssdtrain_fx.runtime.spill_file import ChunkFile
from ssdtrain_fx.runtime.staging import StagingPool
from ssdtrain_fx.runtime.thread_lane import Task, ThreadLane
from ssdtrain_fx.runtime.traffic import Direction, Transfer

CHUNK_BYTES = 64 << 20
"""KvikIO cuts a transfer into pieces for its own threads. A guess, not measured."""


class DeviceFile:
    """The spill file as KvikIO sees it, for CUDA tensors."""

    def __init__(self, kvikio: Any, file: ChunkFile) -> None:
        self._kvikio = kvikio
        self._file = file
        self._path = file.path
        self._lock = threading.Lock()
        self._handles: dict[int, Any] = {}
        """By descriptor."""

    def write(self, data: Tensor, offset_bytes: int) -> None:
        self._transfer("write", data, offset_bytes)

    def read(self, data: Tensor, offset_bytes: int) -> None:
        self._transfer("read", data, offset_bytes)

    def close(self) -> None:
        for handle in self._handles.values():
            handle.close()

    def _handle(self, descriptor: int) -> Any:
        with self._lock:
            if descriptor not in self._handles:  # the file has no other name
                self._handles[descriptor] = self._kvikio.CuFile(f"/proc/self/fd/{descriptor}", "r+")
            return self._handles[descriptor]

    def _transfer(self, verb: str, data: Tensor, offset_bytes: int) -> None:
        descriptor, file_offset = self._file.locate(offset_bytes)
        try:
            handle = self._handle(descriptor)
            start = handle.pwrite if verb == "write" else handle.pread
            count = start(data, size=data.numel(), file_offset=file_offset).get()
        except RuntimeError as error:  # KvikIO's errors carry no errno
            raise OSError(errno.EIO, f"KvikIO {verb}: {error}", self._path) from error
        if count != data.numel():
            raise OSError(errno.EIO, f"short KvikIO {verb}: {count} of {data.numel()} bytes", self._path)


class KvikioMover(CudaMover):
    """Events as in the staged path; the bytes need no staging."""

    enqueues = False


class KvikioLane(ThreadLane):
    """A lane whose chunks go SOURCE -> COPYING -> ON_DISK, or KEPT, without a staging buffer."""

    def __init__(self, ledger: Ledger, kvikio: Kvikio, mover: CudaMover, drive_count: int = 1) -> None:
        super().__init__(ledger, mover, StagingPool(0), thread_count=mover.thread_count * drive_count, checksum=False)
        self.chunk_bytes = math.gcd(CHUNK_BYTES, ledger.file.stripe_bytes or CHUNK_BYTES)
        self.staging_bytes = 0
        self.busy_with = drive_count  # KvikIO cuts each transfer up
        self._device_file = DeviceFile(kvikio.module, ledger.file)
        self.io_path = "KvikIO with GPUDirect Storage" if kvikio.gds else "KvikIO through host memory"

    def _next_copy(self) -> Task | None:
        while self._copies:
            chunk = self._copies.popleft()
            if chunk.state is ChunkState.CANCELLED:
                continue
            source = chunk.entry.source
            assert source is not None
            chunk.state = ChunkState.COPYING
            transfer = self._ledger.traffic.begin(Direction.WRITE)
            return functools.partial(self._write_directly, transfer, chunk, source)
        return None

    def close(self, patience: Patience) -> bool:
        over = super().close(patience)
        if over:
            self._device_file.close()
        return over

    def _write_directly(self, transfer: Transfer, chunk: Chunk, source: Region) -> None:
        entry, slot = chunk.entry, chunk.entry.slot
        assert slot is not None
        self.mover.wait_host(entry.ready)
        data = source.as_bytes()[chunk.start : chunk.start + chunk.length]
        offset_bytes = slot.offset_bytes + chunk.start
        began_ns = time.perf_counter_ns()
        error = self._ledger.file.grow(offset_bytes + round_up(chunk.length))
        if error is None:
            try:
                self._device_file.write(data, offset_bytes)
            except OSError as write_error:
                error = write_error
        end_s = self._ledger.traffic.clock()
        kept = None
        if error is not None:
            kept = torch.empty(chunk.length, dtype=torch.uint8).copy_(data)
            with self._ledger.lock:
                self._ledger.note_write_error(error)
            self._ledger.tidy()
        with self._ledger.lock:
            self._end(transfer, chunk, end_s, error)
            self._ledger.source_is_safe(chunk)
            self._trace("write", chunk, began_ns, error)
            self._written(chunk, kept)
            self._copied(chunk)

    def _read_from_file(self, fill: Fill, chunk: Chunk, target: Region) -> Task | None:
        transfer = self._ledger.traffic.begin(Direction.READ)
        return functools.partial(self._read_directly, transfer, fill, chunk, target)

    def _read_directly(self, transfer: Transfer, fill: Fill, chunk: Chunk, target: Region) -> None:
        slot = chunk.entry.slot
        assert slot is not None
        self.mover.wait_host(fill.ready)
        began_ns = time.perf_counter_ns()
        error = None
        try:
            self._device_file.read(
                target.as_bytes()[chunk.start : chunk.start + chunk.length], slot.offset_bytes + chunk.start
            )
        except OSError as read_error:
            error = read_error
        end_s = self._ledger.traffic.clock()
        with self._ledger.lock:
            self._end(transfer, chunk, end_s, error)
            self._trace("read", chunk, began_ns, error)
            if error is None:
                self._ledger.counters.bytes_read += chunk.length
            else:
                fill.fail(error)
            self._issued(fill, chunk, None, None)
