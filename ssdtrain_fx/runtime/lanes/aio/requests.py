"""What the kernel is asked to move: queued requests, requests in flight, and their answers.

Guarantees:

* A request is recorded before it is submitted, so that an exception cannot lose one: its memory is held until the
  kernel has finished with it.
* A failed write loses nothing: its bytes are copied to ordinary memory before the tensor is released or the buffer
  returns to the pool.
* One thread at a time takes answers from the kernel, and may block for them without the ledger's lock; other threads
  wait for it. With two, 1. A blocks for an answer, 2. B takes the answer A is blocked for, 3. A blocks forever.
* After the kernel has blocked the caller because the queue of the block device was full, the kernel is given no more
  bytes at a time than were in flight then. What has no room waits here, as it does for a context that is full.
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
from collections.abc import Callable

from ssdtrain_fx.runtime.alignment import round_up
from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Chunk, ChunkState, Fill
from ssdtrain_fx.runtime.book.traffic import Direction, Transfer
from ssdtrain_fx.runtime.lanes.aio.kernel import READ, WRITE, Aio
from ssdtrain_fx.runtime.lanes.checksums import checksum_error
from ssdtrain_fx.runtime.lanes.ends import Ends
from ssdtrain_fx.runtime.memory.movers import keep_bytes
from ssdtrain_fx.runtime.memory.raw_memory import bytes_at
from ssdtrain_fx.runtime.memory.staging import StagingBuffer, StagingPool
from ssdtrain_fx.runtime.policy.patience import BLOCK_S, Patience
from ssdtrain_fx.runtime.shield import finishes_within
from ssdtrain_fx.runtime.storage.spill_file import bytes_done

BLOCKED_S = 0.001
BLOCKED_BYTES_PER_S = 4e9
"""The kernel takes a request of n bytes in less than ``BLOCKED_S + n / BLOCKED_BYTES_PER_S``, without huge pages too,
unless the queue of the block device is full. Then ``io_submit`` blocks until the disk has served as many bytes."""
MIN_CAPACITY_BYTES = 64 << 20
"""The queue of a block device holds more: 128 requests or more of 512 KiB or more, by default. With fewer bytes in
flight, something else has blocked."""
KERNEL_S = 10.0
"""How long ``close`` waits for the kernel after a failure."""


class Request:
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


class Requests:
    """The requests of one lane. All methods except :meth:`wait` and :meth:`close` need the ledger's lock."""

    def __init__(self, ledger: Ledger, aio: Aio, ends: Ends, pool: StagingPool, *, checksum: bool) -> None:
        self.reads: collections.deque[Request] = collections.deque()
        self.writes: collections.deque[Request] = collections.deque()
        self._ledger = ledger
        self._aio = aio
        self._ends = ends
        self._pool = pool
        self._checksum = checksum
        self._in_flight: dict[int, Request] = {}
        self._in_flight_bytes = 0
        self._capacity_bytes = math.inf
        """Of the queue of the block device."""
        self._answers: collections.deque[tuple[int, int]] = collections.deque()
        """Answers of the kernel whose requests have not been ended."""
        self._cookies = itertools.count(1)
        self._reaper = threading.Lock()
        """Held by the thread that blocks for answers. Whoever takes it does not hold the ledger's lock."""
        self._closing = False

    def __len__(self) -> int:
        """How many are in flight."""
        return len(self._in_flight)

    @property
    def may_begin(self) -> bool:
        """Whether further requests may be submitted."""
        return not self._closing and self._ledger.change.failure is None

    def hurry(self, fill: Fill) -> None:
        """Move the reads of ``fill`` to the front of the queue."""
        self.reads = collections.deque(sorted(self.reads, key=lambda read: read.fill is not fill))

    # -- beginning -----------------------------------------------------------------------------------------------------

    def start_or_queue(self, request: Request) -> None:
        queue = self.writes if request.fill is None else self.reads
        if queue or not self._start(request):
            queue.append(request)

    def submit_queued(self) -> bool:
        """Submit queued reads, then queued writes. Returns whether all of them are in flight or finished."""
        return (not self.reads or self._submit(self.reads)) and (not self.writes or self._submit(self.writes))

    def _submit(self, queue: collections.deque[Request]) -> bool:
        while queue:
            if not self._start(queue[0]):
                return False
            queue.popleft()
        return True

    def _start(self, request: Request) -> bool:
        """Submit ``request``, or drop it if it is no longer needed. Returns False if there is no room now."""
        aio, ledger, in_flight = self._aio, self._ledger, self._in_flight
        if len(in_flight) >= aio.depth or self._in_flight_bytes >= self._capacity_bytes:
            return False
        chunk, done, is_write = request.chunk, request.done, request.fill is None
        entry = chunk.entry
        if done == 0 and (entry.dead or entry.stays):
            self._abandon(request)
            return True
        error = ledger.file.grow(request.offset + request.total) if is_write else None
        if error is None:
            cookie = next(self._cookies)
            in_flight[cookie] = request
            request.began_ns = request.began_ns or time.perf_counter_ns()
            descriptor, offset = ledger.file.locate(request.offset + done)
            length = request.total - done
            start_s = ledger.traffic.clock()
            try:
                accepted = aio.submit(request.opcode, descriptor, request.address + done, length, offset, cookie)
            except OSError as submit_error:
                accepted, error = False, submit_error.with_traceback(None)  # otherwise a cycle: error, this frame
            if accepted:
                if is_write:
                    chunk.state = ChunkState.WRITING
                request.timed = ledger.traffic.begin(Direction.WRITE if is_write else Direction.READ, length, start_s)
                self._note_submitted(length, ledger.traffic.clock() - start_s)
                return True
            del in_flight[cookie]
            if error is None:
                if in_flight:
                    return False  # a request that completes makes room
                error = OSError(errno.EAGAIN, "the kernel accepts no request although none is in flight")
        self._finish(request, error)
        return True

    def _note_submitted(self, length: int, taken_s: float) -> None:
        before_bytes = self._in_flight_bytes
        self._in_flight_bytes += length
        if before_bytes >= MIN_CAPACITY_BYTES and taken_s > BLOCKED_S + length / BLOCKED_BYTES_PER_S:
            self._capacity_bytes = before_bytes

    # -- ending --------------------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Collect answers without blocking. If another thread is blocked for answers, that thread collects them."""
        if self._in_flight and not self._reaper.locked():
            self._aio.reap(0.0)
            self._take_answers(None)

    def wait(
        self, seen: int, timeout_s: float, begin: Callable[[], None], wait_for_other: Callable[[int, float], bool]
    ) -> bool:
        """See :meth:`ssdtrain_fx.runtime.lanes.lane.Lane.wait_for_progress`. ``begin`` is called, with the lock held,
        when answers may have made room, and ``wait_for_other`` if another thread is blocked for answers."""
        ledger = self._ledger
        with ledger.lock:
            is_alone = not self._reaper.locked()
            if is_alone and not self._in_flight:
                return False
        if not is_alone:
            return wait_for_other(seen, timeout_s)
        try:
            with self._reaper:
                with ledger.lock:
                    if seen != ledger.progress.count or not self._in_flight:  # another thread was here first
                        return True
                self._aio.reap(timeout_s)
                end_s = ledger.traffic.clock()
                with ledger.lock, ledger.change:
                    self._take_answers(end_s)
                    if self.may_begin:
                        begin()
        finally:
            with ledger.lock:  # after the reaper is free: who found it taken until then may have to be the next one
                ledger.progress.notify_all()
        return True

    def _take_answers(self, end_s: float | None) -> None:
        """Finish the requests that have answers. ``end_s`` is when they completed; None if only an upper bound is
        known."""
        ledger = self._ledger
        self._answers.extend(self._aio.answers())
        if not self._answers:
            return
        now_s = ledger.traffic.clock() if end_s is None else end_s
        while self._answers:
            cookie, result = self._answers.popleft()
            request = self._in_flight.pop(cookie, None)
            if request is None:
                continue
            if ledger.change.failure is not None:  # the kernel needs its memory no more; nothing else is certain
                ledger.trash.append(request)
                continue
            timed, request.timed = request.timed, None
            assert timed is not None
            length = request.total - request.done
            self._in_flight_bytes -= length
            ledger.traffic.end(timed, max(0, result), now_s)
            if result == length:
                self._finish(request, None)
            else:
                self._retry(request, result)
        ledger.traffic.measure(now_s, is_late=end_s is None)

    def _retry(self, request: Request, result: int) -> None:
        """Move the bytes that ``request`` has left, or end it with its error."""
        is_read = request.fill is not None
        verb = "read" if is_read else "write"
        try:
            if result < 0:
                raise OSError(-result, os.strerror(-result))
            request.done = bytes_done(request.done, result, request.total, verb, request.offset, self._ledger.file.path)
        except OSError as error:
            self._finish(request, error)
        else:
            (self.reads if is_read else self.writes).appendleft(request)

    def _finish(self, request: Request, error: OSError | None) -> None:
        chunk, fill, ledger = request.chunk, request.fill, self._ledger
        address = request.address - len(chunk.leading)
        if fill is None:
            kept = None
            if error is not None:
                kept = keep_bytes(address, chunk.length)
                ledger.upkeep.note_write_error(error)
            self._leave_memory(request)
            if ledger.trace is not None:
                self._ends.trace("write", chunk, request.began_ns, error, asynchronous=True)
            self._ends.written(chunk, kept)
            return
        failure: Exception | None = error
        if error is None:
            leading, trailing = chunk.leading, chunk.trailing
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
            self._ends.trace("read", chunk, request.began_ns, failure, asynchronous=True)
        self._ends.read_is_over(fill, chunk)

    def _abandon(self, request: Request) -> None:
        """Drop a request that nobody needs any more and that has not begun."""
        if request.chunk.state is ChunkState.CANCELLED:  # cancelled before it left its tensor: already settled
            return
        if request.fill is not None:
            self._ends.read_is_over(request.fill, request.chunk)
            return
        self._leave_memory(request)
        self._ledger.cancel(request.chunk)

    def _leave_memory(self, request: Request) -> None:
        """Drop the staging buffer, or the source tensor, that a write no longer needs."""
        chunk = request.chunk
        if request.buffer is None:
            chunk.entry.uncopied -= 1
            self._ledger.source_is_safe(chunk)
        else:
            chunk.staging = None
            self._pool.drop_user(request.buffer)

    # -- closing -------------------------------------------------------------------------------------------------------

    def close(self, patience: Patience, wait: Callable[[int, float], bool]) -> bool:
        """Begin nothing further, wait until no request is in the kernel, and close the context. ``wait`` is the lane's
        ``wait_for_progress``. False: patience ran out.

        After a failure, a request may be recorded that the kernel never got, or whose answer was lost. Then only the
        kernel knows when it has finished, and it is asked in a way that may block.
        """
        self._closing = True
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
            wait(seen, min(BLOCK_S, left_s))
        self._close_aio()
        return True

    def _close_aio(self) -> None:
        with self._reaper:
            self._aio.close()

    def discard(self) -> None:
        """Drop all requests, after :meth:`close`. What they hold goes to the ledger's trash."""
        self._ledger.trash.extend((*self.reads, *self.writes, *self._in_flight.values()))
        for queue in (self.reads, self.writes, self._in_flight):
            queue.clear()
