"""How much longer the steps of a graph compute than by roofline, in a JSON file (``keyed_file``).

A roofline has no cold caches and no kernels that transpose: on a CPU, steps often take twice as long. With
``costs="steps"``, each process measures its steps, and the next plan of the same graph counts on what they took.

Beside other programs, steps take longer. A plan that counts on that would move more than an idle machine can hide, so
such a measurement is not stored.

A plan, and the key of compile caches, depends on the stored number. So a number that is nearly right is not replaced.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ssdtrain_fx.machine.keyed_file import KeyedFile, TimesKey, times_key
from ssdtrain_fx.machine.other_load import OtherLoad

log = logging.getLogger(__name__)

FORMAT = 1
TOLERANCE = 1.1
"""A stored ratio is replaced by one that differs by more than this factor."""


class StepTimes:
    """The measured ratios of one key."""

    def __init__(self, key: TimesKey) -> None:
        self._file = KeyedFile("step-times", key, FORMAT)

    def ratio(self, graph: str) -> float | None:
        """Measured seconds of a step, as a multiple of those by roofline. None: not measured."""
        return (self._file.read(_parse) or {}).get(graph)

    def store(self, graph: str, ratio: float) -> None:
        """Remember ``ratio``, unless what is stored is nearly right. If nothing can be stored, that is logged."""
        try:
            with self._file.locked():
                stored = self._file.read(_parse) or {}
                known = stored.get(graph)
                if known is not None and max(known, ratio) <= TOLERANCE * min(known, ratio):
                    return
                self._file.write({"ratios": {**stored, graph: ratio}})
        except OSError as error:
            log.warning("Step times cannot be stored in %s (%s): plans stay as they are.", self._file.path, error)
            return
        log.info("steps compute %.2f times as long as by roofline. The next process plans with that.", ratio)


class GraphWatcher:
    """Stores what the steps of one graph take, unless other programs have disturbed them."""

    def __init__(self, times: StepTimes, graph: str) -> None:
        self._times = times
        self._graph = graph
        self._load: OtherLoad | None = None

    def start(self) -> None:
        self._load = OtherLoad()

    def add(self, ratio: float) -> None:
        busy = "" if self._load is None else self._load.describe()
        if busy:
            log.info("the time of steps is not stored: %s.", busy)
        else:
            self._times.store(self._graph, ratio)


def load_step_times(device: str) -> StepTimes:
    """The ratios of ``device`` under the current settings."""
    return StepTimes(times_key(device))


def _parse(raw: Mapping[str, Any]) -> dict[str, float]:
    ratios: dict[str, float] = raw["ratios"]
    if not all(isinstance(ratio, float) and 0 < ratio < math.inf for ratio in ratios.values()):
        raise ValueError("it has a ratio that is not a positive number")
    return ratios
