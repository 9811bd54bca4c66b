"""Times of single op calls on this machine: measured once, then kept in memory and in a JSON file (``keyed_file``).

Two measurements are never quite equal, and a plan depends on them. So a stored time is not measured again:

* A file only grows, under one *generation*: a random name that it gets when it is created. The entry of a call never
  changes, even if it says that the call cannot run. The generation is part of the key of compile caches.
* Processes that measure the same call at the same time all use the result that was stored first.
* A file that cannot be used is replaced by one of another generation, with a warning. If nothing can be stored, each
  process has a separate generation.

Together: the same generation, hardware profile and graph give the same plan. To measure again, delete the file.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ssdtrain_fx.fork_safe_lock import ForkSafeLock
from ssdtrain_fx.machine.call_runner import run_calls
from ssdtrain_fx.machine.keyed_file import KeyedFile, TimesKey, times_key
from ssdtrain_fx.passes.analysis.node_calls import Call, Seconds

log = logging.getLogger(__name__)

FORMAT = 1

RunCalls = Callable[[Sequence[Call]], Sequence[Seconds]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Stored:
    generation: str
    times: Mapping[str, Seconds]

    def merge(self, other: _Stored) -> _Stored:
        """Both sets of times. Where both have a call, the time of this one counts."""
        return _Stored(self.generation, {**other.times, **self.times})


class CallTimes:
    """The measured times of one key. Threads may share it.

    Args:
        run: measures calls whose time is not known yet.
    """

    def __init__(self, key: TimesKey, run: RunCalls = run_calls) -> None:
        self._file = times_file(key)
        self._run = run
        self._lock = ForkSafeLock()
        self._known = self._exchange(_Stored(uuid.uuid4().hex, {}), adopt=True)

    @property
    def generation(self) -> str:
        """Name of this set of times: an equal name means equal times."""
        return self._known.generation

    def of(self, calls: Sequence[Call]) -> Mapping[str, Seconds]:
        """Seconds of ``calls`` by their keys. Calls whose time is not known are measured and stored."""
        by_key = {call.key: call for call in calls}
        with self._lock.current:
            if not by_key.keys() <= self._known.times.keys():
                self._known = self._exchange(self._known)
            missing = [call for key, call in by_key.items() if key not in self._known.times]
            if missing:
                log.info("measuring %d op calls; their times are stored in %s", len(missing), self._file.path)
                found = dict(zip((call.key for call in missing), self._run(missing), strict=True))
                self._known = self._exchange(self._known.merge(_Stored("", found)))
            return {key: self._known.times[key] for key in by_key}

    def _exchange(self, mine: _Stored, *, adopt: bool = False) -> _Stored:
        """Store what is new in ``mine``, and return it together with everything stored.

        A file of another generation is not changed. With ``adopt``, its content is returned instead.
        """
        try:
            with self._file.locked():
                stored = self._file.read(_parse)
                if stored is not None and stored.generation != mine.generation:
                    return stored if adopt else mine
                merged = mine if stored is None else stored.merge(mine)
                if merged != stored:
                    self._file.write({"generation": merged.generation, "times": merged.times})
                return merged
        except OSError as error:
            log.warning(
                "Node times cannot be stored in %s (%s): every process will measure again.", self._file.path, error
            )
            return mine


def _parse(raw: Mapping[str, Any]) -> _Stored:
    generation, times = raw["generation"], raw["times"]
    if not isinstance(generation, str) or not all(_is_time(value) for value in times.values()):
        raise ValueError("it has no generation, or a time that is neither a positive number nor text")
    return _Stored(generation, times)


def _is_time(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, float) and 0 < value < math.inf)


_loaded: dict[Path, CallTimes] = {}
_loaded_lock = ForkSafeLock()


def load_call_times(device: str) -> CallTimes:
    """The times of ``device`` ("cpu", "cuda" or "cuda:1") under the current settings: one object per process and key.

    Raises:
        ConfigError: there is no such device.
    """
    key = times_key(device)
    path = times_file(key).path
    with _loaded_lock.current:
        if path not in _loaded:
            _loaded[path] = CallTimes(key)
        return _loaded[path]


def times_file(key: TimesKey) -> KeyedFile:
    """The file of one key."""
    return KeyedFile("node-times", key, FORMAT)
