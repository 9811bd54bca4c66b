"""A trace of what the engines do, event by event, in the Chrome trace format (for Perfetto and chrome://tracing).

    tracks of threads      offload, release, reload, wait, with the stall inside; copy, write, read, read ahead and
                           forward of a chunk
    asynchronous tracks    write, read of native AIO, which runs on no thread
    counters               staging memory in use, bytes in flight
    track "steps"          from the first offload to the last wait before the next offload

Clock, process and thread numbers are those of ``torch.profiler`` (Unix time after ``baseTimeNanoseconds``, kernel
thread IDs), so the ``traceEvents`` of both can be merged into one file.

Guarantees:

* While nothing is recorded, an op pays for one attribute lookup.
* Any thread may record. An event is recorded as a whole when it has finished, so no event lacks its end.
* The bytes of all writes, reads (including reads ahead) and forwards are those that the statistics count over the same
  time.
* The file is written completely or not at all, also when the body of the ``with`` statement raises.
* A forked child records nothing and writes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.runtime.book.records import Chunk, Entry
from ssdtrain_fx.runtime.handles.tokens import Owner
from ssdtrain_fx.whole_file import write_whole

log = logging.getLogger(__name__)

STEPS_TRACK = 0
"""No thread has this number."""
BASE_PERIOD_S = 7_889_238
"""torch.profiler counts from the start of the current quarter of a year, so that numbers stay small."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Event:
    name: str
    thread_id: int
    began_ns: int
    ended_ns: int
    details: dict[str, Any]
    asynchronous: bool = False
    """It did not occupy a thread, so it may overlap with other events of its thread."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Levels:
    time_ns: int
    staging_bytes: int
    in_flight_bytes: int


class Trace:
    """Recorded events. All times are those of ``time.perf_counter_ns``."""

    def __init__(self) -> None:
        self._to_unix_ns = time.time_ns() - time.perf_counter_ns()
        self._ops: list[_Event] = []
        self._events: list[_Event] = []
        self._levels: list[_Levels] = []
        self._thread_names: dict[int, str] = {}

    def add_op(self, name: str, began_ns: int, entry: Entry | None, error: str) -> None:
        """Record a call of an op that has finished on this thread; ``entry`` is None if its token is unknown."""
        details = {} if entry is None else {"tensor": entry.name, "bytes": entry.byte_count}
        if error:
            details["error"] = error
        self._ops.append(_Event(name, self._thread(), began_ns, time.perf_counter_ns(), details))

    def add_stall(self, entry: Entry, stall_s: float) -> None:
        """Record that the op on this thread has waited for ``stall_s`` until now."""
        now_ns = time.perf_counter_ns()
        self._events.append(
            _Event("stall", self._thread(), now_ns - round(1e9 * stall_s), now_ns, {"tensor": entry.name})
        )

    def add_transfer(
        self, name: str, began_ns: int, chunk: Chunk, error: BaseException | None = None, *, asynchronous: bool = False
    ) -> None:
        """Record that a chunk was moved, or could not be, by this thread or by none."""
        slot = chunk.entry.slot
        details: dict[str, Any] = {
            "tensor": chunk.entry.name,
            "bytes": chunk.length,
            "slot": None if slot is None else slot.offset_bytes,
            "start": chunk.start,
        }
        if error is not None:
            name, details["error"] = f"{name} failed", str(error)
        self._events.append(_Event(name, self._thread(), began_ns, time.perf_counter_ns(), details, asynchronous))

    def add_levels(self, *, staging_bytes: int, in_flight_bytes: int) -> None:
        self._levels.append(_Levels(time.perf_counter_ns(), staging_bytes, in_flight_bytes))

    def to_json(self) -> str:
        """The trace so far."""
        ops, events, levels = tuple(self._ops), tuple(self._events), tuple(self._levels)
        base_ns = time.time_ns() // (BASE_PERIOD_S * 10**9) * (BASE_PERIOD_S * 10**9)
        process_id = os.getpid()

        def at(time_ns: int) -> dict[str, Any]:
            return {"ts": (time_ns + self._to_unix_ns - base_ns) / 1e3, "pid": process_id}

        names = {STEPS_TRACK: "ssdtrain steps", **self._thread_names}
        written: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": process_id, "tid": thread_id, "args": {"name": name}}
            for thread_id, name in names.items()
        ]
        numbers = itertools.count(1)
        for event in (*_find_steps(ops), *ops, *events):
            head: dict[str, Any] = {"name": event.name, "cat": "ssdtrain", "tid": event.thread_id}
            if event.asynchronous:
                head["id"] = next(numbers)
                written.append({"ph": "b", **head, **at(event.began_ns), "args": event.details})
                written.append({"ph": "e", **head, **at(event.ended_ns)})
            else:
                duration_us = (event.ended_ns - event.began_ns) / 1e3
                written.append({"ph": "X", **head, **at(event.began_ns), "dur": duration_us, "args": event.details})
        for level in levels:
            for name, size_bytes in (("staging", level.staging_bytes), ("in flight", level.in_flight_bytes)):
                counter = {"ph": "C", "name": f"ssdtrain {name}", "cat": "ssdtrain", "tid": STEPS_TRACK}
                written.append({**counter, **at(level.time_ns), "args": {"bytes": size_bytes}})
        return json.dumps({"displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns, "traceEvents": written})

    def _thread(self) -> int:
        thread_id = threading.get_native_id()
        if thread_id not in self._thread_names:
            self._thread_names[thread_id] = _thread_name(thread_id)
        return thread_id


class Traceable(Protocol):
    """What :func:`record_calls` asks of an engine."""

    def find_entry(self, owner: Owner) -> Entry | None: ...


def record_calls(engine: Traceable, names: Sequence[str], trace: Trace | None) -> None:
    """Record the calls of these ops in ``trace``. None: stop recording, so that callers call the ops directly again."""
    for name in names:
        if trace is None:
            vars(engine).pop(name, None)
        else:
            setattr(engine, name, _recorded(engine, name, trace))


def _recorded(engine: Traceable, name: str, trace: Trace) -> Callable[..., Any]:
    """The op, wrapped. The op's parameter ``owner``, or the owner that it returns, identifies the tensor."""
    op = getattr(type(engine), name)
    names = list(op.__code__.co_varnames[1 : op.__code__.co_argcount])
    idx = names.index("owner") if "owner" in names else None

    def call(*arguments: Any, **keywords: Any) -> Any:
        owner: Any = None
        if idx is not None:
            owner = arguments[idx] if idx < len(arguments) else keywords["owner"]
        began_ns = time.perf_counter_ns()
        error = ""  # a string: the exception itself would hold this frame, and with it tensors
        try:
            result = op(engine, *arguments, **keywords)
            owner = result if owner is None else owner
            return result
        except BaseException as raised:
            error = str(raised)
            raise
        finally:
            trace.add_op(name, began_ns, None if owner is None else engine.find_entry(owner), error)

    return call


