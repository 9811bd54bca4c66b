"""Copies between the memory of an accelerator and pinned staging buffers, on side streams.

The functions of a device have the interface of ``torch.cuda``: see :mod:`ssdtrain_fx.accelerators`. Only how memory is
pinned differs between devices.

Why side streams: a copy on the compute stream would delay the computation; on a side stream, the two overlap.

Guarantees, per device and in the order of the device's work:

* A copy out starts after the work that was enqueued on the caller's stream before ``offload``.
* ``release`` makes the caller's stream wait for the copies out; the host does not block for the device.
* A copy in starts after the work that was enqueued on the caller's stream before ``reload``. Otherwise 1. a kernel
  still reads memory that Python has already freed, 2. the caching allocator gives it to ``reload``, which is correct
  for work on the same stream, 3. the copy on the side stream overwrites it too early.
* The lane keeps source, target and buffer alive until the event of the copy has completed, so ``record_stream`` is not
  needed.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.runtime.memory.movers import Mark, Region
from ssdtrain_fx.runtime.memory.staging import PINNED_BUDGET_BYTES, StagingBuffer, pinned_chunk_bytes


class _SideStreams:
    """One stream per direction for one device. ``lock`` keeps a copy and its event together."""

    def __init__(self, functions: Any, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.out = functions.Stream(device=device)
        self.back = functions.Stream(device=device)


class StreamMover(abc.ABC):
    """Enqueues copies. Only :meth:`wait_host` and :meth:`copy_kept` block."""

    thread_count = 4
    default_budget_bytes = PINNED_BUDGET_BYTES
    enqueues = True

    def __init__(self, functions: Any) -> None:
        """``functions`` is ``torch.cuda`` or an object with the same functions."""
        self._functions = functions
        self._lock = threading.Lock()
        self._streams: dict[torch.device, _SideStreams] = {}

    def mark(self, device: torch.device) -> Mark:
        return self._record(self._functions.current_stream(device))

    def stream(self, device: torch.device) -> object:
        return self._functions.current_stream(device)

    def copy_out(self, source: Region, start: int, length: int, buffer: StagingBuffer, after: Mark) -> Mark:
        pinned = self._pinned(buffer)
        device = source.tensor.device
        streams = self._side_streams(device)
        with streams.lock, self._functions.stream(streams.out):
            streams.out.wait_event(after)
            pinned[:length].copy_(source.as_bytes()[start : start + length], non_blocking=True)
            return self._record(streams.out)

    def copy_in(self, buffer: StagingBuffer, target: Region, start: int, length: int, after: Sequence[Mark]) -> Mark:
        return self._copy_back(self._pinned(buffer), target, start, length, after)

    def copy_kept(self, kept: Tensor, target: Region, start: int, length: int, after: Sequence[Mark]) -> None:
        mark = self._copy_back(kept, target, start, length, after)
        self.wait_host(mark)

    def wait_host(self, mark: Mark) -> None:
        if mark is not None:
            mark.synchronize()

    def wait_stream(self, mark: Mark, device: torch.device) -> None:
        if mark is not None:
            self._functions.current_stream(device).wait_event(mark)

    def last_marks(self) -> list[tuple[torch.device, Mark]]:
        marks: list[tuple[torch.device, Mark]] = []
        for device, streams in tuple(self._streams.items()):
            with contextlib.suppress(RuntimeError):  # of a device that has failed, and copies nothing any more
                marks += [(device, self._record(stream)) for stream in (streams.out, streams.back)]
        return marks

    def chunk_bytes(self, budget_bytes: int) -> int:
        return pinned_chunk_bytes(budget_bytes)

    @abc.abstractmethod
    def make_buffer(self, size_bytes: int) -> StagingBuffer: ...

    @abc.abstractmethod
    def forget(self, buffers: Sequence[StagingBuffer]) -> None: ...

    @abc.abstractmethod
    def _pinned(self, buffer: StagingBuffer) -> Tensor:
        """The buffer as a tensor that the device can copy to and from. No lock is needed: the caller is the only user
        of the buffer, or got it from a copy that has pinned it."""

    def _copy_back(self, source: Tensor, target: Region, start: int, length: int, after: Sequence[Mark]) -> Mark:
        streams = self._side_streams(target.tensor.device)
        with streams.lock, self._functions.stream(streams.back):
            for mark in after:
                if mark is not None:
                    streams.back.wait_event(mark)
            target.as_bytes()[start : start + length].copy_(source[:length], non_blocking=True)
            return self._record(streams.back)

    def _record(self, stream: Any) -> Mark:
        event = self._functions.Event()
        event.record(stream)
        return event

    def _side_streams(self, device: torch.device) -> _SideStreams:
        streams = self._streams.get(device)
        if streams is None:
            with self._lock:
                streams = self._streams.get(device)  # another thread may have been first
                if streams is None:
                    streams = self._streams[device] = _SideStreams(self._functions, device)
        return streams


def pinning_error(size_bytes: int, reason: str) -> ConfigError:
    """The error for memory that cannot be pinned."""
    return ConfigError(
        f"cannot pin {size_bytes} bytes of host memory ({reason}). "
        "Lower host_budget_bytes, or raise the limit on locked memory (ulimit -l)."
    )
