"""A lane for CPU tensors without threads: the ops drive it, and the kernel moves the data (native AIO).

Why: see :mod:`ssdtrain_fx.runtime.lanes.aio.kernel`. The file is written directly from the tensor and read directly
into the tensor that ``reload`` returns. Direct I/O moves whole pages, but tensors start and end anywhere. So the bytes
before the first page boundary and after the last one stay in memory, and both tensors have the same offset within a
page::

    page        |         |         |         |         |
    tensor            [===|=========|=========|====]
                       kept   to the file      kept

::

    offload   source --io_submit--> file                                 while the kernel takes requests
              source ---copy---> staging buffer --io_submit--> file      small tensors, while there are buffers
    any op    submits queued requests, reads first
    release   continues until every byte of the tensor is written or copied
    reload    file --io_submit--> y
    wait      continues until every read into y has completed

Guarantees:

* A source tensor, a staging buffer, a read target and the file are held until the kernel has finished with them, even
  if the user drops them (see :mod:`ssdtrain_fx.runtime.lanes.aio.requests`).
* Before a thread blocks, every request that can begin has begun. If nothing is in flight, :meth:`wait_for_progress`
  returns False instead of blocking.
* A read target owns all pages that it touches. The parent process does not write to these pages before the read has
  completed, so a fork does not disturb it (see :mod:`ssdtrain_fx.runtime.memory.staging`).
* An exception within the bookkeeping, even KeyboardInterrupt, stops the engine; no thread waits forever. Memory is
  still held for as long as the kernel may use it.

A transfer that has ended between two ops is noticed by the next op that begins one, waits, or needs space. If another
one began first, the disk would seem to have been busy in between, and slower than it is.
"""

from __future__ import annotations

import collections
import ctypes
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ssdtrain_fx.runtime.alignment import ALIGNMENT_BYTES
from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Chunk, ChunkState, Entry, Fill
from ssdtrain_fx.runtime.lanes.aio.kernel import Aio
from ssdtrain_fx.runtime.lanes.aio.requests import Request, Requests
from ssdtrain_fx.runtime.lanes.checksums import checksum_of
from ssdtrain_fx.runtime.lanes.lane import Lane
from ssdtrain_fx.runtime.memory.movers import CpuMover, Region
from ssdtrain_fx.runtime.memory.raw_memory import bytes_at
from ssdtrain_fx.runtime.memory.staging import StagingBuffer, StagingPool
from ssdtrain_fx.runtime.memory.tensor_memory import TensorMemory
from ssdtrain_fx.runtime.policy.patience import BLOCK_S, Patience

DIRECT_CHUNK_BYTES = 16 << 20
"""Every chunk runs some Python on the computing thread, with cold caches. The ops of a BERT step took 126 ms with
chunks of 4 MiB, and 20 ms less with chunks larger than the tensors (2 cores, 2026-11-21)."""
FROM_SOURCE_BYTES = 256 << 10
"""Tensors of at least this size are written directly, without staging. Pinning their pages takes less time than a copy;
smaller tensors save little, and their edges weigh more. A guess, not measured."""


