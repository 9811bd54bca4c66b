"""The bookkeeping when transfers end, whichever lane has made them. All methods need the ledger's lock."""

from __future__ import annotations

from torch import Tensor

from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Chunk, ChunkState, Fill
from ssdtrain_fx.runtime.book.traffic import Transfer
from ssdtrain_fx.runtime.memory.staging import StagingBuffer, StagingPool


class Ends:
    """Ends the transfers of one lane."""

    def __init__(self, ledger: Ledger, pool: StagingPool, busy_with: int) -> None:
        """``busy_with`` transfers in one direction keep the disk busy."""
        self._ledger = ledger
        self._pool = pool
        self.busy_with = busy_with

    def begin_fill(self, fill: Fill) -> None:
        fill.entry.busy += len(fill.entry.chunks)
        self._ledger.counters.in_flight_bytes += fill.entry.byte_count

    def transferred(self, transfer: Transfer, chunk: Chunk, end_s: float, error: BaseException | None) -> None:
        """Note that ``chunk`` was moved between memory and the file, or that ``error`` prevented it."""
        length = chunk.length if error is None else 0
        self._ledger.traffic.end(transfer, length, end_s, busy_with=self.busy_with)

    def written(self, chunk: Chunk, kept: Tensor | None) -> None:
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
        self.trace_levels()

    def forwarded(self, fill: Fill, chunk: Chunk) -> None:
        """Note that the bytes of ``chunk`` came from memory."""
        self._ledger.counters.forwarded += not fill.forwarded
        self._ledger.counters.forwarded_bytes += chunk.length
        fill.forwarded = True

    def read_is_over(self, fill: Fill, chunk: Chunk) -> None:
        """End a read of ``chunk`` that used no staging buffer, or that is not needed any more."""
        fill.unissued -= 1
        self.finish_read(fill, chunk, None)

    def finish_read(self, fill: Fill, chunk: Chunk, buffer: StagingBuffer | None) -> None:
        """Note that nothing writes to the target of ``fill`` for ``chunk`` any more."""
        if buffer is not None:
            self._pool.drop_user(buffer)
        self._ledger.end_read(fill, chunk)
        self.trace_levels()

    def trace(
        self, name: str, chunk: Chunk, began_ns: int, error: BaseException | None = None, *, asynchronous: bool = False
    ) -> None:
        """Record that ``chunk`` was moved from ``began_ns`` (``time.perf_counter_ns``) until now."""
        trace = self._ledger.trace
        if trace is not None:
            trace.add_transfer(name, began_ns, chunk, error, asynchronous=asynchronous)

    def trace_levels(self) -> None:
        trace = self._ledger.trace
        if trace is not None:
            trace.add_levels(staging_bytes=self._pool.used_bytes, in_flight_bytes=self._ledger.counters.in_flight_bytes)
