"""What staging buffers hold for longer than a transfer lasts: the host tier of a GPU, and what is read ahead.

::

    held     copied out and not written: the tier that the plan has chosen (``offload(..., host=True)``)
    ahead    in the file as well, but read before backward requests it, or written while backward was already
             executing: only the copy to the device is left

Both give way to other transfers. When a transfer lacks a buffer, chunks read ahead are dropped, because the file has
them, and held chunks are written to the file. The chunk that is needed last goes first (Belady's rule).

A *run* is one forward of one graph and its backward. Backward needs the youngest run first, and within a run the lowest
``reload_order``. The start of a run is not marked, so it is guessed: a graph has each name and each order once, and
offloads nothing after its backward has begun.

Guarantees:

* A wrong guess costs time, never data.
* Nothing here keeps an entry after the last token of its run has died.

All methods need the ledger's lock. This module only does the bookkeeping;
:mod:`ssdtrain_fx.runtime.lanes.threads.staged` moves the data.
"""

from __future__ import annotations

import collections
import itertools
import math
import threading

from ssdtrain_fx.runtime.book.records import Chunk, ChunkState, Entry, GraphRun


class _Run:
    """The entries of one forward that are alive."""

    __slots__ = ("asked_order", "entries", "graph_run", "names", "number", "orders")

    def __init__(self, number: int, graph_run: GraphRun | None) -> None:
        self.number = number
        self.graph_run = graph_run
        self.entries: dict[Entry, None] = {}
        self.names: set[str] = set()
        self.orders: set[int] = set()
        self.asked_order: int | None = None
        """The order that backward requested last; -1 if only entries without an order, None before backward."""

    def may_have(self, entry: Entry) -> bool:
        return (
            self.asked_order is None
            and self.graph_run is entry.run
            and entry.name not in self.names
            and entry.reload_order not in self.orders
        )


class _OfThread(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        self.forward: _Run | None = None


class HostTier:
    """The chunks in staging that no transfer is using."""

    def __init__(self) -> None:
        self._held: dict[Entry, list[Chunk]] = {}
        self._ahead: dict[Entry, list[Chunk]] = {}
        self._runs: dict[Entry, _Run] = {}
        self._numbers = itertools.count()
        self._of_thread = _OfThread()
        self._backward: _Run | None = None
        self._entries_to_read: collections.deque[Entry] = collections.deque()
        self._chunks_to_read: collections.deque[Chunk] = collections.deque()
        self.held_count = 0

    # -- runs ----------------------------------------------------------------------------------------------------------

    def join(self, entry: Entry) -> None:
        """Add ``entry``, which this thread offloads, to a run."""
        run = self._of_thread.forward
        if run is None or not run.may_have(entry):
            run = self._of_thread.forward = _Run(next(self._numbers), entry.run)
        run.entries[entry] = None
        run.names.add(entry.name)
        if entry.reload_order is not None:
            run.orders.add(entry.reload_order)
        self._runs[entry] = run

    def ask(self, entry: Entry) -> None:
        """Note that backward requests ``entry``: the entries that its run needs after it will be read ahead."""
        run = self._runs.get(entry)
        if run is None:
            return
        last, order = run.asked_order, entry.reload_order
        if order is None:
            run.asked_order = -1 if last is None else last
            return
        run.asked_order = order
        if run is self._backward and last is not None and last <= order:
            return
        self._backward = run  # or a second backward has begun
        later = [other for other in run.entries if order < _order(other) < math.inf]
        self._entries_to_read = collections.deque(sorted(later, key=_order))
        self._chunks_to_read.clear()

    def forget(self, entry: Entry) -> list[Chunk]:
        """Forget ``entry``, which is not needed any more. Returns its chunks that were held or ahead."""
        run = self._runs.pop(entry, None)
        if run is not None:
            del run.entries[entry]
            if run is self._backward and not run.entries:
                self._backward = None
                self._entries_to_read.clear()
                self._chunks_to_read.clear()
        held, ahead = self._held.pop(entry, []), self._ahead.pop(entry, [])
        self.held_count -= len(held)
        return held + ahead

    # -- what is held --------------------------------------------------------------------------------------------------

    def hold(self, chunk: Chunk) -> None:
        self._held.setdefault(chunk.entry, []).append(chunk)
        self.held_count += 1

    def pop_held(self) -> Chunk | None:
        """Remove the held chunk that is needed last."""
        chunk = self._pop_last(self._held)
        self.held_count -= chunk is not None
        return chunk

    # -- what is read ahead --------------------------------------------------------------------------------------------

    @property
    def wants_reads(self) -> bool:
        """Whether there may be something left to read ahead."""
        return bool(self._entries_to_read or self._chunks_to_read)

    def is_awaited(self, entry: Entry) -> bool:
        """Whether the backward of its run is executing and will request ``entry``."""
        run = self._runs.get(entry)
        return run is not None and run.asked_order is not None and run.asked_order < _order(entry) < math.inf

    def next_to_read(self) -> Chunk | None:
        """The chunk on disk that backward will need next and has not requested. Each is returned once, and again after
        it was popped."""
        while self.wants_reads:
            if not self._chunks_to_read:
                self._chunks_to_read.extend(self._entries_to_read.popleft().chunks)
                continue
            chunk = self._chunks_to_read.popleft()
            at_rest = chunk.state is ChunkState.ON_DISK and chunk.staging is None and not chunk.arriving
            if at_rest and self.is_awaited(chunk.entry):
                return chunk
        return None

    def add_ahead(self, chunk: Chunk) -> None:
        self._ahead.setdefault(chunk.entry, []).append(chunk)

    def take_ahead(self, chunk: Chunk) -> None:
        """Remove ``chunk``, which is requested now."""
        chunks = self._ahead[chunk.entry]
        chunks.remove(chunk)
        if not chunks:
            del self._ahead[chunk.entry]

    def pop_ahead(self) -> Chunk | None:
        """Remove the chunk read ahead that is needed last."""
        chunk = self._pop_last(self._ahead)
        if chunk is not None and self._runs[chunk.entry] is self._backward:
            self._chunks_to_read.appendleft(chunk)  # it is still needed before those that were not read yet
        return chunk

    def _pop_last(self, kept: dict[Entry, list[Chunk]]) -> Chunk | None:
        if not kept:
            return None
        entry = max(kept, key=self._when_needed)
        chunk = kept[entry].pop()
        if not kept[entry]:
            del kept[entry]
        return chunk

    def _when_needed(self, entry: Entry) -> tuple[float, float]:
        """A sort key; a higher value is needed later. If the order is unknown, the oldest is needed last."""
        return -self._runs[entry].number, _order(entry)


def _order(entry: Entry) -> float:
    return math.inf if entry.reload_order is None else entry.reload_order