class AioLane(Lane):
    """All methods except :meth:`close`, :meth:`allocate` and :meth:`wait_for_progress` need the ledger's lock."""

    def __init__(
        self,
        ledger: Ledger,
        aio: Aio,
        pool: StagingPool,
        tensor_memory: TensorMemory,
        *,
        checksum: bool,
        from_source_bytes: int = FROM_SOURCE_BYTES,
        direct_chunk_bytes: int = DIRECT_CHUNK_BYTES,
    ) -> None:
        self._aio = aio
        self._abandoned = False
        super().__init__(ledger, CpuMover(), pool, checksum=checksum)
        self.io_path += ", native AIO"
        self.direct_chunk_bytes = direct_chunk_bytes
        self.planned_staging_bytes = 0
        self.from_source_bytes = max(from_source_bytes, 2 * ALIGNMENT_BYTES)  # contains a whole page
        self._copies: collections.deque[Chunk] = collections.deque()
        """Chunks that have to be written, or copied to staging first."""
        self._requests = Requests(ledger, aio, self._ends, pool, checksum=checksum)
        self._tensor_memory = tensor_memory

    def __del__(self) -> None:
        """Wait for the kernel even if :meth:`close` was not called: buffers and targets are freed only after it."""
        if not self._abandoned:
            self._aio.close()

    # -- called by the engine ------------------------------------------------------------------------------------------

    @property
    def idle_bytes(self) -> int:
        return self._tensor_memory.idle_bytes

    def release_idle(self) -> None:
        self._tensor_memory.release_idle()

    def enlist_copies(self, entry: Entry) -> None:
        self._requests.reap()
        if entry.lead_bytes or entry.trail_bytes:
            assert entry.source is not None
            self._set_edges_aside(entry, entry.source)
        requests = self._requests
        if entry.from_source and not (requests.reads or requests.writes or self._copies):
            for chunk in entry.chunks:
                requests.start_or_queue(self._write_from_source(chunk))
        else:
            self._copies.extend(entry.chunks)
            self._begin()

    def enlist_reads(self, fill: Fill) -> None:
        self._ends.begin_fill(fill)
        self._requests.reap()
        for chunk in fill.entry.chunks:
            self._read(fill, chunk)
        if self._requests.writes or self._copies:
            self._begin()

    def hurry(self, fill: Fill) -> None:
        self._requests.hurry(fill)

    def make_progress(self) -> None:
        if self._requests.may_begin:
            self._requests.reap()
            self._begin()

    def wait_for_progress(self, seen: int, timeout_s: float = BLOCK_S) -> bool:
        return self._requests.wait(seen, timeout_s, self._begin, super().wait_for_progress)

    def allocate(self, entry: Entry, stride: Sequence[int], device: torch.device) -> Tensor:
        """Allocate a tensor at the start of its storage, with memory for whole pages."""
        if entry.byte_count == 0:
            return super().allocate(entry, stride, device)
        return self._tensor_memory.allocate(entry.size, stride, entry.dtype, entry.byte_count, entry.lead_bytes)

    def close(self, patience: Patience) -> bool:
        if not self.has_stopped:
            if not self._requests.close(patience, self.wait_for_progress):
                self._abandoned = True
                return False
            self.has_stopped, self._abandoned = True, False
        ledger = self._ledger
        with ledger.lock:
            self._requests.discard()
            self._copies.clear()
        ledger.tidy()
        self.pool.close()
        self.release_idle()
        return True

    # -- beginning -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Submit what is queued, then as many chunks as there is room for that are still to be written or copied from
        their tensors."""
        requests = self._requests
        has_room = requests.submit_queued()
        while self._copies:
            chunk = self._copies[0]
            if chunk.state is not ChunkState.CANCELLED:
                if chunk.entry.from_source:
                    if not has_room:
                        return
                    requests.writes.append(self._write_from_source(chunk))
                else:
                    buffer = self.pool.acquire()
                    if buffer is None:
                        return
                    self._copy_out(chunk, buffer)
                has_room = has_room and requests.submit_queued()
            self._copies.popleft()

    def _set_edges_aside(self, entry: Entry, source: Region) -> None:
        lead_bytes, trail_bytes = entry.lead_bytes, entry.trail_bytes
        if lead_bytes:
            entry.chunks[0].leading = ctypes.string_at(source.address, lead_bytes)
        if trail_bytes:
            end = source.address + entry.byte_count
            entry.chunks[-1].trailing = ctypes.string_at(end - trail_bytes, trail_bytes)

    def _write_from_source(self, chunk: Chunk) -> Request:
        source = chunk.entry.source
        assert source is not None
        address = source.address + chunk.start
        if self._checksum:
            chunk.checksum = checksum_of(bytes_at(address, chunk.length))
        return Request(chunk, address, None, None)

    def _read(self, fill: Fill, chunk: Chunk) -> None:
        """Read ``chunk`` from the file, or copy it from memory if its bytes are still there."""
        target = fill.target
        assert target is not None
        address = target.address + chunk.start
        if chunk.state is ChunkState.ON_DISK:
            self._requests.start_or_queue(Request(chunk, address, fill, None))
            return
        began_ns = time.perf_counter_ns()
        ctypes.memmove(address, self._address_of(chunk), chunk.length)
        self._ends.forwarded(fill, chunk)
        self._ends.trace("forward", chunk, began_ns)
        self._ends.read_is_over(fill, chunk)

    def _address_of(self, chunk: Chunk) -> int:
        """The memory that holds the bytes of ``chunk`` while they are not in the file."""
        source = chunk.entry.source
        if chunk.staging is not None:
            return chunk.staging.address
        if chunk.kept is not None:
            return chunk.kept.data_ptr()
        assert source is not None
        return source.address + chunk.start

    def _copy_out(self, chunk: Chunk, buffer: StagingBuffer) -> None:
        entry = chunk.entry
        source = entry.source
        assert source is not None
        began_ns = time.perf_counter_ns()
        # The copy uses all of torch's threads, which are unused while this thread is here.
        buffer.as_bytes(chunk.length).copy_(source.as_bytes()[chunk.start : chunk.start + chunk.length])
        if self._checksum:
            chunk.checksum = checksum_of(buffer.view[: chunk.length])
        chunk.staging, chunk.state = buffer, ChunkState.STAGED
        self._requests.writes.append(Request(chunk, buffer.address, None, buffer))
        self._ends.trace("copy", chunk, began_ns)
        self._ends.trace_levels()
        entry.uncopied -= 1
        self._ledger.source_is_safe(chunk)
