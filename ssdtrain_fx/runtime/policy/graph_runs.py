"""The order in which graphs run, where a model is compiled as many: layer by layer, or with graph breaks.

    forward    run 1 -> run 2 -> run 3          what run 2 has not written at its end is written while run 3 computes
    backward   run 3 -> run 2 -> run 1          what run 2 needs first is read while run 3 computes

A *run* is one call of the forward of one graph. The run that was before another one in forward comes behind it in
backward: that holds for gradient accumulation and for pipeline schedules as well, since the layers of one micro-batch
run one after the other.

Guarantees:

* A wrong guess costs a read that was in vain, and memory for no longer than until the next run shows that it was wrong.
  What a graph gets does not depend on any guess.
* What is read ahead takes no more memory than the run before has used up already.
* What leaves late is one run's at most: a run ends when all of the run before it has left.

All methods need the ledger's lock.
"""

from __future__ import annotations

import threading
import weakref

from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Entry, GraphRun


class _OfThread(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        self.forward: GraphRun | None = None
        self.guess: tuple[weakref.ref[GraphRun], weakref.ref[GraphRun]] | None = None
        """The run whose backward is on, and the one that is read ahead for."""


class GraphRuns:
    """The runs of one engine. Entries keep their run alive, and the runs nobody."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._of_thread = _OfThread()
        self._turn_by_graph: dict[str, dict[str, int]] = {}
        """In which order its last backward asked for the tensors of a graph: 1, 2, 3 ..., by name."""

    def add(self, entry: Entry, handle: int, link: str) -> None:
        """``entry`` was offloaded by a run of the graph ``link``. One graph offloads every name once."""
        mine = self._of_thread
        run = mine.forward
        if run is None or run.link != link or entry.name in run.names:
            run = mine.forward = GraphRun(link, run)
        run.handles.append(handle)
        run.names.add(entry.name)
        entry.run = run

    def must_leave(self, entry: Entry) -> list[Entry]:
        """What a late release of ``entry`` has to wait for."""
        run = entry.run
        before = None if run is None else run.before
        return [] if before is None else [other for other in self._entries(before) if other.uncopied]

    def reloaded(self, entry: Entry) -> None:
        """Backward asks for ``entry``."""
        run, mine = entry.run, self._of_thread
        if run is None:
            return
        run.reload_count += 1
        self._turn_by_graph.setdefault(run.link, {})[entry.name] = run.reload_count
        if mine.guess is not None:
            current, ahead = mine.guess[0](), mine.guess[1]()
            if run is not current and run is not ahead:
                mine.guess = None
                if ahead is not None:
                    self._forget(ahead)

    def waited(self, entry: Entry) -> list[Entry]:
        """Backward has got ``entry``. Returns what to read ahead now."""
        run = entry.run
        if run is None:
            return []
        run.used_bytes += run.last_waited_bytes
        run.last_waited_bytes = entry.byte_count
        ahead = run.before
        if ahead is None:
            return []
        self._of_thread.guess = weakref.ref(run), weakref.ref(ahead)
        entries = self._entries(ahead)[::-1]
        room_bytes = run.used_bytes - sum(other.byte_count for other in entries if other.ahead is not None)
        turns = self._turn_by_graph.get(ahead.link, {})
        chosen: list[Entry] = []
        # In the order of the last time; what has no turn yet comes behind, and of that first what was saved last.
        for other in sorted(entries, key=lambda other: turns.get(other.name, len(turns) + 1)):
            if other.reloaded or other.stays or other.ahead is not None:
                continue
            room_bytes -= other.byte_count
            if room_bytes < 0:
                break
            chosen.append(other)
        return chosen

    def _entries(self, run: GraphRun) -> list[Entry]:
        found = (self._ledger.entries.get(handle) for handle in run.handles)
        return [entry for entry in found if entry is not None]

    def _forget(self, run: GraphRun) -> None:
        for entry in self._entries(run):
            self._ledger.drop_ahead(entry)
