"""The order in which graphs run if a model is compiled as several graphs: layer by layer, or with graph breaks.

    forward    run 1 -> run 2 -> run 3          tensors that run 2 leaves unwritten are written while run 3 computes
    backward   run 3 -> run 2 -> run 1          tensors that run 2 needs first are read while run 3 computes

A *run* is one call of the forward of one graph. A run that comes before another one in forward comes after it in
backward. This also holds for gradient accumulation and for pipeline schedules, because the layers of one micro-batch
run one after another. If a stage of a pipeline is one graph, its micro-batches come back in the order in which they
came::

    forward    run 1 -> run 2 -> run 3
    backward   run 1 -> run 2 -> run 3

So the guess is the run before, unless its backward has been; then it is the run after. If a forward ran between this
backward and the last one, as in 1F1B, another one will run before the next backward. What is read ahead would be in
memory during it, so nothing is.

A training loop may say which backward comes next (:mod:`ssdtrain_fx.runtime.policy.schedule_hints`). Then only one
thing is guessed: that the runs of one micro-batch come back in the reverse order of forward.

Guarantees:

* A wrong guess costs a wasted read, and memory until the next run shows that the guess was wrong. The data that a graph
  gets does not depend on any guess.
* Tensors read ahead take no more memory than the run whose backward is executing has already used. With a plan, each
  of them is read as late as possible (``planning/read_ahead.py``).
* Tensors of at most one run leave after their forward: a run ends only when all tensors of the run before it have left.

All methods need the ledger's lock.
"""

from __future__ import annotations

import threading
import weakref

from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Entry, GraphRun, MicroBatch
from ssdtrain_fx.runtime.policy.schedule_hints import ScheduleHints, schedule_hints


class _OfThread(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        self.forward: GraphRun | None = None
        self.guess: tuple[weakref.ref[GraphRun], weakref.ref[GraphRun]] | None = None
        """The run whose backward is executing, and the run whose tensors are read ahead."""


class GraphRuns:
    """The runs of one engine. Entries keep their run alive, and runs keep nothing alive."""

    def __init__(self, ledger: Ledger, hints: ScheduleHints = schedule_hints) -> None:
        self._ledger = ledger
        self._hints = hints
        self._of_thread = _OfThread()
        self._last_run: weakref.WeakValueDictionary[MicroBatch, GraphRun] = weakref.WeakValueDictionary()
        """The last run of each micro-batch that has a name."""
        self._forward_came = False
        """A forward has begun since the last backward began."""
        self._turn_by_graph: dict[str, dict[str, int]] = {}
        """The order in which the last backward of a graph requested its tensors: 1, 2, 3 ..., by name."""

    def add(self, entry: Entry, handle: int, graph_name: str) -> None:
        """Record that a run of the graph ``graph_name`` offloaded ``entry``. A run offloads each name once."""
        mine, key = self._of_thread, self._hints.micro_batch
        run = mine.forward
        if run is None or (run.graph_name, run.micro_batch) != (graph_name, key) or entry.name in run.names:
            run = mine.forward = GraphRun(graph_name, run, key)
            self._forward_came = True
            if key is not None:
                self._last_run[key] = run
        run.handles.append(handle)
        run.names.add(entry.name)
        entry.run = run

    def must_leave(self, entry: Entry) -> list[Entry]:
        """The entries that a deferred release of ``entry`` has to wait for."""
        run = entry.run
        before = None if run is None else run.before
        return [] if before is None else [other for other in self._entries(before) if other.uncopied]

    def reloaded(self, entry: Entry) -> None:
        """Record that backward requests ``entry``."""
        run, mine = entry.run, self._of_thread
        if run is None:
            return
        if run.reload_count == 0:
            run.follows_forward, self._forward_came = self._forward_came, False
            self._hints.begun(run.micro_batch)
        run.reload_count += 1
        self._turn_by_graph.setdefault(run.graph_name, {})[entry.name] = run.reload_count
        if mine.guess is not None:
            current, ahead = mine.guess[0](), mine.guess[1]()
            # A forward that is computed again within the present backward has a backward of its own.
            if run is not current and run is not ahead and ahead is not self._told():
                mine.guess = None
                if ahead is not None:
                    self._forget(ahead)

    def waited(self, entry: Entry) -> list[Entry]:
        """Record that backward has received ``entry``. Returns the entries to read ahead now."""
        run = entry.run
        if run is None:
            return []
        run.used_bytes += run.last_waited_bytes
        run.last_waited_bytes = entry.byte_count
        ahead, entries = self._next(run)
        mine = self._of_thread
        other = None if mine.guess is None else mine.guess[1]()
        if other is not None and other is not ahead and other is not run:  # another expectation than before
            self._forget(other)
        if ahead is None:
            return []
        mine.guess = weakref.ref(run), weakref.ref(ahead)
        entries.reverse()
        room_bytes = run.used_bytes - sum(other.byte_count for other in entries if other.ahead is not None)
        turns = self._turn_by_graph.get(ahead.graph_name, {})
        chosen: list[Entry] = []
        # In the order of the last backward. Entries without a turn come after, those saved last first.
        for other in sorted(entries, key=lambda other: turns.get(other.name, len(turns) + 1)):
            if other.reloaded or other.stays or other.ahead is not None or _is_too_early(other, entry):
                continue
            room_bytes -= other.byte_count
            if room_bytes < 0:
                break
            chosen.append(other)
        return chosen

    def _next(self, run: GraphRun) -> tuple[GraphRun | None, list[Entry]]:
        """The run whose backward comes after that of ``run``, and its entries; None: unknown, or there is none."""
        before = run.before
        same = before is not None and run.micro_batch is not None and before.micro_batch == run.micro_batch
        for candidate in (before if same else None, self._told(), before, None if run.follows_forward else run.after):
            entries = self._to_come(candidate)
            if entries:
                return candidate, entries
        return None, []

    def _told(self) -> GraphRun | None:
        """The last run of the micro-batch whose backward comes next, as far as that was said."""
        expected = self._hints.expected
        return None if expected is None else self._last_run.get(expected)

    def _to_come(self, run: GraphRun | None) -> list[Entry]:
        """The entries of ``run`` if its backward has not begun."""
        return [] if run is None or run.reload_count else self._entries(run)

    def _entries(self, run: GraphRun) -> list[Entry]:
        found = (self._ledger.entries.get(handle) for handle in run.handles)
        return [entry for entry in found if entry is not None]

    def _forget(self, run: GraphRun) -> None:
        for entry in self._entries(run):
            self._ledger.drop_ahead(entry)


def _is_too_early(other: Entry, waited: Entry) -> bool:
    """Whether the read of ``other`` may begin after the next wait of the backward that has just received ``waited``."""
    return other.lead_s is not None and waited.left_s is not None and other.lead_s <= waited.left_s
