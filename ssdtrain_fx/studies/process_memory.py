"""What this process holds: resident memory where it computes on a CPU, memory of torch's allocator on CUDA.

    was_reset = reset_peak("cpu")
    ...                             # a step
    peak_bytes("cpu")               # the most that the process held since the reset

Linux and torch's allocator record the peak themselves. So a peak inside one long kernel is not missed, and a step that
is measured runs as every other step does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import threading
import time
from pathlib import Path
from typing import Self

import ssdtrain_fx
from ssdtrain_fx.accelerators import device_functions

STATUS = Path("/proc/self/status")
STATM = Path("/proc/self/statm")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK_RSS = "5"
SAMPLE_INTERVAL_S = 0.002


def used_bytes(device: str) -> int:
    if device != "cpu":
        return device_functions(device).memory_allocated()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def reset_peak(device: str) -> bool:
    """Let `peak_bytes` begin anew. False where the system does not permit that, as in some containers."""
    if device != "cpu":
        device_functions(device).reset_peak_memory_stats()
        return True
    try:
        CLEAR_REFS.write_text(RESET_PEAK_RSS)
    except OSError:
        return False
    return True


def peak_bytes(device: str) -> int:
    """The most that this process held since the last `reset_peak`; without a reset, since it began."""
    if device != "cpu":
        return device_functions(device).max_memory_allocated()
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def return_unused_memory() -> None:
    """Give back what Python, this backend and the C library keep for later use."""
    gc.collect()
    ssdtrain_fx.empty_cache()
    with contextlib.suppress(AttributeError):  # a C library without it keeps little
        ctypes.CDLL(None)["malloc_trim"](0)


class Course:
    """Samples what this process holds while the `with` block runs. The thread that does so slows the block down."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._began_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.samples: list[tuple[float, int]] = []
        """(ms since the block began, bytes)."""

    def __enter__(self) -> Self:
        self._began_s = time.perf_counter()
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._take()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_INTERVAL_S):
            self._take()

    def _take(self) -> None:
        now_s = time.perf_counter()
        self.samples.append((round(1e3 * (now_s - self._began_s), 3), used_bytes(self._device)))
