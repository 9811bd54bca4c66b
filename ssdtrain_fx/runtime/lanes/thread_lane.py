"""The I/O threads for one kind of device, and what they do with a chunk.

Threads work everywhere, including with buffered files and with devices that have to be waited for. Two threads with
large direct transfers reach the rate of the disk, and neither ``pwrite`` nor ``memmove`` holds the GIL. For CPU tensors
:mod:`ssdtrain_fx.runtime.lanes.aio_lane` is preferred where it works.

On a GPU, staging is a separate tier between the device and the file: :mod:`ssdtrain_fx.runtime.policy.host_tier` says
which bytes stay there, and which are read into it before they are requested.

Guarantees:

* Order of priority: reads that a thread waits for; reads, because a ``wait`` will need them; copies out of tensors,
  because a ``release`` will need them; writes; reads ahead. Each queue is first in, first out.
* Reads of CPU tensors go straight into the tensor, other reads go through a staging buffer.
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
* Each op wakes only one thread, because every wake-up takes the GIL from the training thread. A thread that takes a
  task and leaves others wakes the next one.
* Copies that are enqueued on a device are followed by one more thread per device and direction, so that a slow device
  delays no other one, and no thread asks a device for its state with the lock held.
* The threads are daemons. They start with the first chunk, and :meth:`ThreadLane.close` joins them unless the disk or a
  device hangs.
"""

from __future__ import annotations

import collections
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ssdtrain_fx.runtime.alignment import round_up
from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Chunk, ChunkState, Entry, Fill
from ssdtrain_fx.runtime.book.traffic import Direction, Transfer
from ssdtrain_fx.runtime.lanes.lane import Lane, checksum_error, checksum_of
from ssdtrain_fx.runtime.memory.movers import Mark, Mover, Region, keep_bytes
from ssdtrain_fx.runtime.memory.raw_memory import bytes_at
from ssdtrain_fx.runtime.memory.staging import StagingBuffer, StagingPool
from ssdtrain_fx.runtime.memory.tensor_memory import TensorMemory
from ssdtrain_fx.runtime.policy.host_tier import HostTier
from ssdtrain_fx.runtime.policy.patience import BLOCK_S, Patience

BUFFERS_FOR_READS = 1
"""Also if reads need none: with the smallest staging, one thread then stays free for reads when writes take long."""

Task = Callable[[], None]


class _Stream:
    """Copies that a device makes in order, each with what to do when it is over, and the thread that follows them."""

    def __init__(self, lock: threading.RLock, follow: Callable[[_Stream], None], name: str) -> None:
        self.changed = threading.Condition(lock)
        self.copies: collections.deque[tuple[Mark, Task]] = collections.deque()
        self.thread = threading.Thread(target=follow, args=(self,), name=name, daemon=True)


class _Caller:
    """A call of :meth:`ThreadLane.begin_copies`. It is over when this object dies."""


