"""A lane whose threads do the work: which chunk is next, and for whom.

Threads work everywhere, including with buffered files and with devices that have to be waited for. Two threads with
large direct transfers reach the rate of the disk, and neither ``pwrite`` nor ``memmove`` holds the GIL. For CPU tensors
:mod:`ssdtrain_fx.runtime.lanes.aio.aio_lane` is preferred where it works.

Guarantees:

* Order of priority: reads that a thread waits for; reads, because a ``wait`` will need them; copies out of tensors,
  because a ``release`` will need them; writes; reads ahead. Each queue is first in, first out.
* Copies that are enqueued on a device begin on the thread that calls ``offload``, and are followed by threads of their
  own (:mod:`ssdtrain_fx.runtime.lanes.threads.device_streams`).
* :meth:`ThreadLane.close` joins all threads, unless the disk or a device hangs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Chunk, ChunkState, Entry, Fill
from ssdtrain_fx.runtime.book.traffic import Direction
from ssdtrain_fx.runtime.lanes.lane import Lane
from ssdtrain_fx.runtime.lanes.threads.device_streams import DeviceStreams
from ssdtrain_fx.runtime.lanes.threads.staged import StagedTransport
from ssdtrain_fx.runtime.lanes.threads.transport import Queues, Transport
from ssdtrain_fx.runtime.lanes.threads.workers import Task, Workers, nothing
from ssdtrain_fx.runtime.memory.movers import Mover
from ssdtrain_fx.runtime.memory.staging import StagingPool
from ssdtrain_fx.runtime.memory.tensor_memory import TensorMemory
from ssdtrain_fx.runtime.policy.patience import BLOCK_S, Patience


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
        busy_with: int | None = None,
        tensor_memory: TensorMemory | None = None,
        make_transport: Callable[[Queues, Mover], Transport] | None = None,
    ) -> None:
        """``busy_with`` transfers in one direction keep the disk busy; None: one for each thread. ``tensor_memory``
        allocates tensors that reads go straight into; None if reads need staging. ``make_transport`` replaces
        :class:`StagedTransport`."""
        super().__init__(ledger, mover, pool, checksum=checksum, busy_with=busy_with or thread_count)
        self._tensor_memory = tensor_memory
        self._workers = Workers(ledger, thread_count, self._next_task, lambda: self._has_more)
        self._streams = DeviceStreams(ledger, mover, self._workers.wake)
        self._queues = Queues(ledger, self._workers, self._streams, self._ends)
        if make_transport is None:
            make_transport = functools.partial(
                StagedTransport, pool=pool, checksum=checksum, reads_need_staging=tensor_memory is None
            )
        self._transport = make_transport(self._queues, mover)
        self._callers: weakref.WeakSet[_Caller] = weakref.WeakSet()
        """Threads that are enqueuing copies."""
        self.has_host_tier = mover.enqueues
        ledger.when_unneeded.append(self._transport.forget)

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
        return self._transport.will_read_ahead and not self._workers.closing

    def enlist_copies(self, entry: Entry) -> None:
        self._queues.copies.extend(self._in_turns(entry))
        self._transport.join(entry)
        self._workers.start()
        if not self.mover.enqueues:  # otherwise the caller begins the copies itself
            self._workers.wake()

    def enlist_reads(self, fill: Fill) -> None:
        self._ends.begin_fill(fill)
        for chunk in self._in_turns(fill.entry):
            if chunk.state in (ChunkState.SOURCE, ChunkState.COPYING):
                chunk.waiting_fills.append(fill)
            else:
                self._queues.reads.append((fill, chunk))
        self._transport.ask(fill.entry)
        self._workers.start()
        self._workers.wake()

    def hurry(self, fill: Fill) -> None:
        reads = self._queues.reads
        self._queues.reads = collections.deque(sorted(reads, key=lambda read: read[0] is not fill))

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
                    task = None if self._workers.closing else self._next_copy()
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
            self._workers.close()
        if not self._workers.join(patience):
            return False
        while True:
            with ledger.lock:
                if not self._callers:
                    break
                left_s, seen = patience.left_s(), ledger.progress.count
            if not left_s:
                return False
            self.wait_for_progress(seen, min(BLOCK_S, left_s))
        marks = self.mover.last_marks()  # an op that was interrupted may have enqueued a copy that nobody follows
        with ledger.lock:
            for device, mark in marks:
                self._streams.when_over(mark, device, Direction.WRITE, nothing)
        if not self._streams.drain(patience):
            return False
        self.has_stopped = True
        self._queues.reads.clear()
        self._queues.copies.clear()
        with contextlib.ExitStack() as stack:  # does all of it, whatever one of them raises
            stack.callback(self.release_idle)
            stack.callback(lambda: self.mover.forget(self.pool.close()))
            stack.callback(self._transport.close)
        return True

    # -- choosing the next task, with the lock held --------------------------------------------------------------------

    def _in_turns(self, entry: Entry) -> Sequence[Chunk]:
        """The chunks of ``entry``, ordered so that the threads work on all drives at the same time. A stripe may hold
        more chunks than there are threads."""
        stripe_bytes, slot = self._ledger.file.stripe_bytes, entry.slot
        if stripe_bytes is None or slot is None:
            return entry.chunks
        return sorted(entry.chunks, key=lambda chunk: (slot.offset_bytes + chunk.start) % stripe_bytes)

    @property
    def _has_more(self) -> bool:
        return bool(self._queues.reads or self._queues.copies or self._transport.has_more)

    def _next_task(self) -> Task | None:
        transport = self._transport
        return self._next_read() or self._next_copy() or transport.next_write() or transport.next_ahead()

    def _next_read(self) -> Task | None:
        reads = self._queues.reads
        while reads:
            fill, chunk = reads[0]
            if fill.entry.dead:
                reads.popleft()
                self._ends.read_is_over(fill, chunk)
                continue
            if chunk.arriving:
                reads.popleft()
                chunk.waiting_fills.append(fill)
                continue
            target = fill.target
            assert target is not None
            if chunk.kept is not None:
                task = functools.partial(self._transport.bring_kept, fill, chunk, target, chunk.kept)
            else:
                task = self._transport.bring_back(fill, chunk, target)
            if task is not None:
                reads.popleft()
            return task
        return None

    def _next_copy(self) -> Task | None:
        copies = self._queues.copies
        while copies and copies[0].state is ChunkState.CANCELLED:
            copies.popleft()
        if not copies:
            return None
        chunk = copies[0]
        source = chunk.entry.source
        assert source is not None
        task = self._transport.move_out(chunk, source)
        if task is not None:
            copies.popleft()
            chunk.state = ChunkState.COPYING
        return task
