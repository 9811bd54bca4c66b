"""Times of single op calls on this machine: measured once, then kept in memory and in a JSON file.

The file is next to the hardware profiles (``profile_store``). There is one file for each device, processor, number of
threads, version of torch, and setting by which torch chooses kernels. If any of them differs, another file is read.

Two measurements are never quite equal, and a plan depends on them. So a stored time is not measured again:

* A file only grows, under one *generation*: a random name that it gets when it is created. The entry of a call never
  changes, even if it says that the call cannot run. The generation is part of the key of compile caches.
* Processes that measure the same call at the same time all use the result that was stored first.
* A file exists completely or not at all. A file that cannot be used is replaced by one of another generation, with a
  warning. If nothing can be stored, each process has a separate generation.

Together: the same generation, hardware profile and graph give the same plan. To measure again, delete the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import math
import os
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from ssdtrain_fx.fork_safe_lock import ForkSafeLock
from ssdtrain_fx.machine.call_runner import run_calls
from ssdtrain_fx.machine.probe_hardware import device_name
from ssdtrain_fx.machine.profile_store import key_file_name, profile_directory
from ssdtrain_fx.machine.system import cpu_model
from ssdtrain_fx.passes.analysis.node_calls import Call, Seconds
from ssdtrain_fx.whole_file import write_whole

log = logging.getLogger(__name__)

FORMAT = 1

RunCalls = Callable[[Sequence[Call]], Sequence[Seconds]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimesKey:
    """What measured times are valid for."""

    device: str
    processor: str
    cores: int
    """Cores that this process may use."""
    threads: int
    """``torch.get_num_threads()``."""
    torch_version: str
    libraries: str
    settings: str
    """Settings by which torch chooses kernels."""

    @property
    def file_name(self) -> str:
        """A readable file name, different for every key."""
        return f"node-times-{key_file_name(dataclasses.asdict(self))}"


def times_key(device: str) -> TimesKey:
    """The key of this process on this machine, with its current settings.

    Raises:
        ConfigError: there is no such device.
    """
    backends = cast(Any, torch.backends)
    settings = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "mkldnn": backends.mkldnn.enabled,
        "fp16_accumulation": backends.cuda.matmul.allow_fp16_accumulation,
        "fp32": tuple(
            one.fp32_precision
            for one in (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
        ),
    }
    return TimesKey(
        device=device_name(device),
        processor=cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        libraries=f"CUDA {torch.version.cuda} cuDNN {backends.cudnn.version()}",
        settings=repr(settings),
    )


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
        self._key = key
        self._path = profile_directory() / key.file_name
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
                log.info("measuring %d op calls; their times are stored in %s", len(missing), self._path)
                found = dict(zip((call.key for call in missing), self._run(missing), strict=True))
                self._known = self._exchange(self._known.merge(_Stored("", found)))
            return {key: self._known.times[key] for key in by_key}

    def _exchange(self, mine: _Stored, *, adopt: bool = False) -> _Stored:
        """Store what is new in ``mine``, and return it together with everything stored.

        A file of another generation is not changed. With ``adopt``, its content is returned instead.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                stored = self._read()
                if stored is not None and stored.generation != mine.generation:
                    return stored if adopt else mine
                merged = mine if stored is None else stored.merge(mine)
                if merged != stored:
                    self._write(merged)
                return merged
        except OSError as error:
            log.warning("Node times cannot be stored in %s (%s): every process will measure again.", self._path, error)
            return mine

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        """Exclude other processes. The lock is a separate file, because the file with the times is replaced."""
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self) -> _Stored | None:
        try:
            raw: Any = json.loads(self._path.read_text(encoding="utf-8"))
            expected = {"format": FORMAT, "key": dataclasses.asdict(self._key)}
            found = {name: raw[name] for name in expected}
            if found != expected:
                raise ValueError(f"it has {found}, expected {expected}")
            generation, times = raw["generation"], raw["times"]
            if not isinstance(generation, str) or not all(_is_time(value) for value in times.values()):
                raise ValueError("it has no generation, or a time that is neither a positive number nor text")
            return _Stored(generation, times)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("The node times in %s cannot be used (%s); measuring again.", self._path, error)
            return None

    def _write(self, stored: _Stored) -> None:
        content = {
            "format": FORMAT,
            "key": dataclasses.asdict(self._key),
            "generation": stored.generation,
            "times": stored.times,
        }
        write_whole(self._path, json.dumps(content, indent=1, sort_keys=True) + "\n")


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
    path = profile_directory() / key.file_name
    with _loaded_lock.current:
        if path not in _loaded:
            _loaded[path] = CallTimes(key)
        return _loaded[path]
