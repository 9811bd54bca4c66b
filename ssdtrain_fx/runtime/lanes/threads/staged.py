"""Chunks move through staging buffers, or from the file straight into CPU tensors.

On a GPU, staging is a tier between the device and the file: :mod:`ssdtrain_fx.runtime.policy.host_tier` says which
bytes stay there, and which are read into it before they are requested.

Guarantees:

* No thread waits for a staging buffer while it holds one, and copies leave one buffer to reads. So a staged write can
  always proceed, each write frees a buffer, and there is no deadlock. Chunks held in the host tier are the exception:
  they are written as soon as copies or reads lack buffers and fewer will come free than there are threads to use them.
* Reading ahead leaves one buffer to each thread and one to reads, and one thread to requested transfers. Bytes read
  ahead are dropped when a copy or a read lacks a buffer. A failure to read ahead is no error: the requested read
  reports it.
* The targets of reads without staging start on a page and own all pages that they touch. These pages are not written in
  the parent before the read has finished, so a fork does not disturb it (see
  :mod:`ssdtrain_fx.runtime.memory.staging`).
* A failed write loses nothing: the buffer returns to the pool only after its bytes are in ordinary memory.
"""

from __future__ import annotations

import collections
import functools
import time

from ssdtrain_fx.runtime.alignment import round_up
from ssdtrain_fx.runtime.book.records import Chunk, ChunkState, Entry, Fill
from ssdtrain_fx.runtime.book.traffic import Direction, Transfer
from ssdtrain_fx.runtime.lanes.checksums import checksum_error, checksum_of
from ssdtrain_fx.runtime.lanes.threads.transport import Queues, Transport
from ssdtrain_fx.runtime.lanes.threads.workers import Task, nothing
from ssdtrain_fx.runtime.memory.movers import Mark, Mover, Region, keep_bytes
from ssdtrain_fx.runtime.memory.raw_memory import bytes_at
from ssdtrain_fx.runtime.memory.staging import StagingBuffer, StagingPool
from ssdtrain_fx.runtime.policy.host_tier import HostTier

BUFFERS_FOR_READS = 1
"""Also if reads need none: with the smallest staging, one thread then stays free for reads when writes take long."""


