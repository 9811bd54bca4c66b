"""A lane for CPU tensors without threads: the ops drive it, and the kernel moves the data (native AIO).

Why: see :mod:`ssdtrain_fx.runtime.lanes.aio.kernel`. The file is written directly from the tensor and read directly into the
tensor that ``reload`` returns. Direct I/O moves whole pages, but tensors start and end anywhere. So the bytes before
the first page boundary and after the last one stay in memory, and both tensors have the same offset within a page::

    page        |         |         |         |         |
    tensor            [===|=========|=========|====]
                       kept   to the file      kept

::

    offload   source --io_submit--> file                                 while the kernel takes requests
              source ---copy---> staging buffer --io_submit--> file      small tensors, while there are buffers
    any op    submits queued requests, reads first; collects answers if requests are queued or room is short
    release   continues until every byte of the tensor is written or copied
    reload    file --io_submit--> y
    wait      continues until every read into y has completed

Guarantees:

* A source tensor, a staging buffer, a read target and the file are held until the kernel has finished with them, even
  if the user drops them. Requests are recorded before they are submitted, so that an exception cannot lose one.
* One thread at a time takes answers from the kernel, and may block for them without the ledger's lock; other threads
  wait for it. With two, 1. A blocks for an answer, 2. B takes the answer A is blocked for, 3. A blocks forever.
* Before a thread blocks, every request that can begin has begun. If nothing is in flight, :meth:`wait_for_progress`
  returns False instead of blocking.
* A failed write loses nothing: its bytes are copied to ordinary memory before the tensor is released or the buffer
  returns to the pool.
* A read target owns all pages that it touches. The parent process does not write to these pages before the read has
  completed, so a fork does not disturb it (see :mod:`ssdtrain_fx.runtime.memory.staging`).
* An exception within the bookkeeping, even KeyboardInterrupt, stops the engine; no thread waits forever. Memory is
  still held for as long as the kernel may use it.

The next op that waits or needs space notices a transfer that has completed between two ops. It is not needed earlier,
and where :mod:`ssdtrain_fx.runtime.lanes.aio.kernel` cannot read answers from memory, asking for them costs a system call.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import itertools
import math
import os
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ssdtrain_fx.runtime.alignment import ALIGNMENT_BYTES, round_up
from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Chunk, ChunkState, Entry, Fill
from ssdtrain_fx.runtime.book.traffic import Direction, Transfer
from ssdtrain_fx.runtime.lanes.aio.kernel import READ, WRITE, Aio
from ssdtrain_fx.runtime.lanes.checksums import checksum_error, checksum_of
from ssdtrain_fx.runtime.lanes.lane import Lane
from ssdtrain_fx.runtime.memory.movers import CpuMover, Region, keep_bytes
from ssdtrain_fx.runtime.memory.raw_memory import bytes_at
from ssdtrain_fx.runtime.memory.staging import StagingBuffer, StagingPool
from ssdtrain_fx.runtime.memory.tensor_memory import TensorMemory
from ssdtrain_fx.runtime.policy.patience import BLOCK_S, Patience
from ssdtrain_fx.runtime.shield import finishes_within
from ssdtrain_fx.runtime.storage.spill_file import bytes_done

DIRECT_CHUNK_BYTES = 16 << 20
"""Every chunk runs some Python on the computing thread, with cold caches. The ops of a BERT step took 126 ms with
chunks of 4 MiB, and 20 ms less with chunks larger than the tensors (2 cores, 2026-11-21)."""
BUSY_BYTES = 4 << 20
"""One request of this size keeps the disk busy. A guess."""

KERNEL_S = 10.0
"""How long ``close`` waits for the kernel after a failure."""

FROM_SOURCE_BYTES = 256 << 10
"""Tensors of at least this size are written directly, without staging. Pinning their pages takes less time than a copy;
smaller tensors save little, and their edges weigh more. A guess, not measured."""


class _Transfer:
    """Moves the pages of one chunk between the memory at ``address`` and the file. ``fill`` is set for reads,
    ``buffer`` for writes from staging."""

    __slots__ = ("address", "began_ns", "buffer", "chunk", "done", "fill", "offset", "opcode", "timed", "total")

    def __init__(self, chunk: Chunk, address: int, fill: Fill | None, buffer: StagingBuffer | None) -> None:
        entry, lead_bytes = chunk.entry, len(chunk.leading)
        slot = entry.slot
        assert slot is not None
        self.chunk = chunk
        self.fill = fill
        self.buffer = buffer
        self.opcode = WRITE if fill is None else READ
        self.address = address + lead_bytes
        self.offset = slot.offset_bytes + chunk.start + lead_bytes - entry.lead_bytes
        self.total = round_up(chunk.length - lead_bytes - len(chunk.trailing))
        self.done = 0
        self.began_ns = 0
        self.timed: Transfer | None = None
        """Set while the request is in flight."""


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
        self._reads: collections.deque[_Transfer] = collections.deque()
        self._copies: collections.deque[Chunk] = collections.deque()
        self._writes: collections.deque[_Transfer] = collections.deque()
        self._in_flight: dict[int, _Transfer] = {}
        self._answers: collections.deque[tuple[int, int]] = collections.deque()
        """Answers of the kernel whose transfers have not been ended."""
        self._cookies = itertools.count(1)
        self._tensor_memory = tensor_memory
        self._reaper = threading.Lock()
        """Held by the thread that blocks for answers. Whoever takes it does not hold the ledger's lock."""
        self._closing = False

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
        if self._has_backlog or not (entry.from_source or self.pool.available):
            self._reap()
        if entry.lead_bytes or entry.trail_bytes:
            assert entry.source is not None
            self._set_edges_aside(entry, entry.source)
        if entry.from_source and not (self._reads or self._writes or self._copies):
            for chunk in entry.chunks:
                self._start_or_queue(self._write_from_source(chunk), self._writes)
        else:
            self._copies.extend(entry.chunks)
            self._begin()

    def enlist_reads(self, fill: Fill) -> None:
        self._ends.begin_fill(fill)
        if self._has_backlog or fill.entry.busy > len(fill.entry.chunks):  # its write may have completed
            self._reap()
        for chunk in fill.entry.chunks:
            self._read(fill, chunk)
        if self._writes or self._copies:
            self._begin()

    def hurry(self, fill: Fill) -> None:
        self._reads = collections.deque(sorted(self._reads, key=lambda read: read.fill is not fill))

    def make_progress(self) -> None:
        if self._may_begin:
            self._reap()
            self._begin()

    def wait_for_progress(self, seen: int, timeout_s: float = BLOCK_S) -> bool:
        ledger = self._ledger
        with ledger.lock:
            is_alone = not self._reaper.locked()
            if is_alone and not self._in_flight:
                return False
        if not is_alone:
            return super().wait_for_progress(seen, timeout_s)
        try:
            with self._reaper:
                with ledger.lock:
                    if seen != ledger.progress.count or not self._in_flight:  # another thread was here first
                        return True
                self._aio.reap(timeout_s)
                end_s = ledger.traffic.clock()
                with ledger.lock, ledger.change:
                    self._take_answers(end_s)
                    if self._may_begin:
                        self._begin()
        finally:
            with ledger.lock:  # after the reaper is free: who found it taken until then may have to be the next one
                ledger.progress.notify_all()
        return True

    def allocate(self, entry: Entry, stride: Sequence[int], device: torch.device) -> Tensor:
        """Allocate a tensor at the start of its storage, with memory for whole pages."""
        if entry.byte_count == 0:
            return super().allocate(entry, stride, device)
        return self._tensor_memory.allocate(entry.size, stride, entry.dtype, entry.byte_count, entry.lead_bytes)

    def close(self, patience: Patience) -> bool:
        if not self.has_stopped:
            self._closing = True
            if not self._wait_for_kernel(patience):
                self._abandoned = True
                return False
            self.has_stopped, self._abandoned = True, False
        ledger = self._ledger
        with ledger.lock:
            ledger.trash.extend(self._reads)
            ledger.trash.extend(self._in_flight.values())
            for queue in (self._reads, self._copies, self._writes, self._in_flight):
                queue.clear()
        ledger.tidy()
        self.pool.close()
        self.release_idle()
        return True

    def _wait_for_kernel(self, patience: Patience) -> bool:
        """Wait until no request is in the kernel, and close the context. False: patience ran out.

        After a failure, a request may be recorded that the kernel never got, or whose answer was lost. Then only the
        kernel knows when it has finished, and it is asked in a way that may block.
        """
        ledger = self._ledger
        if ledger.change.failure is not None:
            with ledger.lock:
                left_s = patience.left_s()
            return finishes_within(self._close_aio, min(KERNEL_S, left_s))
        while True:
            with ledger.lock:
                if not self._in_flight:
                    break
                left_s, seen = patience.left_s(), ledger.progress.count
            if not left_s:
                return False
            self.wait_for_progress(seen, min(BLOCK_S, left_s))
        self._close_aio()
        return True

    def _close_aio(self) -> None:
        with self._reaper:
            self._aio.close()

    @property
    def _may_begin(self) -> bool:
        return not self._closing and self._ledger.change.failure is None

    @property
    def _has_backlog(self) -> bool:
        """Whether collecting answers now could let a request begin, or a trace is recording when transfers end."""
        return bool(
            self._reads
            or self._writes
            or self._copies
            or len(self._in_flight) >= self._aio.depth // 2
            or self._ledger.trace is not None
        )

    # -- beginning -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Submit queued reads, then queued writes, then as many chunks as there is room for that are still to be
        written or copied from their tensors."""
        has_room = not self._reads or self._submit(self._reads)
        has_room = has_room and (not self._writes or self._submit(self._writes))
        while self._copies:
            chunk = self._copies[0]
            if chunk.state is not ChunkState.CANCELLED:
                if chunk.entry.from_source:
                    if not has_room:
                        return
                    self._writes.append(self._write_from_source(chunk))
                else:
                    buffer = self.pool.acquire()
                    if buffer is None:
                        return
                    self._copy_out(chunk, buffer)
                has_room = has_room and self._submit(self._writes)
            self._copies.popleft()

    def _set_edges_aside(self, entry: Entry, source: Region) -> None:
        lead_bytes, trail_bytes = entry.lead_bytes, entry.trail_bytes
        if lead_bytes:
            entry.chunks[0].leading = ctypes.string_at(source.address, lead_bytes)
        if trail_bytes:
            end = source.address + entry.byte_count
            entry.chunks[-1].trailing = ctypes.string_at(end - trail_bytes, trail_bytes)

    def _write_from_source(self, chunk: Chunk) -> _Transfer:
        source = chunk.entry.source
        assert source is not None
        address = source.address + chunk.start
        if self._checksum:
            chunk.checksum = checksum_of(bytes_at(address, chunk.length))
        return _Transfer(chunk, address, None, None)

    def _read(self, fill: Fill, chunk: Chunk) -> None:
        """Read ``chunk`` from the file, or copy it from memory if its bytes are still there."""
        target = fill.target
        assert target is not None
        address = target.address + chunk.start
        if chunk.state is ChunkState.ON_DISK:
            self._start_or_queue(_Transfer(chunk, address, fill, None), self._reads)
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
        self._writes.append(_Transfer(chunk, buffer.address, None, buffer))
        self._ends.trace("copy", chunk, began_ns)
        self._ends.trace_levels()
        entry.uncopied -= 1
        self._ledger.source_is_safe(chunk)

    def _start_or_queue(self, transfer: _Transfer, queue: collections.deque[_Transfer]) -> None:
        if queue or not self._start(transfer):
            queue.append(transfer)

    def _submit(self, queue: collections.deque[_Transfer]) -> bool:
        """Submit ``queue`` in order. Returns whether all of it is in flight or finished."""
        while queue:
            if not self._start(queue[0]):
                return False
            queue.popleft()
        return True

    def _start(self, transfer: _Transfer) -> bool:
        """Submit ``transfer``, or drop it if it is no longer needed. Returns False if there is no room now."""
        aio, ledger, in_flight = self._aio, self._ledger, self._in_flight
        if len(in_flight) >= aio.depth:
            return False
        chunk, done, is_write = transfer.chunk, transfer.done, transfer.fill is None
        entry = chunk.entry
        if done == 0 and (entry.dead or entry.stays):
            self._abandon(transfer)
            return True
        error = ledger.file.grow(transfer.offset + transfer.total) if is_write else None
        if error is None:
            cookie = next(self._cookies)
            in_flight[cookie] = transfer
            transfer.began_ns = transfer.began_ns or time.perf_counter_ns()
            descriptor, offset = ledger.file.locate(transfer.offset + done)
            length = transfer.total - done
            try:
                accepted = aio.submit(transfer.opcode, descriptor, transfer.address + done, length, offset, cookie)
            except OSError as submit_error:
                accepted, error = False, submit_error.with_traceback(None)  # otherwise a cycle: error, this frame
            if accepted:
                if is_write:
                    chunk.state = ChunkState.WRITING
                transfer.timed = ledger.traffic.begin(Direction.WRITE if is_write else Direction.READ, length)
                return True
            del in_flight[cookie]
            if error is None:
                if in_flight:
                    return False  # a request that completes makes room
                error = OSError(errno.EAGAIN, "the kernel accepts no request although none is in flight")
        self._finish(transfer, error)
        return True

    # -- ending --------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Collect answers without blocking. If another thread is blocked for answers, that thread collects them."""
        if self._in_flight and not self._reaper.locked():
            self._aio.reap(0.0)
            self._take_answers(None)

    def _take_answers(self, end_s: float | None) -> None:
        """Finish the transfers that have answers. ``end_s`` is when they completed; None if only an upper bound is
        known."""
        ledger = self._ledger
        self._answers.extend(self._aio.answers())
        while self._answers:
            cookie, result = self._answers.popleft()
            transfer = self._in_flight.pop(cookie, None)
            if transfer is None:
                continue
            if ledger.change.failure is not None:  # the kernel needs its memory no more; nothing else is certain
                ledger.trash.append(transfer)
                continue
            timed, transfer.timed = transfer.timed, None
            assert timed is not None
            if end_s is None:  # the disk may have been idle since: the rate is a lower bound
                found_s, busy_with = ledger.traffic.clock(), math.inf
            else:
                found_s, busy_with = end_s, self._ends.busy_with if transfer.total < BUSY_BYTES else 1
            ledger.traffic.end(timed, max(0, result), found_s, busy_with=busy_with)
            if result == transfer.total - transfer.done:
                self._finish(transfer, None)
            else:
                self._retry(transfer, result)

    def _retry(self, transfer: _Transfer, result: int) -> None:
        """Move the bytes that a request has left, or end it with its error."""
        is_read = transfer.fill is not None
        try:
            if result < 0:
                raise OSError(-result, os.strerror(-result))
            transfer.done = bytes_done(
                transfer.done,
                result,
                transfer.total,
                "read" if is_read else "write",
                transfer.offset,
                self._ledger.file.path,
            )
        except OSError as error:
            self._finish(transfer, error)
        else:
            (self._reads if is_read else self._writes).appendleft(transfer)

    def _finish(self, transfer: _Transfer, error: OSError | None) -> None:
        chunk, fill, ledger = transfer.chunk, transfer.fill, self._ledger
        if fill is None:
            kept = None
            if error is not None:
                kept = keep_bytes(self._address_of(chunk), chunk.length)
                ledger.note_write_error(error)
            self._leave_memory(transfer)
            if ledger.trace is not None:
                self._ends.trace("write", chunk, transfer.began_ns, error, asynchronous=True)
            self._ends.written(chunk, kept)
            return
        failure: Exception | None = error
        if error is None:
            leading, trailing = chunk.leading, chunk.trailing
            address = transfer.address - len(leading)
            if leading:
                ctypes.memmove(address, leading, len(leading))
            if trailing:
                ctypes.memmove(address + chunk.length - len(trailing), trailing, len(trailing))
            if self._checksum:
                failure = checksum_error(chunk, bytes_at(address, chunk.length))
        if failure is None:
            ledger.counters.bytes_read += chunk.length
        else:
            fill.fail(failure)
        if ledger.trace is not None:
            self._ends.trace("read", chunk, transfer.began_ns, failure, asynchronous=True)
        self._ends.read_is_over(fill, chunk)

    def _abandon(self, transfer: _Transfer) -> None:
        """Drop a transfer that is no longer needed and has not begun."""
        if transfer.chunk.state is ChunkState.CANCELLED:  # cancelled before it left its tensor: already settled
            return
        if transfer.fill is not None:
            self._ends.read_is_over(transfer.fill, transfer.chunk)
            return
        self._leave_memory(transfer)
        self._ledger.cancel(transfer.chunk)

    def _leave_memory(self, transfer: _Transfer) -> None:
        """Drop the staging buffer, or the source tensor, that a write no longer needs."""
        chunk = transfer.chunk
        if transfer.buffer is None:
            chunk.entry.uncopied -= 1
            self._ledger.source_is_safe(chunk)
        else:
            chunk.staging = None
            self.pool.drop_user(transfer.buffer)