class Recorder(Protocol):
    """What passes a trace to all engines. Raises ConfigError if one is being recorded already."""

    def start_trace(self, trace: Trace) -> None: ...

    def stop_trace(self) -> None: ...


@contextlib.contextmanager
def record(path: str | os.PathLike[str], recorder: Recorder) -> Generator[None]:
    """Record while the body runs, then write the file. See :func:`ssdtrain_fx.trace`."""
    target = _check(path)
    process_id = os.getpid()
    trace = Trace()
    recorder.start_trace(trace)
    try:
        yield
    except BaseException:
        if os.getpid() == process_id:
            recorder.stop_trace()
            try:
                write_whole(target, trace.to_json())
            except OSError as error:  # the exception of the body matters more
                log.warning("The trace %s cannot be written: %s", target, error)
        raise
    if os.getpid() == process_id:
        recorder.stop_trace()
        write_whole(target, trace.to_json())


def _check(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path, so that it stays valid if the body changes the working directory.

    Raises ConfigError if the file cannot be written. The check runs before the body, which may take hours.
    """
    target = Path(path).expanduser().absolute()
    if target.is_dir():
        raise ConfigError(f"trace: {str(target)!r} is a directory; expected the path of a file to write.")
    if not target.parent.is_dir():
        raise ConfigError(f"trace: the directory of {str(target)!r} does not exist. Create it, or choose another path.")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"trace: no file can be created in the directory of {str(target)!r}: {error.strerror or error}. "
            "Choose another path."
        ) from error
    return target


def _find_steps(ops: Sequence[_Event]) -> Iterable[_Event]:
    """A step begins with the first offload after a backward pass. Ops before the first offload belong to no step."""
    steps: list[list[_Event]] = []
    in_backward = True
    for op in sorted(ops, key=lambda op: op.began_ns):
        if op.name == "offload" and in_backward:
            steps.append([])
            in_backward = False
        in_backward = in_backward or op.name in ("reload", "wait")
        if steps:
            steps[-1].append(op)
    for number, step in enumerate(steps):
        yield _Event(f"step {number}", STEPS_TRACK, step[0].began_ns, max(op.ended_ns for op in step), {})


def _thread_name(thread_id: int) -> str:
    """Python's name, or the kernel's name for a thread that Python did not start, for example autograd's."""
    name = threading.current_thread().name
    if not name.startswith("Dummy-"):
        return name
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/task/{thread_id}/comm").read_text().strip()
    return f"thread {thread_id}"
