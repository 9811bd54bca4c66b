"""What moves the bytes of a thread lane, and what it has to tell the lane.

A *transport* makes tasks out of chunks: :mod:`ssdtrain_fx.runtime.lanes.threads.staged` moves them through staging
buffers, :mod:`ssdtrain_fx.runtime.lanes.threads.kvikio` moves them between device memory and the file.
"""

from __future__ import annotations

import abc
import collections
import functools
import time
from collections.abc import Iterable

from torch import Tensor

from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Chunk, Entry, Fill
from ssdtrain_fx.runtime.book.traffic import Direction
from ssdtrain_fx.runtime.lanes.ends import Ends
from ssdtrain_fx.runtime.lanes.threads.device_streams import DeviceStreams
from ssdtrain_fx.runtime.lanes.threads.workers import Task, Workers
from ssdtrain_fx.runtime.memory.movers import Mark, Mover, Region
from ssdtrain_fx.runtime.memory.staging import StagingBuffer


class Queues:
    """Chunks that have to leave tensors and to be brought back, first in, first out. Methods need the lock."""

    def __init__(self, ledger: Ledger, workers: Workers, streams: DeviceStreams, ends: Ends) -> None:
        self.ledger = ledger
        self.workers = workers
        self.streams = streams
        self.ends = ends
        self.reads: collections.deque[tuple[Fill, Chunk]] = collections.deque()
        self.copies: collections.deque[Chunk] = collections.deque()

    def has_left(self, chunk: Chunk) -> None:
        """The copy of ``chunk`` out of its tensor has been issued: a release and reads may continue."""
        entry = chunk.entry
        entry.uncopied -= 1
        if entry.uncopied == 0 or chunk.waiting_fills:
            self.ledger.progress.notify_all()
        self.reads.extend((fill, chunk) for fill in chunk.waiting_fills)
        self.workers.wake(1 + len(chunk.waiting_fills))
        chunk.waiting_fills.clear()

    def read_first(self, fills: Iterable[Fill], chunk: Chunk) -> None:
        """Read ``chunk`` for ``fills`` before all others."""
        self.reads.extendleft((fill, chunk) for fill in fills)

    def is_issued(self, fill: Fill, chunk: Chunk, buffer: StagingBuffer | None, mark: Mark) -> None:
        """``chunk`` is in the target of ``fill`` once the device has reached ``mark``; a wait may continue."""
        if mark is None or buffer is None:
            self.ends.finish_read(fill, chunk, buffer)
        else:
            fill.marks.append(mark)
            finish = functools.partial(self.ends.finish_read, fill, chunk, buffer)
            self.streams.when_over(mark, fill.entry.device, Direction.READ, finish)
        fill.unissued -= 1  # last, because `wait` reads it without the lock
        if fill.unissued == 0:
            self.ledger.progress.notify_all()
        self.workers.wake()


class Transport(abc.ABC):
    """Makes the tasks of a lane. Methods need the lock; the tasks that they return run without it."""

    def __init__(self, queues: Queues, mover: Mover) -> None:
        self._queues = queues
        self._mover = mover
        self._ledger = queues.ledger
        self._ends = queues.ends
        self._workers = queues.workers

    @property
    def will_read_ahead(self) -> bool:
        """Whether a thread is about to read ahead."""
        return False

    @property
    def has_more(self) -> bool:
        """Whether there may be a write or something to read ahead."""
        return False

    def join(self, entry: Entry) -> None:
        """``entry`` is on its way out."""
        return

    def ask(self, entry: Entry) -> None:
        """Backward has requested ``entry``."""
        return

    def forget(self, entry: Entry) -> None:
        """``entry`` will not be requested any more."""
        return

    @abc.abstractmethod
    def move_out(self, chunk: Chunk, source: Region) -> Task | None:
        """Move ``chunk``, the first one that is queued, out of ``source``. None: there is no room now."""

    @abc.abstractmethod
    def bring_back(self, fill: Fill, chunk: Chunk, target: Region) -> Task | None:
        """Bring ``chunk``, the first one that is queued, from staging or the file to ``target``. None: there is no room
        now."""

    def next_write(self) -> Task | None:
        """Move something that has left its tensor to the file."""
        return None

    def next_ahead(self) -> Task | None:
        """Read something that nobody has requested yet."""
        return None

    def close(self) -> None:
        """Drop everything. No task runs any more. May be called again."""
        return

    def bring_kept(self, fill: Fill, chunk: Chunk, target: Region, kept: Tensor) -> None:
        """A task: copy ``kept``, the bytes of ``chunk`` that could not be written, to ``target``."""
        began_ns = time.perf_counter_ns()
        self._mover.copy_kept(kept, target, chunk.start, chunk.length, (fill.ready,))
        with self._ledger.lock:
            self._ends.forwarded(fill, chunk)
            self._ends.trace("forward", chunk, began_ns)
            self._queues.is_issued(fill, chunk, None, None)