class StagedTransport(Transport):
    """Moves chunks through the buffers of one pool."""

    def __init__(
        self, queues: Queues, mover: Mover, pool: StagingPool, *, checksum: bool, reads_need_staging: bool
    ) -> None:
        super().__init__(queues, mover)
        self._pool = pool
        self._checksum = checksum
        self._reads_need_staging = reads_need_staging
        self._writes: collections.deque[Chunk] = collections.deque()
        self._tier = HostTier()
        self._arriving_count = 0

    @property
    def will_read_ahead(self) -> bool:
        return self._tier.wants_reads and self._may_read_ahead()

    @property
    def has_more(self) -> bool:
        return bool(self._writes or self._tier.wants_reads)

    def join(self, entry: Entry) -> None:
        if self._mover.enqueues:
            self._tier.join(entry)

    def ask(self, entry: Entry) -> None:
        if self._mover.enqueues:
            self._tier.ask(entry)

    def forget(self, entry: Entry) -> None:
        chunks = self._tier.forget(entry)
        for chunk in chunks:
            if chunk.state is ChunkState.HELD:
                self._ledger.let_go(chunk)
            self._drop_from_staging(chunk)
        if chunks:
            self._workers.wake()

    def close(self) -> None:
        self._writes.clear()
        self._tier = HostTier()

    # -- making tasks, with the lock held ------------------------------------------------------------------------------

    def move_out(self, chunk: Chunk, source: Region) -> Task | None:
        while self._pool.available <= BUFFERS_FOR_READS:
            if not self._make_room(len(self._queues.copies)):
                return None
        buffer = self._pool.acquire()
        assert buffer is not None
        return functools.partial(self._copy_out, chunk, [source], buffer)

    def bring_back(self, fill: Fill, chunk: Chunk, target: Region) -> Task | None:
        if chunk.staging is None:
            return self._read_from_file(fill, chunk, target)
        task = functools.partial(self._forward, fill, chunk, target, chunk.staging, chunk.copied)
        if chunk.state is ChunkState.ON_DISK:  # read ahead, for this reload
            self._tier.take_ahead(chunk)
            chunk.staging = None
        else:
            chunk.staging.users += 1
        return task

    def next_write(self) -> Task | None:
        has_freed = False
        while self._writes:
            chunk = self._writes.popleft()
            buffer = chunk.staging
            assert buffer is not None
            if not chunk.entry.unneeded_on_disk:
                chunk.state = ChunkState.WRITING
                transfer = self._ledger.traffic.begin(Direction.WRITE)
                return functools.partial(self._write, transfer, chunk, buffer)
            chunk.staging = None
            self._pool.drop_user(buffer)
            self._ledger.cancel(chunk)
            has_freed = True
        return nothing if has_freed else None  # a copy that has just found no buffer looks again

    def next_ahead(self) -> Task | None:
        if self._arriving_count >= max(1, self._workers.count - 1) or not self._may_read_ahead():
            return None
        chunk = self._tier.next_to_read()
        buffer = None if chunk is None else self._pool.acquire()
        if chunk is None or buffer is None:
            return None
        chunk.arriving = True
        self._arriving_count += 1
        self._ledger.begin(chunk)
        return functools.partial(self._read_ahead, self._ledger.traffic.begin(Direction.READ), chunk, buffer)

    def _read_from_file(self, fill: Fill, chunk: Chunk, target: Region) -> Task | None:
        buffer = None
        if self._reads_need_staging:
            while not self._pool.available:
                if not self._make_room(len(self._queues.reads)):
                    return None
            buffer = self._pool.acquire()
            assert buffer is not None
        transfer = self._ledger.traffic.begin(Direction.READ)
        return functools.partial(self._read, transfer, fill, chunk, target, buffer)

    def _may_read_ahead(self) -> bool:
        return self._pool.available > self._workers.count + BUFFERS_FOR_READS

    def _make_room(self, wanted: int) -> bool:
        """Make room for ``wanted`` copies or reads, some of which lack a buffer. True: a buffer is free now.

        Otherwise, as many chunks are taken from the host tier to be written as the threads can write, less the buffers
        that come free anyway."""
        chunk = self._tier.pop_ahead()
        if chunk is not None:
            self._drop_from_staging(chunk)
            return True
        coming = self._pool.buffer_limit - self._pool.available - self._tier.held_count
        while coming < min(wanted, self._workers.count):
            chunk = self._tier.pop_held()
            if chunk is None:
                break
            coming += 1
            self._ledger.demote(chunk)
            self._writes.append(chunk)
            self._workers.wake()
        return False

    def _drop_from_staging(self, chunk: Chunk) -> None:
        buffer, chunk.staging = chunk.staging, None
        assert buffer is not None
        self._pool.drop_user(buffer)

    def _is_staged(self, chunk: Chunk) -> None:
        """``chunk`` is in staging, and the device does not need its tensor any more."""
        chunk.copied = None
        self._ledger.source_is_safe(chunk)
        if chunk.entry.host and not chunk.entry.unneeded_on_disk:
            self._ledger.hold(chunk)
            self._tier.hold(chunk)
        else:
            self._writes.append(chunk)

    # -- tasks, without the lock ---------------------------------------------------------------------------------------

    def _copy_out(self, chunk: Chunk, sources: list[Region], buffer: StagingBuffer) -> None:
        entry = chunk.entry
        began_ns = time.perf_counter_ns()
        # Popped: once a release learns that its tensor has left, this thread must not hold it any more.
        copied = self._mover.copy_out(sources.pop(), chunk.start, chunk.length, buffer, entry.ready)
        with self._ledger.lock:
            chunk.staging, chunk.copied, chunk.state = buffer, copied, ChunkState.STAGED
            if copied is None:
                self._is_staged(chunk)
            else:
                finish = functools.partial(self._is_staged, chunk)
                self._queues.streams.when_over(copied, entry.device, Direction.WRITE, finish)
            self._ends.trace("copy", chunk, began_ns)
            self._ends.trace_levels()
            self._queues.has_left(chunk)

    def _write(self, transfer: Transfer, chunk: Chunk, buffer: StagingBuffer) -> None:
        ledger, slot = self._ledger, chunk.entry.slot
        assert slot is not None
        if self._checksum:
            chunk.checksum = checksum_of(buffer.view[: chunk.length])
        began_ns = time.perf_counter_ns()
        error = self._write_to_file(buffer.view[: round_up(chunk.length)], slot.offset_bytes + chunk.start)
        end_s = ledger.traffic.clock()
        kept = None
        if error is not None:
            kept = keep_bytes(buffer.address, chunk.length)
            with ledger.lock:
                ledger.upkeep.note_write_error(error)
            ledger.tidy()
        with ledger.lock:
            self._ends.transferred(transfer, chunk, end_s, error)
            self._ends.trace("write", chunk, began_ns, error)
            if error is None and self._may_read_ahead() and self._tier.is_awaited(chunk.entry):
                self._tier.add_ahead(chunk)  # otherwise it would be read next
            else:
                self._drop_from_staging(chunk)
            self._ends.written(chunk, kept)
            self._workers.wake()

    def _write_to_file(self, data: memoryview, offset_bytes: int) -> OSError | None:
        file = self._ledger.file
        error = file.grow(offset_bytes + len(data))
        if error is not None:
            return error
        try:
            file.write(data, offset_bytes)
        except OSError as write_error:
            return write_error.with_traceback(None)  # otherwise a cycle: error, frames, error
        return None

    def _read(self, transfer: Transfer, fill: Fill, chunk: Chunk, target: Region, buffer: StagingBuffer | None) -> None:
        ledger, read_bytes = self._ledger, round_up(chunk.length)
        data = bytes_at(target.address + chunk.start, read_bytes) if buffer is None else buffer.view[:read_bytes]
        began_ns = time.perf_counter_ns()
        error = self._load(transfer, chunk, data)
        if error is not None:
            with ledger.lock:
                fill.fail(error)
                self._ends.trace("read", chunk, began_ns, error)
                self._queues.is_issued(fill, chunk, buffer, None)
            return
        mark = None
        if buffer is not None:
            mark = self._mover.copy_in(buffer, target, chunk.start, chunk.length, (fill.ready,))
        with ledger.lock:
            ledger.counters.bytes_read += chunk.length
            self._ends.trace("read", chunk, began_ns)
            self._queues.is_issued(fill, chunk, buffer, mark)

    def _read_ahead(self, transfer: Transfer, chunk: Chunk, buffer: StagingBuffer) -> None:
        ledger = self._ledger
        began_ns = time.perf_counter_ns()
        error = self._load(transfer, chunk, buffer.view[: round_up(chunk.length)])
        with ledger.lock:
            self._ends.trace("read ahead", chunk, began_ns, error)
            self._arriving_count -= 1
            chunk.arriving = False
            if error is None:
                ledger.counters.bytes_read += chunk.length
                ledger.counters.read_ahead_bytes += chunk.length
            if error is None and not chunk.entry.unneeded_on_disk:
                chunk.staging = buffer
                self._tier.add_ahead(chunk)
            else:
                self._pool.drop_user(buffer)
            self._queues.read_first(chunk.waiting_fills, chunk)
            self._workers.wake(1 + len(chunk.waiting_fills))
            chunk.waiting_fills.clear()
            ledger.settle(chunk.entry, chunk.length)
            self._ends.trace_levels()

    def _load(self, transfer: Transfer, chunk: Chunk, data: memoryview) -> Exception | None:
        """Read ``chunk`` into ``data``, in whole blocks."""
        ledger, slot = self._ledger, chunk.entry.slot
        assert slot is not None
        error = None
        try:
            ledger.file.read(data, slot.offset_bytes + chunk.start)
        except OSError as read_error:
            error = read_error.with_traceback(None)  # otherwise a cycle: error, this frame, error
        end_s = ledger.traffic.clock()
        with ledger.lock:
            self._ends.transferred(transfer, chunk, end_s, error)
        if error is None and self._checksum:
            return checksum_error(chunk, data[: chunk.length])
        return error

    def _forward(self, fill: Fill, chunk: Chunk, target: Region, buffer: StagingBuffer, copied: Mark) -> None:
        began_ns = time.perf_counter_ns()
        mark = self._mover.copy_in(buffer, target, chunk.start, chunk.length, (fill.ready, copied))
        with self._ledger.lock:
            self._ends.forwarded(fill, chunk)
            self._ends.trace("forward", chunk, began_ns)
            self._queues.is_issued(fill, chunk, buffer, mark)
