"""Memory of tensors that the disk reads into: page-aligned, on huge pages, and used again.

Why huge pages: direct I/O pins every page it reads into, and 512 small ones cost more than the transfer of 2 MiB itself
(figures in :mod:`ssdtrain_fx.runtime.staging`). Why used again: the first touch of fresh memory is as dear as a copy.

Guarantees:

* A tensor owns whole pages: nobody else's data lies on them.
* Memory is given out again only after the last tensor on its storage has died.
* What lies idle is at most ``idle_bytes``, and nothing after :meth:`TensorMemory.release_idle`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ssdtrain_fx.runtime.slots import round_up
from ssdtrain_fx.runtime.staging import HUGE_PAGE_BYTES

IDLE_BYTES = 64 << 20
"""Enough for the reloads of one layer to follow those of the one before: tensors of 24, 18 and 6 MiB in GPT-2 of 12
layers, hidden 384, batch 8 x 512, whose peak is no higher with 64 MiB than with 24."""


class _Lease:
    """Dies with the storage of a tensor. May die anywhere, so it takes no lock."""

    __slots__ = ("_memory", "_returned")

    def __init__(self, memory: mmap.mmap, returned: collections.deque[mmap.mmap]) -> None:
        self._memory = memory
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._memory)


class TensorMemory:
    """A pool of anonymous mappings, by size. All methods may be called from any thread."""

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self._idle_limit_bytes = idle_bytes
        self._lock = threading.Lock()
        self._returned: collections.deque[mmap.mmap] = collections.deque()
        self._idle: collections.deque[mmap.mmap] = collections.deque()
        """Oldest first."""
        self._array_types: dict[int, Any] = {}

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, byte_count: int) -> Tensor:
        """A CPU tensor at the start of its storage of ``byte_count`` bytes and of a page. Not initialised."""
        length = round_up(byte_count) + HUGE_PAGE_BYTES
        with self._lock:
            self._collect()
            memory = next((memory for memory in self._idle if len(memory) == length), None)
            if memory is not None:
                self._idle.remove(memory)
            array_type = self._array_types.get(byte_count)
            if array_type is None:
                array_type = self._array_types[byte_count] = ctypes.c_char * byte_count
        if memory is None:
            memory = _map(length)
        skip = _skip(memory)
        array: Any = array_type.from_buffer(memory, skip)
        array.lease = _Lease(memory, self._returned)
        storage = torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)

    def release_idle(self) -> None:
        """Give what is idle back to the system."""
        if self._returned or self._idle:
            with self._lock:
                self._returned.clear()
                self._idle.clear()

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        while sum(map(len, self._idle)) - len(self._idle) * HUGE_PAGE_BYTES > self._idle_limit_bytes:
            self._idle.popleft()


def _map(length: int) -> mmap.mmap:
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole_bytes = (length - HUGE_PAGE_BYTES) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if whole_bytes:  # the rest stays on small pages: a huge one would hold memory that nobody uses
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, _skip(memory), whole_bytes)
    return memory


def _skip(memory: mmap.mmap) -> int:
    """Offset of the first huge page."""
    return -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES
