"""Huge pages under tensors that are written from where they are.

Why: direct I/O pins every page it reads from. A compiler's activations lie on the heap, on pages of 4 KiB, and pinning
these is most of what is left of an offload on the computing thread: of a GPT-2 step that moves 1 GiB, 2 to 3 percent
(2 cores, Linux 6.18, 2026-11-21). The heap gives the same memory to the next layer and to the next step, so it is
enough to do this once per place.

Guarantees:

* The bytes of the tensor do not change, and no memory is taken that it does not fill: only huge pages that lie in it as
  a whole are touched.
* A place is tried once. Where the system has no huge page now, or the machine's owner wants none, it stays as it is.
* It takes at most ``GRANT_S`` of the first forward, and then ``SHARE`` of the time, give or take one place: where the
  host of a virtual machine has taken freed memory away, one place can cost as much as fifty transfers save.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Callable
from pathlib import Path

from ssdtrain_fx.runtime.staging import HUGE_PAGE_BYTES

MADV_COLLAPSE = 25
"""Copy small pages to a huge one now (Linux 6.1); earlier kernels do it some time later, or not at all."""
GRANT_S = 1.0
"""Less than compiling takes, which the first step does anyway."""
SHARE = 0.002
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HugePages:
    """Which places have been tried. May be used from any thread."""

    def __init__(self, setting: Path = SETTING, clock: Callable[[], float] = time.perf_counter) -> None:
        self._tried: set[int] = set()
        self._madvise = _find_madvise() if _are_allowed(setting) else None
        self._clock = clock
        self._since_s = clock()
        self._spent_s = 0.0
        self._grant_s = GRANT_S

    def put_under(self, address: int, byte_count: int) -> None:
        """Have the whole huge pages within ``[address, address + byte_count)`` made of one page each."""
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

    def end_grant(self) -> None:
        """A forward is over. What is left of the grant would slow down steps that compile nothing."""
        if self._grant_s:
            self._grant_s, self._spent_s, self._since_s = 0.0, 0.0, self._clock()


def _are_allowed(setting: Path) -> bool:
    with contextlib.suppress(OSError):
        return "[never]" not in setting.read_text()
    return False


def _find_madvise() -> ctypes._NamedFuncPointer:
    madvise = ctypes.CDLL(None)["madvise"]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
