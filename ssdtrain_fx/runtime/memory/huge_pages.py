"""Huge pages for tensors that are written without staging, and for the heap that holds them.

Why: direct I/O pins every page it reads from. Activations of compiled code are on the heap, in pages of 4 KiB. Pinning
these takes the computing thread as long as the rest of an offload: 1 to 3 percent of a BERT step that moves 1 GiB
(2 cores, Linux 6.18, 2026-11-22). The heap reuses the same memory for the next layer and the next step, so one attempt
per place is enough. A place is the address range of one huge page.

Guarantees:

* No data changes. Only huge pages that are entirely within the tensor, or within the heap, are touched.
* A place is tried once. If the system has no free huge page, or its settings forbid them, the small pages remain.
* This takes at most ``GRANT_S`` of the first step, then the fraction ``SHARE`` of the time, give or take one place. If
  the host of a virtual machine has taken freed memory away, one place can cost as much as fifty transfers save.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ssdtrain_fx.runtime.memory.staging import HUGE_PAGE_BYTES

MADV_COLLAPSE = 25
"""Copy small pages to a huge one now (Linux 6.1); earlier kernels do it some time later, or not at all."""
GRANT_S = 2.0
"""Less than compilation takes, which is part of the first step anyway."""
SHARE = 0.0005
"""A place that takes 5 ms and saves 0.1 ms per step pays off after fifty steps: more would slow down short runs."""
MAPS = Path("/proc/self/maps")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HugePages:
    """Asks the system for huge pages and records which places were tried. May be used from any thread."""

    def __init__(
        self, setting: Path = SETTING, maps: Path = MAPS, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._tried: set[int] = set()
        self._madvise = _find_madvise() if _are_allowed(setting) else None
        self._maps = maps
        self._clock = clock
        self._since_s = clock()
        self._spent_s = 0.0
        self._grant_s = GRANT_S

    def put_under(self, address: int, byte_count: int) -> None:
        """Turn the places that are entirely within ``[address, address + byte_count)`` into huge pages."""
        if self._madvise is None:
            return
        first, end = -(-address // HUGE_PAGE_BYTES), (address + byte_count) // HUGE_PAGE_BYTES
        if self._tried.issuperset(range(first, end)):
            return
        begin_s = self._clock()
        for page in range(first, end):
            if page not in self._tried:
                if self._spent_s > self._grant_s + SHARE * (begin_s - self._since_s):
                    return
                self._tried.add(page)
                start = page * HUGE_PAGE_BYTES
                if self._madvise(start, HUGE_PAGE_BYTES, mmap.MADV_HUGEPAGE) == 0:
                    self._madvise(start, HUGE_PAGE_BYTES, MADV_COLLAPSE)
                now_s = self._clock()
                self._spent_s += now_s - begin_s
                begin_s = now_s

    @property
    def has_grant(self) -> bool:
        return self._grant_s > 0

    def put_under_heap(self) -> None:
        """Spend the rest of the grant on the heap, which will hold other tensors. Called when the first backward begins
        and everything is compiled. Memory that the heap touches later gets huge pages on first access."""
        if self._madvise is not None:
            for start, end in _heap(self._maps):
                first, last = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
                if last > first:
                    self._madvise(first, last - first, mmap.MADV_HUGEPAGE)
                self.put_under(start, end - start)
        self._grant_s, self._spent_s, self._since_s = 0.0, 0.0, self._clock()


def _are_allowed(setting: Path) -> bool:
    with contextlib.suppress(OSError):
        return "[never]" not in setting.read_text()
    return False


def _heap(maps: Path) -> Iterator[tuple[int, int]]:
    """Yield the start and end of the C library's main heap; nothing if the system does not report them."""
    with contextlib.suppress(OSError):
        for line in maps.read_text().splitlines():
            if line.endswith("[heap]"):
                start, end = line.split()[0].split("-")
                yield int(start, 16), int(end, 16)


def _find_madvise() -> ctypes._NamedFuncPointer:
    madvise = ctypes.CDLL(None)["madvise"]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
