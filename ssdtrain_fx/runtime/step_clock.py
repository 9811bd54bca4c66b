"""How long the halves of steps compute, measured while they run: for plans with ``costs="steps"``.

The time of a half, less what its thread waits for transfers, is what kernels and ops take. The plan says what the ops
take, so the rest is the compute time. Threads that train at the same time disturb each other's measurement.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

WARM_UP_COUNT = 2
"""Steps that do not count: their memory is not yet arranged, and caches are cold."""
FIRST_COUNT = 8
"""Steps until the first result. Others follow after 16, 32, 64, ... steps."""
LAST_COUNT = 64
"""The most runs of a half that a result depends on."""


class TimedHalf(NamedTuple):
    """What the clock has to know of a half."""

    graph: str
    """Key of the graph."""
    phase: Literal["forward", "backward"]
    roofline_s: float
    """What the kernels of both halves take by roofline."""
    ops_s: float
    """What the ops of both halves take of the computing thread, as planned, without stalls."""


class Watcher(Protocol):
    """Who wants to know how long the steps of a graph compute."""

    def start(self) -> None:
        """Steps are measured from now on."""

    def add(self, ratio: float) -> None:
        """They take ``ratio`` times as long as by roofline."""


class StepClock:
    """Times the halves of steps. Results go to those who watch a graph."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        """Grows while a computing thread waits for transfers."""
        self._runs: dict[TimedHalf, collections.deque[float]] = {}
        self._counts: collections.Counter[TimedHalf] = collections.Counter()
        self._watchers: dict[str, Watcher] = {}

    def watch(self, graph: str, watcher: Watcher) -> None:
        """Tell ``watcher`` how long the steps of ``graph`` take from now on. The latest watcher of a graph counts."""
        for half in [half for half in list(self._runs) if half.graph == graph]:
            del self._runs[half]
            self._counts.pop(half, None)
        self._watchers[graph] = watcher

    def run(self, half: TimedHalf, call: Callable[[Any], Any], args: Any) -> Any:
        """Time ``call(args)``."""
        began_s, waited_s = time.perf_counter(), self.waited_s
        result = call(args)
        self.add(half, time.perf_counter() - began_s - (self.waited_s - waited_s))
        return result

    def add(self, half: TimedHalf, seconds: float) -> None:
        """Note that ``half`` has taken so many seconds, stalls not counted."""
        self._runs.setdefault(half, collections.deque(maxlen=LAST_COUNT)).append(seconds)
        watcher = self._watchers.get(half.graph)
        if half.phase == "forward" or watcher is None:
            return
        self._counts[half] += 1
        count = self._counts[half] - WARM_UP_COUNT
        forward, backward = self._runs.get(half._replace(phase="forward")), self._runs[half]
        if forward is None or not half.roofline_s:
            return
        if count == 0:
            forward.clear()
            backward.clear()
            watcher.start()
        elif count >= FIRST_COUNT and count & (count - 1) == 0:
            compute_s = _lower_quartile(forward) + _lower_quartile(backward) - half.ops_s
            if compute_s > 0:
                watcher.add(compute_s / half.roofline_s)


def _lower_quartile(seconds: collections.deque[float]) -> float:
    """What three of four runs exceed: other programs make a run slower, never faster."""
    return sorted(seconds)[len(seconds) // 4]


step_clock = StepClock()
