"""Lanes: a lane moves the chunks of one kind of device between tensors and the file.

There are two kinds. :mod:`ssdtrain_fx.runtime.lanes.thread_lane` has its own threads, and
:mod:`ssdtrain_fx.runtime.lanes.aio_lane` works within the ops and leaves the transfers to the kernel.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Chunk, ChunkState, Entry, Fill
from ssdtrain_fx.runtime.book.traffic import Transfer
from ssdtrain_fx.runtime.memory.movers import Mover
from ssdtrain_fx.runtime.memory.staging import StagingBuffer, StagingPool
from ssdtrain_fx.runtime.policy.patience import BLOCK_S, Patience


class ChecksumError(Exception):
    """The file does not hold the bytes that were written."""


class Lane(abc.ABC):
    """The engine's view of a lane, and the bookkeeping when transfers end. Methods that say so need the ledger's
    lock."""

    has_host_tier = False
    """Bytes may stay in its staging buffers, because tensors live in other memory."""
    has_stopped = False
    """It was closed, and moves no byte any more."""
    from_source_bytes = math.inf
    """Tensors of at least this size are written straight from their memory, without staging."""
    busy_with = 2
    """The number of transfers in one direction that keeps the disk busy."""

    def __init__(self, ledger: Ledger, mover: Mover, pool: StagingPool, *, checksum: bool) -> None:
        self.mover = mover
        self.pool = pool
        self.chunk_bytes = pool.chunk_bytes
        self.direct_chunk_bytes = pool.chunk_bytes
        """The same for tensors that are written without staging."""
        self.io_path = ledger.file.io_path
        """See :attr:`ssdtrain_fx.runtime.statistics.Statistics.io_path`."""
        self.staging_bytes = pool.buffer_limit * pool.chunk_bytes
        """How many bytes may be between staged tensors and the file."""
        self.planned_staging_bytes = self.staging_bytes
        """The same for the large tensors that plans move."""
        self._ledger = ledger
        self._checksum = checksum

    # -- called by the engine ------------------------------------------------------------------------------------------

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for reads and currently unused."""
        return 0

    def release_idle(self) -> None:
        """Return the unused memory to the system."""
        return

    @property
    def will_read_ahead(self) -> bool:
        """Whether a thread of the lane is about to read ahead. Needs the lock."""
        return False

    @abc.abstractmethod
    def enlist_copies(self, entry: Entry) -> None:
        """Queue the chunks of ``entry`` to be written. Needs the lock."""

    @abc.abstractmethod
    def enlist_reads(self, fill: Fill) -> None:
        """Queue the chunks of ``fill`` to be reloaded. Needs the lock."""

    @abc.abstractmethod
    def hurry(self, fill: Fill) -> None:
        """Move ``fill`` before everything that has not begun, because a thread waits for it. Needs the lock."""

    @abc.abstractmethod
    def close(self, patience: Patience) -> bool:
        """Finish what has begun and drop the rest. The ledger is already closed. May be called again.

        False: patience ran out, and buffers and tensors are left to the transfers that may still use them. If it
        raises, ``has_stopped`` says whether any byte may still move."""

    def begin_copies(self) -> None:
        """Begin copies on the caller's thread if a device does them. After ``enlist_copies``, without the lock."""
        return

    def make_progress(self) -> None:
        """Note what has finished and begin what can begin. Never blocks on the disk. Needs the lock and a change."""
        return

    def wait_for_progress(self, seen: int, timeout_s: float = BLOCK_S) -> bool:
        """Block until something has changed since the caller ``seen`` the count of ``ledger.progress``; call it in a
        loop, without the lock. False: nothing is in flight, so waiting is pointless."""
        ledger = self._ledger
        with ledger.lock:
            waiter = ledger.progress.enlist() if seen == ledger.progress.count else None
        if waiter is not None:
            waiter.acquire(True, timeout_s)
        return True

    def allocate(self, entry: Entry, stride: Sequence[int], device: torch.device) -> Tensor:
        """Allocate a tensor like ``entry`` as the target of reads."""
        return torch.empty_strided(entry.size, stride, dtype=entry.dtype, device=device)

    # -- ends of transfers, with the lock held -------------------------------------------------------------------------

    def _begin_fill(self, fill: Fill) -> None:
        fill.entry.busy += len(fill.entry.chunks)
        self._ledger.counters.in_flight_bytes += fill.entry.byte_count

    def _end(self, transfer: Transfer, chunk: Chunk, end_s: float, error: BaseException | None) -> None:
        """Note that ``chunk`` was moved between memory and the file, or that ``error`` prevented it."""
        length = chunk.length if error is None else 0
        self._ledger.traffic.end(transfer, length, end_s, busy_with=self.busy_with)

    def _written(self, chunk: Chunk, kept: Tensor | None) -> None:
        """Note that the chunk is in the file, or in ``kept`` because it could not be written."""
        counters = self._ledger.counters
        counters.unwritten_bytes -= chunk.length
        if kept is None:
            chunk.state = ChunkState.ON_DISK
            counters.bytes_written += chunk.length
        else:
            chunk.state, chunk.kept = ChunkState.KEPT, kept
            counters.kept += not chunk.entry.has_kept
            counters.kept_bytes += chunk.length
            chunk.entry.has_kept = True
        self._ledger.settle(chunk.entry, chunk.length)
        self._trace_levels()

    def _count_forwarded(self, fill: Fill, chunk: Chunk) -> None:
        self._ledger.counters.forwarded += not fill.forwarded
        self._ledger.counters.forwarded_bytes += chunk.length
        fill.forwarded = True

    def _trace(
        self, name: str, chunk: Chunk, began_ns: int, error: BaseException | None = None, *, asynchronous: bool = False
    ) -> None:
        """Record that ``chunk`` was moved from ``began_ns`` (``time.perf_counter_ns``) until now."""
        trace = self._ledger.trace
        if trace is not None:
            trace.add_transfer(name, began_ns, chunk, error, asynchronous=asynchronous)

    def _trace_levels(self) -> None:
        trace = self._ledger.trace
        if trace is not None:
            trace.add_levels(staging_bytes=self.pool.used_bytes, in_flight_bytes=self._ledger.counters.in_flight_bytes)

    def _read_is_over(self, fill: Fill, chunk: Chunk) -> None:
        """End a read of ``chunk`` that used no staging buffer, or that is not needed any more."""
        fill.unissued -= 1
        self._finish_read(fill, chunk, None)

    def _finish_read(self, fill: Fill, chunk: Chunk, buffer: StagingBuffer | None) -> None:
        if buffer is not None:
            self.pool.drop_user(buffer)
        self._ledger.end_read(fill, chunk)
        self._trace_levels()


def checksum_of(data: memoryview) -> int:
    """XXH3, 64 bits: many times faster than CRC-32, faster than a copy, and computed without the GIL. It detects
    damage, but not a deliberate forgery."""
    return xxhash.xxh3_64_intdigest(data)


def checksum_error(chunk: Chunk, data: memoryview) -> ChecksumError | None:
    """An error if ``data`` is not what was written for ``chunk``."""
    if checksum_of(data) == chunk.checksum:
        return None
    return ChecksumError(f"checksum mismatch in the {chunk.length} bytes from byte {chunk.start} on")
