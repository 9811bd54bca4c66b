"""Memory for tensors that are read from the disk: on huge pages, and reused.

Why huge pages: direct I/O pins every page it reads into, and pinning 512 small pages costs more than the transfer of
2 MiB itself (figures in :mod:`ssdtrain_fx.runtime.memory.staging`). Why reuse: the first access to fresh memory is as
expensive as a copy, and far more expensive if the host of a virtual machine has taken freed memory away.

In compiled code, the memory comes from the arena (:mod:`ssdtrain_fx.runtime.memory.step_memory`), like that of all
other tensors there. Elsewhere, and where there is no arena, every tensor gets a mapping, which is kept for the next
tensor of about the same size.

Guarantees:

* A tensor owns whole pages: they hold no other data.
* Memory is reused only after the last tensor on its storage has died.
* After an allocation, unused mappings hold at most ``idle_bytes``. After :meth:`TensorMemory.release_idle` there are
  none.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from ssdtrain_fx import _torch_private
from ssdtrain_fx.runtime.alignment import ALIGNMENT_BYTES, round_up
from ssdtrain_fx.runtime.memory.raw_memory import RawMemory
from ssdtrain_fx.runtime.memory.staging import HUGE_PAGE_BYTES
from ssdtrain_fx.runtime.memory.step_memory import allocate_block, allocate_on_pages
from ssdtrain_fx.runtime.shield import is_mine

IDLE_BYTES = 96 << 20
"""What backward of one layer reads in GPT-2 with 12 layers, hidden 384, batch 8 x 512: tensors of 24, 18 and 6 MiB."""
FIT_RATIO = 1.25
"""A tensor reuses a mapping that is at most this many times as large."""


class _Mapping:
    """Memory from the system, unmapped when this object dies. Physical pages are allocated on first access."""

    __slots__ = ("_memory", "address", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        is_huge = size_bytes >= HUGE_PAGE_BYTES  # then it begins on a huge page
        spare_bytes = HUGE_PAGE_BYTES if is_huge else 0
        self._memory = mmap.mmap(-1, size_bytes + spare_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.address = address + (-address % HUGE_PAGE_BYTES if is_huge else 0)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)


class _Lease:
    """Returns a mapping when the storage of its tensor dies. That may happen anywhere, so it takes no lock."""

    __slots__ = ("_mapping", "_returned")

    def __init__(self, mapping: _Mapping, returned: collections.deque[_Mapping]) -> None:
        self._mapping = mapping
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._mapping)


class TensorMemory:
    """All methods may be called from any thread."""

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self._idle_limit_bytes = idle_bytes
        self._lock = threading.RLock()
        self._idle: list[_Mapping] = []
        """Ordered by how long they have been unused, the longest first."""
        self._returned: collections.deque[_Mapping] = collections.deque()

    @property
    def idle_bytes(self) -> int:
        """Bytes in mappings without a tensor. Takes no lock: a signal handler may ask while its own thread holds it."""
        return sum(mapping.size_bytes for mapping in (*self._idle, *self._returned))

    def allocate(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, byte_count: int, lead_bytes: int = 0
    ) -> Tensor:
        """Allocate an uninitialised CPU tensor at the start of its storage of ``byte_count`` bytes.

        A page begins ``lead_bytes`` (less than a page) after the start of the tensor.
        """
        if lead_bytes == 0 and byte_count % ALIGNMENT_BYTES == 0:
            tensor = allocate_on_pages(size, stride, dtype, byte_count)
            if tensor is not None:
                return tensor
        skip_bytes = -lead_bytes % ALIGNMENT_BYTES
        block = allocate_block(skip_bytes + byte_count)
        if block is not None:
            memory = RawMemory.from_address(block.data_ptr() + skip_bytes)
            memory.lease = block
        else:
            with self._lock:
                self._collect()
                mapping = self._take(round_up(skip_bytes + byte_count))
                self._trim(self._idle_limit_bytes)
            memory = RawMemory.from_address(mapping.address + skip_bytes)
            memory.lease = _Lease(mapping, self._returned)
        elements = torch.frombuffer(memory, dtype=dtype, count=byte_count // dtype.itemsize)
        return _torch_private.reinterpret(elements, size, stride)

    def release_idle(self) -> None:
        """Return unused mappings to the system. Does nothing in a signal handler that has interrupted an allocation."""
        if (self._idle or self._returned) and not is_mine(self._lock):
            with self._lock:
                self._collect()
                self._trim(0)

    def _take(self, size_bytes: int) -> _Mapping:
        """Take the smallest unused mapping that fits, the most recently used of several; else create one."""
        fitting = [
            mapping for mapping in reversed(self._idle) if size_bytes <= mapping.size_bytes <= FIT_RATIO * size_bytes
        ]
        if not fitting:
            return _Mapping(size_bytes)
        mapping = min(fitting, key=lambda mapping: mapping.size_bytes)
        self._idle.remove(mapping)
        return mapping

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())

    def _trim(self, left_bytes: int) -> None:
        """Free unused mappings until at most ``left_bytes`` are left. Keeps the most recently used ones, which fit the
        next tensors best."""
        idle_bytes = sum(mapping.size_bytes for mapping in self._idle)
        while idle_bytes > left_bytes:
            idle_bytes -= self._idle.pop(0).size_bytes