class ThreadLane(Lane):
    """A lane whose threads do the work."""

    def __init__(
        self,
        ledger: Ledger,
        mover: Mover,
        pool: StagingPool,
        *,
        thread_count: int,
        checksum: bool,
        tensor_memory: TensorMemory | None = None,
    ) -> None:
        """``tensor_memory`` allocates tensors that reads go straight into; None if reads need staging."""
        super().__init__(ledger, mover, pool, checksum=checksum)
        self._tensor_memory = tensor_memory
        self._work = threading.Condition(ledger.lock)
        self._reads: collections.deque[tuple[Fill, Chunk]] = collections.deque()
        self._copies: collections.deque[Chunk] = collections.deque()
        self._writes: collections.deque[Chunk] = collections.deque()
        self._streams: dict[tuple[torch.device, Direction], _Stream] = {}
        """Copies that are enqueued on devices, by device and by what the disk does before or after them."""
        self.busy_with = thread_count
        self._thread_count = thread_count
        self._threads: list[threading.Thread] = []
        self._callers: weakref.WeakSet[_Caller] = weakref.WeakSet()
        """Threads that are enqueuing copies."""
        self._closing = False
        self._draining = False
        """Nothing will be enqueued on a device any more."""
        self._tier = HostTier()
        self.has_host_tier = mover.enqueues
        self._arriving_count = 0
        ledger.when_unneeded.append(self._forget)

    # -- called by the engine ------------------------------------------------------------------------------------------

    def allocate(self, entry: Entry, stride: Sequence[int], device: torch.device) -> Tensor:
        if self._tensor_memory is None or entry.byte_count == 0:
            return super().allocate(entry, stride, device)
        return self._tensor_memory.allocate(entry.size, stride, entry.dtype, entry.byte_count)

    @property
    def idle_bytes(self) -> int:
        return 0 if self._tensor_memory is None else self._tensor_memory.idle_bytes

    def release_idle(self) -> None:
        if self._tensor_memory is not None:
            self._tensor_memory.release_idle()

    @property
    def will_read_ahead(self) -> bool:
        return self._tier.wants_reads and self._may_read_ahead() and not self._closing

    def enlist_copies(self, entry: Entry) -> None:
        self._copies.extend(self._in_turns(entry))
        if self.has_host_tier:
            self._tier.join(entry)
        self._start_threads()
        if not self.mover.enqueues:  # otherwise the caller begins the copies itself
            self._work.notify()

    def enlist_reads(self, fill: Fill) -> None:
        self._begin_fill(fill)
        for chunk in self._in_turns(fill.entry):
            if chunk.state in (ChunkState.SOURCE, ChunkState.COPYING):
                chunk.waiting_fills.append(fill)
            else:
                self._reads.append((fill, chunk))
        if self.has_host_tier:
            self._tier.ask(fill.entry)
        self._start_threads()
        self._work.notify()

    def hurry(self, fill: Fill) -> None:
        self._reads = collections.deque(sorted(self._reads, key=lambda read: read[0] is not fill))

    def begin_copies(self) -> None:
        if not self.mover.enqueues:
            return
        ledger = self._ledger
        caller = _Caller()
        try:
            with ledger.lock:
                self._callers.add(caller)
            while True:
                with ledger.lock:
                    task = None if self._closing else self._next_copy()
                if task is None:
                    return
                task()
        except BaseException as failure:  # a chunk that was taken may be neither in the tensor nor in staging now
            ledger.stop_because_of(failure)
            if not isinstance(failure, Exception) or isinstance(failure, MemoryError):  # the caller must learn of it
                raise
        finally:
            del caller  # at once, so that no interrupt comes before it: `close` waits for this caller
            with ledger.lock:
                ledger.progress.notify_all()

    def close(self, patience: Patience) -> bool:
        ledger = self._ledger
        with ledger.lock:
            self._closing = True
            self._work.notify_all()
        if not self._join(self._threads, patience):
            return False
        while True:
            with ledger.lock:
                if not self._callers:
                    break
                left_s, seen = patience.left_s(), ledger.progress.count
            if not left_s:
                return False
            self.wait_for_progress(seen, min(BLOCK_S, left_s))
        with ledger.lock:
            self._draining = True
            for stream in self._streams.values():
                stream.changed.notify()
        if not self._join([stream.thread for stream in self._streams.values()], patience):
            return False
        self.has_stopped = True
        for queue in (self._reads, self._copies, self._writes):
            queue.clear()
        self._streams.clear()
        self._tier = HostTier()
        try:
            self.mover.forget(self.pool.close())
        finally:
            self.release_idle()
        return True

    def _join(self, threads: Sequence[threading.Thread], patience: Patience) -> bool:
        """Wait until ``threads`` have ended. False: patience ran out."""
        for thread in threads:
            while thread.is_alive():
                with self._ledger.lock:
                    left_s = patience.left_s()
                if not left_s:
                    return False
                thread.join(min(BLOCK_S, left_s))
        return True

    # -- following the device ------------------------------------------------------------------------------------------

    def _when_over(self, mark: Mark, device: torch.device, direction: Direction, finish: Task) -> None:
        """Call ``finish``, with the lock held, when the device has reached ``mark``. Needs the lock."""
        stream = self._streams.get((device, direction))
        if stream is None:
            stream = _Stream(self._ledger.lock, self._follow, f"ssdtrain-{device}-{direction.name.lower()}")
            self._streams[device, direction] = stream
            stream.thread.start()
        stream.copies.append((mark, finish))
        stream.changed.notify()

    def _follow(self, stream: _Stream) -> None:
        """Finish the copies of ``stream`` one after the other. Blocks on the device without the lock."""
        ledger = self._ledger
        try:
            while True:
                with ledger.lock:
                    while not stream.copies:
                        if self._draining:
                            return
                        stream.changed.wait()
                    mark, finish = stream.copies[0]
                self.mover.wait_host(mark)
                with ledger.lock:
                    stream.copies.popleft()
                    finish()
                    self._work.notify()
                del mark, finish  # without the lock, because they may hold the last reference to a tensor
                ledger.tidy()
        except BaseException as failure:  # such as a failed assertion in a kernel
            ledger.stop_because_of(failure)

    # -- choosing the next task, with the lock held --------------------------------------------------------------------

    def _in_turns(self, entry: Entry) -> Sequence[Chunk]:
        """The chunks of ``entry``, ordered so that the threads work on all drives at the same time. A stripe may hold
        more chunks than there are threads."""
        stripe_bytes, slot = self._ledger.file.stripe_bytes, entry.slot
        if stripe_bytes is None or slot is None:
            return entry.chunks
        return sorted(entry.chunks, key=lambda chunk: (slot.offset_bytes + chunk.start) % stripe_bytes)

    def _start_threads(self) -> None:
        if len(self._threads) < self._thread_count and not self._closing:
            for number in range(self._thread_count):
                thread = threading.Thread(target=self._run, name=f"ssdtrain-io-{number}", daemon=True)
                self._threads.append(thread)  # first: an interrupt must not leave a thread that nobody joins
                thread.start()

    def _run(self) -> None:
        ledger = self._ledger
        task = None
        try:
            while True:
                with ledger.lock:
                    task = self._wait_for_task()
                ledger.tidy()
                if task is None:
                    return
                task()
                task = None  # it holds tensors
        except BaseException as failure:  # whatever it is, no thread may wait for this one forever
            ledger.stop_because_of(failure)

    def _wait_for_task(self) -> Task | None:
        while not self._closing:
            self._ledger.drain()
            task = self._next_read() or self._next_copy() or self._next_write() or self._next_ahead()
            if task is not None or self._ledger.trash or self._ledger.trim_wanted:
                if self._reads or self._copies or self._writes or self._tier.wants_reads:
                    self._work.notify()
                return task or _nothing
            self._work.wait()
        return None

    def _next_read(self) -> Task | None:
        while self._reads:
            fill, chunk = self._reads[0]
            if fill.entry.dead:
                self._reads.popleft()
                self._read_is_over(fill, chunk)
                continue
            target = fill.target
            assert target is not None
            if chunk.arriving:
                self._reads.popleft()
                chunk.waiting_fills.append(fill)
                continue
            if chunk.staging is not None:
                task = functools.partial(self._forward, fill, chunk, target, chunk.staging, chunk.copied)
                if chunk.state is ChunkState.ON_DISK:  # read ahead, for this reload
                    self._tier.take_ahead(chunk)
                    chunk.staging = None
                else:
                    chunk.staging.users += 1
            elif chunk.kept is not None:
                task = functools.partial(self._bring_kept, fill, chunk, target, chunk.kept)
            else:
                task = self._read_from_file(fill, chunk, target)
                if task is None:
                    return None
            self._reads.popleft()
            return task
        return None

    def _next_copy(self) -> Task | None:
        while self._copies:
            if self._copies[0].state is ChunkState.CANCELLED:
                self._copies.popleft()
                continue
            while self.pool.available <= BUFFERS_FOR_READS:
                if not self._make_room(len(self._copies)):
                    return None
            buffer = self.pool.acquire()
            chunk = self._copies.popleft()
            source = chunk.entry.source
            assert buffer is not None
            assert source is not None
            chunk.state = ChunkState.COPYING
            return functools.partial(self._copy_out, chunk, [source], buffer)
        return None

    def _read_from_file(self, fill: Fill, chunk: Chunk, target: Region) -> Task | None:
        buffer = None
        if self._tensor_memory is None:
            while not self.pool.available:
                if not self._make_room(len(self._reads)):
                    return None
            buffer = self.pool.acquire()
            assert buffer is not None
        transfer = self._ledger.traffic.begin(Direction.READ)
        return functools.partial(self._read, transfer, fill, chunk, target, buffer)

    def _next_write(self) -> Task | None:
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
            self.pool.drop_user(buffer)
            self._ledger.cancel(chunk)
            has_freed = True
        return _nothing if has_freed else None  # a copy that has just found no buffer looks again

    def _next_ahead(self) -> Task | None:
        if self._arriving_count >= max(1, self._thread_count - 1):
            return None
        if not self._may_read_ahead():
            return None
        chunk = self._tier.next_to_read()
        buffer = None if chunk is None else self.pool.acquire()
        if chunk is None or buffer is None:
            return None
        chunk.arriving = True
        self._arriving_count += 1
        self._ledger.begin(chunk)
        return functools.partial(self._read_ahead, self._ledger.traffic.begin(Direction.READ), chunk, buffer)

    def _may_read_ahead(self) -> bool:
        return self.pool.available > self._thread_count + BUFFERS_FOR_READS

    def _make_room(self, wanted: int) -> bool:
        """Make room for ``wanted`` copies or reads, some of which lack a buffer. True: a buffer is free now.

        Otherwise, as many chunks are taken from the host tier to be written as the threads can write, less the buffers
        that come free anyway."""
        chunk = self._tier.pop_ahead()
        if chunk is not None:
            self._drop_from_staging(chunk)
            return True
        coming = self.pool.buffer_limit - self.pool.available - self._tier.held_count
        while coming < min(wanted, self._thread_count):
            chunk = self._tier.pop_held()
            if chunk is None:
                break
            coming += 1
            self._ledger.demote(chunk)
            self._writes.append(chunk)
            self._work.notify()
        return False

    def _forget(self, entry: Entry) -> None:
        """Drop the chunks of ``entry`` from staging; it will not be requested."""
        chunks = self._tier.forget(entry)
        for chunk in chunks:
            if chunk.state is ChunkState.HELD:
                self._ledger.let_go(chunk)
            self._drop_from_staging(chunk)
        if chunks:
            self._work.notify()

    def _drop_from_staging(self, chunk: Chunk) -> None:
        buffer, chunk.staging = chunk.staging, None
        assert buffer is not None
        self.pool.drop_user(buffer)

    # -- tasks, without the lock ---------------------------------------------------------------------------------------

    def _copy_out(self, chunk: Chunk, sources: list[Region], buffer: StagingBuffer) -> None:
        entry = chunk.entry
        began_ns = time.perf_counter_ns()
        # Popped: once a release learns that its tensor has left, this thread must not hold it any more.
        copied = self.mover.copy_out(sources.pop(), chunk.start, chunk.length, buffer, entry.ready)
        with self._ledger.lock:
            chunk.staging, chunk.copied, chunk.state = buffer, copied, ChunkState.STAGED
            if copied is None:
                self._has_left(chunk)
            else:
                self._when_over(copied, entry.device, Direction.WRITE, functools.partial(self._has_left, chunk))
            self._trace("copy", chunk, began_ns)
            self._trace_levels()
            self._copied(chunk)

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
                ledger.note_write_error(error)
            ledger.tidy()
        with ledger.lock:
            self._end(transfer, chunk, end_s, error)
            self._trace("write", chunk, began_ns, error)
            if error is None and self._may_read_ahead() and self._tier.is_awaited(chunk.entry):
                self._tier.add_ahead(chunk)  # otherwise it would be read next
            else:
                self._drop_from_staging(chunk)
            self._written(chunk, kept)
            self._work.notify()

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
                self._trace("read", chunk, began_ns, error)
                self._issued(fill, chunk, buffer, None)
            return
        mark = None
        if buffer is not None:
            mark = self.mover.copy_in(buffer, target, chunk.start, chunk.length, (fill.ready,))
        with ledger.lock:
            ledger.counters.bytes_read += chunk.length
            self._trace("read", chunk, began_ns)
            self._issued(fill, chunk, buffer, mark)

    def _read_ahead(self, transfer: Transfer, chunk: Chunk, buffer: StagingBuffer) -> None:
        ledger = self._ledger
        began_ns = time.perf_counter_ns()
        error = self._load(transfer, chunk, buffer.view[: round_up(chunk.length)])
        with ledger.lock:
            self._trace("read ahead", chunk, began_ns, error)
            self._arriving_count -= 1
            chunk.arriving = False
            if error is None:
                ledger.counters.bytes_read += chunk.length
                ledger.counters.read_ahead_bytes += chunk.length
            if error is None and not chunk.entry.unneeded_on_disk:
                chunk.staging = buffer
                self._tier.add_ahead(chunk)
            else:
                self.pool.drop_user(buffer)
            self._reads.extendleft((fill, chunk) for fill in chunk.waiting_fills)
            self._work.notify(1 + len(chunk.waiting_fills))
            chunk.waiting_fills.clear()
            ledger.settle(chunk.entry, chunk.length)
            self._trace_levels()

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
            self._end(transfer, chunk, end_s, error)
        if error is None and self._checksum:
            return checksum_error(chunk, data[: chunk.length])
        return error

    def _forward(self, fill: Fill, chunk: Chunk, target: Region, buffer: StagingBuffer, copied: Mark) -> None:
        began_ns = time.perf_counter_ns()
        mark = self.mover.copy_in(buffer, target, chunk.start, chunk.length, (fill.ready, copied))
        with self._ledger.lock:
            self._count_forwarded(fill, chunk)
            self._trace("forward", chunk, began_ns)
            self._issued(fill, chunk, buffer, mark)

    def _bring_kept(self, fill: Fill, chunk: Chunk, target: Region, kept: Tensor) -> None:
        began_ns = time.perf_counter_ns()
        self.mover.copy_kept(kept, target, chunk.start, chunk.length, (fill.ready,))
        with self._ledger.lock:
            self._count_forwarded(fill, chunk)
            self._trace("forward", chunk, began_ns)
            self._issued(fill, chunk, None, None)

    # -- ends of transfers, with the lock held -------------------------------------------------------------------------

    def _has_left(self, chunk: Chunk) -> None:
        """``chunk`` is in staging, and the device does not need its tensor any more."""
        chunk.copied = None
        self._ledger.source_is_safe(chunk)
        if chunk.entry.host and not chunk.entry.unneeded_on_disk:
            self._ledger.hold(chunk)
            self._tier.hold(chunk)
        else:
            self._writes.append(chunk)

    def _copied(self, chunk: Chunk) -> None:
        entry = chunk.entry
        entry.uncopied -= 1
        if entry.uncopied == 0 or chunk.waiting_fills:
            self._ledger.progress.notify_all()
        self._reads.extend((fill, chunk) for fill in chunk.waiting_fills)
        self._work.notify(1 + len(chunk.waiting_fills))
        chunk.waiting_fills.clear()

    def _issued(self, fill: Fill, chunk: Chunk, buffer: StagingBuffer | None, mark: Mark) -> None:
        if mark is None or buffer is None:
            self._finish_read(fill, chunk, buffer)
        else:
            fill.marks.append(mark)
            finish = functools.partial(self._finish_read, fill, chunk, buffer)
            self._when_over(mark, fill.entry.device, Direction.READ, finish)
        fill.unissued -= 1  # last, because `wait` reads it without the lock
        if fill.unissued == 0:
            self._ledger.progress.notify_all()
        self._work.notify()


def _nothing() -> None:
    """A task that only makes its thread tidy up."""
