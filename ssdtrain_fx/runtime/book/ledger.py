"""What one engine knows: entries, chunks, fills, slots and counters, behind one lock.

The life of a chunk, the unit of transfer::

    SOURCE -> COPYING -> STAGED -> WRITING -> ON_DISK      (or SOURCE -> WRITING, where no staging is needed)
       |                 |  | ^       '-----> KEPT        (the write failed: the bytes stay in ordinary memory)
       |                 |  v |
       |                 | HELD                           (in the host tier, until somebody else needs the buffer)
       |                 |  |
       '-----------------'--'---------------> CANCELLED   (the last token died first, or the tensor stays in memory)

Guarantees:

* A chunk's bytes are in at least one place at any time until its entry is dead.
* A slot is freed once its entry is dead and nothing of it is in flight, never before.
* No tensor is destroyed with the lock held: what must go is put into ``trash``, which is emptied without the lock.
  Otherwise 1. a thread drops the last reference to a tensor under the lock, 2. a finaliser of the user runs and calls
  an op, 3. the thread waits for the lock it holds.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssdtrain_fx.errors import ActivationLostError, ConfigError, InternalError
from ssdtrain_fx.runtime.book.admission import Admission
from ssdtrain_fx.runtime.book.traffic import Traffic
from ssdtrain_fx.runtime.handles.tokens import Owner
from ssdtrain_fx.runtime.memory.movers import Mark, Region
from ssdtrain_fx.runtime.memory.staging import StagingBuffer
from ssdtrain_fx.runtime.storage.slots import ALIGNMENT_BYTES, Slot, SlotAllocator
from ssdtrain_fx.runtime.storage.spill_file import ChunkFile
from ssdtrain_fx.runtime.trace import Trace

if TYPE_CHECKING:
    from ssdtrain_fx.runtime.lanes.lane import Lane
    from ssdtrain_fx.runtime.policy.graph_runs import GraphRun

log = logging.getLogger(__name__)

TRIM_ABOVE_BYTES = 1 << 30
"""A smaller file is never cut while the engine is open. A guess."""


class ChunkState(enum.Enum):
    SOURCE = enum.auto()
    COPYING = enum.auto()
    STAGED = enum.auto()
    HELD = enum.auto()
    WRITING = enum.auto()
    ON_DISK = enum.auto()
    KEPT = enum.auto()
    CANCELLED = enum.auto()


class Chunk:
    """``length`` bytes of an entry, from byte ``start`` on."""

    state = ChunkState.SOURCE
    staging: StagingBuffer | None = None
    copied: Mark = None
    """When the bytes are in ``staging``."""
    kept: Tensor | None = None
    checksum = 0
    leading = b""
    trailing = b""
    """What of it lies in front of its first and behind its last page, and is not written."""
    arriving = False
    """It is being read ahead."""

    def __init__(self, entry: Entry, start: int, length: int) -> None:
        self.entry = entry
        self.start = start
        self.length = length
        self.waiting_fills: list[Fill] = []
        """Reloads that came before the bytes left the tensor, or while they were being read ahead."""

    @property
    def pages(self) -> tuple[int, int]:
        """Which bytes of the slot hold what lies between ``leading`` and ``trailing``: the first and their number."""
        lead_bytes = len(self.leading)
        return self.start + lead_bytes - self.entry.lead_bytes, self.length - lead_bytes - len(self.trailing)


class Entry:
    """One offloaded tensor."""

    # Defaults belong to the class: with cold caches, every attribute that is set takes time of its own.
    slot: Slot | None = None
    from_source = False
    """The file gets its whole pages straight from the tensor."""
    lead_bytes = 0
    trail_bytes = 0
    """In front of the first and behind the last of these pages."""
    uncopied = 0
    """Chunks whose copy out of the tensor has not been issued; ``release`` waits for 0."""
    unsafe = 0
    """Chunks whose copy out of the tensor may not be over; ``source`` must live until 0."""
    released = False
    """Until its release the engine holds ``source``, and then the caller of ``release`` drops it: dropped by an I/O
    thread, it might not be gone when ``release`` returns."""
    busy = 0
    """Chunks on their way to the file, and reads; the slot is in use until 0."""
    has_kept = False
    stays = False
    """It stays in memory: what is not in the file yet will not be written."""
    resident: Tensor | None = None
    """From its release on, what stays."""
    prepaid_s = 0.0
    """Stalls that are in the plan, or were predicted and paid for, but have not come yet."""
    dead = False
    host = False
    """It is to stay in staging buffers rather than to go to the file."""
    reload_order: int | None = None
    """Its turn among the tensors of its graph when backward reloads them; None where nobody has said."""
    run: GraphRun | None = None
    """The run of a graph that it belongs to, where graphs follow one another."""
    ahead: Ahead | None = None
    """A reload that was begun before backward asked for it."""
    reloaded = False
    """Backward has asked for it."""
    owner: weakref.ref[Owner]

    def __init__(self, x: Tensor, name: str, source: Tensor, byte_count: int, lane: Lane) -> None:
        self.name = name
        self.lane = lane
        """What moves it."""
        self.address = x.data_ptr()
        self.size: tuple[int, ...] = x.size()
        self.stride = x.stride()
        self.stored_stride = self.stride if source is x else source.stride()
        self.dtype = x.dtype
        self.device = x.device
        self.byte_count = byte_count
        self.source: Region | None = Region(source, byte_count)
        self.ready = lane.mover.mark(self.device)
        """When the tensor is complete."""
        self.chunks: list[Chunk] = []
        self.fills: dict[int, Fill] = {}
        """By the address of the tensor that ``reload`` returned, until ``wait`` has succeeded."""
        self.waited_addresses: set[int] = set()

    def cut_at_pages(self) -> None:
        """Write it from where it is: direct I/O moves whole pages only."""
        assert self.source is not None
        self.from_source = True
        self.lead_bytes = -self.source.address % ALIGNMENT_BYTES
        self.trail_bytes = (self.source.address + self.byte_count) % ALIGNMENT_BYTES

    @property
    def unneeded_on_disk(self) -> bool:
        """Nobody will read the file."""
        return self.dead or self.stays


class Fill:
    """One reload: the bytes of ``entry`` on their way into ``target``."""

    error: Exception | None = None
    forwarded = False

    def __init__(self, entry: Entry, target: Tensor, temporary: Tensor | None, ready: Mark) -> None:
        self.entry = entry
        self.target: Region | None = Region(target if temporary is None else temporary, entry.byte_count)
        self.temporary = temporary
        """The bytes in their stored layout, where ``reload`` asked for another one."""
        self.ready = ready
        """When the memory of ``target`` may be written."""
        self.marks: list[Mark] = []
        self.unissued = len(entry.chunks)
        """Chunks that ``wait`` has to wait for."""
        self.unfinished = self.unissued
        """Chunks that still need ``target``."""

    def fail(self, error: Exception) -> None:
        """The bytes cannot be had. The first error counts.

        Without its traceback: that holds the frames of the op that met the error, these hold the token, and the token
        would keep the entry, which holds this fill, for ever. Frames of an I/O thread hold the tensor, and the error.
        """
        error = error.with_traceback(None)
        if self.error is None:
            self.error = error


@dataclasses.dataclass(frozen=True, slots=True)
class Ahead:
    """A reload that nobody has asked for yet."""

    tensor: Tensor
    fill: Fill
    stream: object
    """The stream whose memory ``tensor`` is; None on the CPU."""


@dataclasses.dataclass(slots=True)
class Counters:
    """See :class:`ssdtrain_fx.runtime.statistics.Statistics`."""

    offloads: int = 0
    reloads: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    forwarded: int = 0
    forwarded_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    kept_for_time: int = 0
    kept_for_time_bytes: int = 0
    cancelled_bytes: int = 0
    host_bytes: int = 0
    demoted_bytes: int = 0
    read_ahead_bytes: int = 0
    deduplicated_bytes: int = 0
    late_bytes: int = 0
    ahead_bytes: int = 0
    release_stall_s: float = 0.0
    wait_stall_s: float = 0.0
    in_flight_bytes: int = 0
    unwritten_bytes: int = 0
    """Of these, bytes on their way out that have not reached the file."""
    held_bytes: int = 0
    """Bytes in the host tier now."""


class Ledger:
    """What the ops and the I/O threads of one engine share. Methods need ``lock``, unless they say otherwise."""

    def __init__(self, file: ChunkFile, admission: Admission, traffic: Traffic) -> None:
        self.lock = threading.Lock()
        self.progress = threading.Condition(self.lock)
        """Notified when a release, a wait or a wait_until_idle may go on."""
        self.file = file
        self.admission = admission
        self.traffic = traffic
        self.entries: dict[int, Entry] = {}
        self.residents: dict[int, Entry] = {}
        """Entries that stayed in memory, by the address of their storage."""
        self.slots = SlotAllocator()
        self.counters = Counters()
        self.dead_handles: collections.deque[int] = collections.deque()
        """Filled by finalisers, without the lock."""
        self.trash: collections.deque[object] = collections.deque()
        """Emptied without the lock."""
        self.when_unneeded: list[Callable[[Entry], None]] = []
        """Called with the lock held for an entry whose bytes in staging and in the file nobody will read any more."""
        self.ended_transfers = 0
        self.idle_waiters = 0
        """Who waits until nothing is in flight. To notify nobody would be dear: ``threading`` has gone cold."""
        self.trace: Trace | None = None
        """What records events, where somebody wants to see them."""
        self.closed = False
        self.failure: BaseException | None = None
        self.trim_wanted = False
        self._may_trim = True
        self._peak_end_bytes = 0
        self._warned_of_write_error = False
        self._unreported: OSError | None = None

    def begin_op(self, name: str) -> None:
        """Raises where an op on the tensor ``name`` would be in vain. Makes up for what has died meanwhile."""
        if self.closed or self.failure is not None:
            self.check_usable(name)
        if self.dead_handles:
            self.drain()

    def check_usable(self, name: str) -> None:
        """Raises where waiting any longer would be in vain."""
        if isinstance(self.failure, ConfigError):
            raise ConfigError(str(self.failure)) from self.failure
        if self.failure is not None:
            raise InternalError(
                f"{name!r}: the I/O of the engine on {self.file.path} stopped: {self.failure!r}"
            ) from self.failure
        if self.closed:
            raise ActivationLostError(
                f"{name!r} cannot be read back: the engine on {self.file.path} was closed. "
                "Close engines only after the last backward."
            )

    def stop_because_of(self, failure: BaseException) -> None:
        """An I/O thread met an error that is no I/O error: nobody may wait for it for ever. Takes the lock."""
        log.error("the I/O of the engine on %s stopped", self.file.path, exc_info=failure)
        with self.lock:
            self.failure = failure
            self.progress.notify_all()

    def enter(self, handle: int, entry: Entry, chunk_bytes: int) -> None:
        """Give ``entry`` its chunks and its slot."""
        self.entries[handle] = entry
        self.counters.offloads += 1
        if entry.byte_count == 0:
            entry.source = None
            return
        entry.slot = slot = self.slots.allocate(entry.byte_count)
        self._peak_end_bytes = max(self._peak_end_bytes, self.slots.end_bytes)
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

    def enter_resident(self, handle: int, entry: Entry) -> None:
        """Take ``entry`` in without moving it."""
        self.entries[handle] = entry
        self.counters.offloads += 1
        self._note_stay(entry)

    def stay(self, entry: Entry) -> None:
        """Stop moving ``entry`` out before all of it has left."""
        self._note_stay(entry)
        for chunk in entry.chunks:
            if chunk.state is ChunkState.SOURCE:
                entry.uncopied -= 1
                entry.unsafe -= 1
                self.cancel(chunk)
        self._tell_unneeded(entry)

    def _tell_unneeded(self, entry: Entry) -> None:
        for tell in self.when_unneeded:
            tell(entry)

    def _note_stay(self, entry: Entry) -> None:
        entry.stays = True
        self.counters.kept_for_time += 1
        self.counters.kept_for_time_bytes += entry.byte_count

    def settle_in(self, entry: Entry, resident: Tensor) -> None:
        """``entry`` has memory of its own."""
        entry.resident = resident
        entry.stored_stride = resident.stride()
        self.residents[resident.untyped_storage().data_ptr()] = entry

    def drain(self) -> None:
        """Bury the entries whose last token died."""
        while self.dead_handles:
            handle = self.dead_handles.popleft()
            entry = self.entries.get(handle)
            if entry is None:
                continue
            for chunk in entry.chunks:
                if chunk.state is ChunkState.SOURCE:
                    self.source_is_safe(chunk)
                    self.cancel(chunk)
                    entry.lane.drop_waiting(chunk)
            entry.dead = True
            if entry.ahead is not None:
                self.drop_ahead(entry)
            if self.when_unneeded:
                self._tell_unneeded(entry)
            del self.entries[handle]
            if entry.prepaid_s:
                self.admission.charge(-entry.prepaid_s)
            if entry.resident is not None:
                del self.residents[entry.resident.untyped_storage().data_ptr()]
                self.trash.append(entry.resident)
                entry.resident = None
            self._retire_if_idle(entry)

    def cancel(self, chunk: Chunk) -> None:
        """Forget a chunk that nobody will read from the file and whose write has not begun."""
        chunk.state = ChunkState.CANCELLED
        self.counters.unwritten_bytes -= chunk.length
        self.counters.cancelled_bytes += chunk.length
        self.settle(chunk.entry, chunk.length)

    def hold(self, chunk: Chunk) -> None:
        """A chunk in staging has come to rest there."""
        chunk.state = ChunkState.HELD
        self.counters.unwritten_bytes -= chunk.length
        self.counters.host_bytes += chunk.length
        self.counters.held_bytes += chunk.length
        self.settle(chunk.entry, chunk.length)

    def let_go(self, chunk: Chunk) -> None:
        """Nobody needs a chunk that is held."""
        chunk.state = ChunkState.CANCELLED
        self.counters.held_bytes -= chunk.length

    def demote(self, chunk: Chunk) -> None:
        """A chunk that is held has to be written after all."""
        chunk.state = ChunkState.STAGED
        self.counters.held_bytes -= chunk.length
        self.counters.demoted_bytes += chunk.length
        self.counters.unwritten_bytes += chunk.length
        self.begin(chunk)

    def begin(self, chunk: Chunk) -> None:
        """One transfer of an entry more, until :meth:`settle`."""
        self.counters.in_flight_bytes += chunk.length
        chunk.entry.busy += 1

    def source_is_safe(self, chunk: Chunk) -> None:
        """The device needs the tensor no more for this chunk."""
        entry = chunk.entry
        entry.unsafe -= 1
        if entry.unsafe == 0 and entry.released:
            self.drop_source(entry)

    def drop_ahead(self, entry: Entry) -> None:
        """Nobody will ask for what was begun ahead."""
        if entry.ahead is not None:
            self.trash.append(entry.ahead)
            entry.ahead = None

    def drop_source(self, entry: Entry) -> None:
        if entry.source is not None:
            self.trash.append(entry.source)
            entry.source = None

    def settle(self, entry: Entry, byte_count: int) -> None:
        """One transfer of ``entry`` less."""
        self.ended_transfers += 1
        self.counters.in_flight_bytes -= byte_count
        entry.busy -= 1
        if entry.busy == 0 and entry.dead:
            self._retire_if_idle(entry)
        if self.idle_waiters and not self.counters.in_flight_bytes:
            self.progress.notify_all()

    def _retire_if_idle(self, entry: Entry) -> None:
        if entry.busy:
            return
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
                peak, self._peak_end_bytes = self._peak_end_bytes, 0
                self.trim_wanted = self._may_trim and self.file.size_bytes > max(TRIM_ABOVE_BYTES, 2 * peak)

    def describe_transfers(self) -> str:
        """What is queued and under way, for people who look for the cause of a stall."""
        entries = self.entries.values()
        states = collections.Counter(chunk.state for entry in entries for chunk in entry.chunks)
        reads = sum(fill.unissued for entry in entries for fill in entry.fills.values())
        return (
            f"{self.counters.in_flight_bytes} bytes in flight; chunks: {states[ChunkState.SOURCE]} to be copied, "
            f"{states[ChunkState.COPYING]} being copied, {states[ChunkState.STAGED]} to be written, "
            f"{states[ChunkState.HELD]} in the host tier, {states[ChunkState.WRITING]} being written, "
            f"{reads} being read back"
        )

    def tidy(self) -> None:
        """What must not happen with the lock held: destroy what is in ``trash``, cut the file, warn. Takes the lock."""
        self.trash.clear()
        if self.trim_wanted:
            self._trim()
        if self._unreported is not None:
            self._warn_of_write_error()

    def note_write_error(self, error: OSError) -> None:
        """The next :meth:`tidy` warns, once per engine."""
        if not self._warned_of_write_error:
            self._warned_of_write_error = True
            self._unreported = error

    def _trim(self) -> None:
        """Give the unused tail of the file back. Takes the lock.

        The tail is a slot meanwhile, so that nobody else gets it.
        """
        with self.lock:
            wanted, self.trim_wanted = self.trim_wanted, False
            tail = self.slots.allocate_from_end(self.file.size_bytes) if wanted else None
        if tail is None:
            return
        try:
            self.file.shrink(tail.offset_bytes, tail.end_bytes)
        except OSError as error:  # costs disk space, nothing else
            self._may_trim = False
            log.warning("cannot cut %s: %s. It keeps its size until the engine is closed.", self.file.path, error)
        finally:
            with self.lock:
                self.slots.free(tail)

    def _warn_of_write_error(self) -> None:
        with self.lock:
            error, self._unreported = self._unreported, None
        if error is None:
            return
        log.warning(
            "cannot write to %s (errno %s: %s): tensors that cannot be written stay in memory. Training goes on with "
            "the right data and needs more memory than planned. Free disk space or set ssd_dir to another directory.",
            error.filename or self.file.path,
            error.errno,
            error.strerror or error,
        )


def lost(entry: Entry, path: str, cause: BaseException | None) -> ActivationLostError:
    """The error for data that did not come back."""
    where = "no slot" if entry.slot is None else f"bytes {entry.slot.offset_bytes}..{entry.slot.end_bytes}"
    return ActivationLostError(
        f"the saved tensor {entry.name!r} ({_describe(entry.dtype, entry.size)}) cannot be read back from {where} of "
        f"{path}: {cause}. Its gradient would be wrong, so the backward pass stops here. "
        "Check the disk, or set ssd_dir to another one."
    )


def _describe(dtype: torch.dtype, size: tuple[int, ...]) -> str:
    """``float32[4, 32]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(size)}"
