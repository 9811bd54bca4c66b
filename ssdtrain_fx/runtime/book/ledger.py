"""The state of one engine: entries, chunks, fills, slots and counters, behind one lock.

Guarantees:

* A chunk's bytes are in at least one place at any time until its entry is dead.
* A slot is freed once its entry is dead and nothing of it is in flight, never before.
* A change is complete, or the engine has failed: see :mod:`ssdtrain_fx.runtime.book.changes`.
* No tensor is destroyed with the lock held: tensors to destroy go to ``trash``, which is emptied without the lock.
  Otherwise a thread could deadlock: 1. it drops the last reference to a tensor under the lock, 2. a user's
  finaliser runs and calls an op, 3. the op waits for the lock that the thread holds.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ssdtrain_fx._torch_private import storage_key
from ssdtrain_fx.errors import ActivationLostError
from ssdtrain_fx.runtime.book.admission import Admission
from ssdtrain_fx.runtime.book.changes import Change, Progress
from ssdtrain_fx.runtime.book.counters import Counters
from ssdtrain_fx.runtime.book.records import Chunk, ChunkState, Entry, Fill
from ssdtrain_fx.runtime.book.traffic import Traffic
from ssdtrain_fx.runtime.book.upkeep import Upkeep
from ssdtrain_fx.runtime.handles.tokens import OwnerRef
from ssdtrain_fx.runtime.shield import is_mine
from ssdtrain_fx.runtime.storage.slots import SlotAllocator
from ssdtrain_fx.runtime.storage.spill_file import ChunkFile


class Observer(Protocol):
    """What records events: see :class:`ssdtrain_fx.runtime.trace.Trace`."""

    def add_stall(self, entry: Entry, stall_s: float) -> None: ...

    def add_transfer(
        self, name: str, began_ns: int, chunk: Chunk, error: BaseException | None = None, *, asynchronous: bool = False
    ) -> None: ...

    def add_levels(self, *, staging_bytes: int, in_flight_bytes: int) -> None: ...


class Ledger:
    """State that the ops and the I/O threads of one engine share. Methods need ``lock`` unless they say otherwise."""

    def __init__(self, file: ChunkFile, admission: Admission, traffic: Traffic) -> None:
        self.lock = threading.RLock()
        """It is never taken twice by one thread on purpose. But it knows its owner, which a signal handler asks for."""
        self.progress = Progress()
        """Notified when a release, a wait or a wait_until_idle may continue."""
        self.change = Change(self.lock, self.progress, file.path)
        """``with ledger.lock, ledger.change:`` whoever changes what the methods here do not change by themselves."""
        self.file = file
        self.admission = admission
        self.traffic = traffic
        self.entries: dict[int, Entry] = {}
        self._leaving: set[Entry] = set()
        """Entries whose last token has died and whose transfers are not over."""
        self.residents: dict[int, Entry] = {}
        """Entries that stayed in memory, by the identity of their storage, whose address changes if it is resized."""
        self.slots = SlotAllocator()
        self.counters = Counters()
        self.upkeep = Upkeep(file, self.slots, self.counters)
        self.dead_handles: collections.deque[int] = collections.deque()
        """Filled by :meth:`note_death`, without the lock."""
        self.dead_owners: collections.deque[OwnerRef] = collections.deque()
        """The same, filled when an interrupt has kept ``note_death`` from it, too."""
        self.trash: collections.deque[object] = collections.deque()
        """Emptied without the lock."""
        self.when_unneeded: list[Callable[[Entry], None]] = []
        """Called with the lock held for an entry whose bytes in staging and in the file will not be read again."""
        self.ended_transfers = 0
        self.idle_waiters = 0
        """Threads that wait until nothing is in flight. At 0, ``progress`` is not notified."""
        self.trace: Observer | None = None
        """What records events; None while nothing is recorded."""
        self.closed = False
        self._left_to_parent: dict[int, Entry] | None = None

    def begin_op(self, name: str) -> None:
        """Raise if an op on the tensor ``name`` cannot succeed any more. Also drains dead handles."""
        change = self.change
        if self.closed or change.failure is not None or change.undelivered is not None:
            self.check_usable(name)
        if self.dead_handles or self.dead_owners:
            self.drain()

    def check_usable(self, name: str) -> None:
        """Raise if the engine has stopped or is closed, so that waiting is pointless."""
        if self._left_to_parent is not None:
            raise ActivationLostError(
                f"{name!r}: the engine on {self.file.path} was opened before this process was forked. Its saved "
                "tensors are in the parent process: run backward in the process that ran forward."
            )
        self.change.check_usable(name)
        if self.closed:
            raise ActivationLostError(
                f"{name!r} cannot be read back: the engine on {self.file.path} was closed. "
                "Close engines only after the last backward."
            )

    def forget_after_fork(self) -> None:
        """In a forked child: let every op raise. Nothing is destroyed, and no transfer is asked for: the kernel and the
        threads answer to the parent. Another thread may have held the lock at the fork."""
        self.lock = threading.RLock()
        self.progress = Progress()
        self.change = Change(self.lock, self.progress, self.file.path)
        self.closed = True
        self._left_to_parent, self.entries = self.entries, {}

    def stop_because_of(self, failure: BaseException) -> None:
        """Stop after an error that is not an I/O error, so that no thread waits forever. Takes the lock."""
        with self.lock:
            self.change.fail(failure)

    @property
    def has_failed(self) -> bool:
        """A change was torn apart: the engine is of no use any more. Takes the lock if another thread has it."""
        change = self.change
        if change.unfinished:
            with self.lock:
                change.check()
        return change.failure is not None

    def enter(self, handle: int, entry: Entry, chunk_bytes: int) -> None:
        """Give ``entry`` its chunks and its slot."""
        self.entries[handle] = entry
        self.counters.offloads += 1
        if entry.byte_count == 0:
            entry.source = None
            return
        entry.slot = slot = self.slots.allocate(entry.byte_count)
        self.upkeep.note_allocation()
        start, end = 0, entry.lead_bytes + chunk_bytes
        if self.file.stripe_bytes is not None:  # a multiple of chunk_bytes: every chunk lies in one file
            end -= slot.offset_bytes % chunk_bytes
        while end < entry.byte_count - entry.trail_bytes:
            entry.chunks.append(Chunk(entry, start, end - start))
            start, end = end, end + chunk_bytes
        entry.chunks.append(Chunk(entry, start, entry.byte_count - start))
        entry.uncopied = entry.unsafe = entry.busy = len(entry.chunks)
        self.counters.in_flight_bytes += entry.byte_count
        self.counters.unwritten_bytes += entry.byte_count
        if entry.ready is not None:
            self.counters.unmade_bytes += entry.byte_count

    def enter_resident(self, handle: int, entry: Entry) -> None:
        """Register ``entry`` without moving it."""
        self.entries[handle] = entry
        self.counters.offloads += 1
        self._note_stay(entry)

    def stay(self, entry: Entry) -> None:
        """Stop offloading ``entry`` before all of it has left."""
        self._note_stay(entry)
        for chunk in entry.chunks:
            if chunk.state is ChunkState.SOURCE:
                entry.uncopied -= 1
                self._count_safe(chunk)
                self.cancel(chunk)
        self._tell_unneeded(entry)

    def _tell_unneeded(self, entry: Entry) -> None:
        for tell in self.when_unneeded:
            tell(entry)

    def _note_stay(self, entry: Entry) -> None:
        entry.stays = True
        self.counters.kept_for_time += 1
        self.counters.kept_for_time_bytes += entry.byte_count
        self.upkeep.note_stay()

    def settle_in(self, entry: Entry, resident: Tensor) -> None:
        """Keep ``resident`` in memory as the data of ``entry``."""
        entry.resident = resident.detach()  # assigning to ``resident.data`` does not change the storage of this tensor
        entry.stored_stride = resident.stride()
        self.residents[storage_key(entry.resident)] = entry

    def note_death(self, handle: int) -> None:
        """Remove an entry whose last token has died: now if the lock is free, otherwise with the next op.

        Finalisers call it without the lock, at any moment, on any thread, also on one that is in the midst of a change.
        So it waits for nothing, and destroys tensors only if this thread has no change under way.
        """
        lock = self.lock
        try:  # not `with`, which would wait
            self.dead_handles.append(handle)
            if is_mine(lock):
                return
            if lock.acquire(blocking=False):
                if not self.closed and self.change.failure is None:
                    with self.change:
                        self.drain()
                lock.release()
        except BaseException as interrupt:
            self.change.undelivered = interrupt.with_traceback(None)
            if is_mine(lock):
                lock.release()
        self.trash.clear()

    def drain(self) -> None:
        """Remove the entries whose last token has died."""
        while self.dead_owners:
            self.dead_handles.append(self.dead_owners.popleft().handle)
        while self.dead_handles:
            handle = self.dead_handles.popleft()
            entry = self.entries.get(handle)
            if entry is None:
                continue
            for chunk in entry.chunks:
                if chunk.state is ChunkState.SOURCE:
                    entry.uncopied -= 1
                    self.source_is_safe(chunk)
                    self.cancel(chunk)
                    self.drop_waiting(chunk)
            if not entry.uncopied:  # a late release of another tensor may wait for this one
                self.progress.notify_all()
            entry.dead = True
            if entry.ahead is not None:
                self.drop_ahead(entry)
            if self.when_unneeded:
                self._tell_unneeded(entry)
            if entry.busy:
                self._leaving.add(entry)
            del self.entries[handle]
            if entry.prepaid_s:
                self.admission.charge(-entry.prepaid_s)
            if entry.resident is not None:
                del self.residents[storage_key(entry.resident)]
                self.trash.append(entry.resident)
                entry.resident = None
            self._retire_if_idle(entry)

    def cancel(self, chunk: Chunk) -> None:
        """Drop a chunk that will not be read from the file and whose write has not begun."""
        chunk.state = ChunkState.CANCELLED
        self.counters.unwritten_bytes -= chunk.length
        self.counters.cancelled_bytes += chunk.length
        self.settle(chunk.entry, chunk.length)

    def hold(self, chunk: Chunk) -> None:
        """Note that a staged chunk stays in the host tier."""
        chunk.state = ChunkState.HELD
        self.counters.unwritten_bytes -= chunk.length
        self.counters.host_bytes += chunk.length
        self.counters.held_bytes += chunk.length
        self.settle(chunk.entry, chunk.length)

    def let_go(self, chunk: Chunk) -> None:
        """Drop a held chunk, which is not needed any more."""
        chunk.state = ChunkState.CANCELLED
        self.counters.held_bytes -= chunk.length

    def demote(self, chunk: Chunk) -> None:
        """Note that a held chunk has to be written after all."""
        chunk.state = ChunkState.STAGED
        self.counters.held_bytes -= chunk.length
        self.counters.demoted_bytes += chunk.length
        self.counters.unwritten_bytes += chunk.length
        self.begin(chunk)

    def begin(self, chunk: Chunk) -> None:
        """Count one more transfer of an entry, until :meth:`settle`."""
        self.counters.in_flight_bytes += chunk.length
        chunk.entry.busy += 1

    def source_is_safe(self, chunk: Chunk) -> None:
        """Note that the device no longer needs the tensor for this chunk."""
        entry = chunk.entry
        self._count_safe(chunk)
        if entry.unsafe == 0 and entry.released:
            self.drop_source(entry)

    def _count_safe(self, chunk: Chunk) -> None:
        chunk.entry.unsafe -= 1
        if chunk.entry.ready is not None:
            self.counters.unmade_bytes -= chunk.length

    def drop_ahead(self, entry: Entry) -> None:
        """Drop the reload that was begun ahead; it will not be requested."""
        if entry.ahead is not None:
            self.trash.append(entry.ahead)
            entry.ahead = None

    def drop_source(self, entry: Entry) -> None:
        if entry.source is not None:
            self.trash.append(entry.source)
            entry.source = None

    def settle(self, entry: Entry, byte_count: int) -> None:
        """Count one transfer of ``entry`` less."""
        self.ended_transfers += 1
        self.progress.count += 1
        self.counters.in_flight_bytes -= byte_count
        entry.busy -= 1
        if entry.busy == 0 and entry.dead:
            self._retire_if_idle(entry)
        if self.idle_waiters and not self.counters.in_flight_bytes:
            self.progress.notify_all()

    def drop_waiting(self, chunk: Chunk) -> None:
        """End the reads that wait for ``chunk`` to leave its tensor, which it never will."""
        while chunk.waiting_fills:
            fill = chunk.waiting_fills.pop()
            fill.unissued -= 1
            self.end_read(fill, chunk)

    def end_read(self, fill: Fill, chunk: Chunk) -> None:
        """``chunk`` needs the target of ``fill`` no more."""
        fill.unfinished -= 1
        if fill.unfinished == 0:
            self.trash.append(fill.target)
            fill.target = None
        self.settle(fill.entry, chunk.length)

    def _retire_if_idle(self, entry: Entry) -> None:
        if entry.busy:
            return
        self._leaving.discard(entry)
        self.drop_source(entry)
        if entry.fills:
            self.trash.extend(entry.fills.values())
            entry.fills.clear()
        if entry.has_kept:
            self.trash.extend(chunk.kept for chunk in entry.chunks)
        entry.chunks = []
        if entry.slot is not None:
            self.slots.free(entry.slot)
            entry.slot = None
            if not self.slots.bytes_in_use:
                self.upkeep.note_empty()

    def discard_entries(self, *, can_be_in_flight: bool) -> None:
        """Drop all entries, because the engine is closed. Those whose transfers still run keep what they need."""
        entries = [*self.entries.values(), *self._leaving]
        self.trash.extend(entries)
        if not can_be_in_flight:
            for entry in entries:  # cycles: an entry that was given up would wait for the collector
                entry.chunks = []
                entry.fills = {}
        self.entries.clear()
        self._leaving.clear()
        self.residents.clear()
        self.dead_handles.clear()

    def describe_transfers(self) -> str:
        """Describe what is queued and in flight, to help find the cause of a stall."""
        entries = self.entries.values()
        states = collections.Counter(chunk.state for entry in entries for chunk in entry.chunks)
        reads = sum(fill.unissued for entry in entries for fill in entry.fills.values())
        return (
            f"{self.counters.in_flight_bytes} bytes in flight; chunks: {states[ChunkState.SOURCE]} to be copied, "
            f"{states[ChunkState.COPYING]} being copied, {states[ChunkState.STAGED]} to be written, "
            f"{states[ChunkState.HELD]} in the host tier, {states[ChunkState.WRITING]} being written, "
            f"{reads} being reloaded"
        )

    def tidy(self) -> None:
        """Do what must not happen with the lock held: empty ``trash``, shrink the file, warn. Takes the lock."""
        self.trash.clear()
        if self.upkeep.is_due:
            self.upkeep.run(self.lock, self.change)


def lost(entry: Entry, path: str, cause: BaseException | None) -> ActivationLostError:
    """The error for data that cannot be reloaded."""
    where = "no slot" if entry.slot is None else f"bytes {entry.slot.offset_bytes}..{entry.slot.end_bytes}"
    return ActivationLostError(
        f"the saved tensor {entry.name!r} ({_describe(entry.dtype, entry.size)}) cannot be read back from {where} of "
        f"{path}: {cause}. Its gradient would be wrong, so the backward pass stops here. "
        "Check the disk, or set ssd_dir to another one."
    )


def _describe(dtype: torch.dtype, size: tuple[int, ...]) -> str:
    """``float32[4, 32]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(size)}"
