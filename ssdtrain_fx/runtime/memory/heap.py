"""Settings of the C library's heap that let it keep the memory of freed activations.

Why: glibc returns the end of its heap to the system as soon as 64 MiB of it are free. With offloading, activations are
freed early, so this happens many times per step, and the next layer touches fresh memory, page by page: up to 70,000
page faults more than without offloading, 2 percent of a GPT-2 step (2 cores, 2026-11-21).

Guarantees:

* Malloc settings already made by the user are left alone. Reloaded tensors use that heap too: if it returns freed
  memory at once, no memory is kept for them either.
* The heap keeps the memory of its peak, with one exception: if twice :data:`KEPT_BYTES` are free at its end, all but
  :data:`KEPT_BYTES` is returned.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Mapping

KEPT_BYTES = 512 << 20
HEAP_BELOW_BYTES = 32 << 20
"""Larger tensors get separate mappings. This is glibc's dynamic maximum, which is off once any mallopt value is set."""

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_SETTINGS = ("mmap_max", "mmap_threshold", "top_pad", "trim_threshold")
"""Tunables of glibc; each is an environment variable too."""


@functools.cache
def prepare_heap() -> int:
    """Let the heap of this process keep the memory of freed tensors, unless the user has set it up already.

    Returns the size below which tensors should use the heap; 0 if the heap is not glibc's.
    """
    if platform.libc_ver()[0] != "glibc":
        return 0
    if _is_set_up(os.environ):
        return HEAP_BELOW_BYTES
    mallopt = ctypes.CDLL(None)["mallopt"]
    settings = (
        (_M_MMAP_THRESHOLD, HEAP_BELOW_BYTES),
        (_M_TOP_PAD, KEPT_BYTES),  # left free when the end is returned; reserved (addresses only) when the heap grows
        (_M_TRIM_THRESHOLD, 2 * KEPT_BYTES),
    )
    return HEAP_BELOW_BYTES if all(mallopt(name, value) for name, value in settings) else 0


def _is_set_up(environment: Mapping[str, str]) -> bool:
    tunables = environment.get("GLIBC_TUNABLES", "")
    return any(f"MALLOC_{name.upper()}_" in environment or f"glibc.malloc.{name}=" in tunables for name in _SETTINGS)
