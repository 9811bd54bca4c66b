"""Memory of tensors that the disk reads into: on huge pages, and used again.

Why huge pages: direct I/O pins every page it reads into, and 512 small ones cost more than the transfer of 2 MiB itself
(figures in :mod:`ssdtrain_fx.runtime.memory.staging`). Why used again: the first touch of fresh memory is as dear as a copy,
and dearer by far where the host of a virtual machine has taken freed memory away.

Where the heap is glibc's, it keeps what activations leave (:mod:`ssdtrain_fx.runtime.memory.heap`), and tensors come from it:
what backward has freed is what the next reload takes, and nothing lies idle for reloads alone. Larger tensors, and all
where the heap is another one, get mappings of their own, which are kept for the next tensor of about that size.

Guarantees:

* A tensor owns whole pages: nobody else's data lies on them.
* Memory is given out again only after the last tensor on its storage has died.
* Of the mappings: after an allocation, those that lie idle hold at most what its caller allows, or else
  ``idle_bytes``; after :meth:`TensorMemory.release_idle` there are none.
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

from ssdtrain_fx import _torch_private
from ssdtrain_fx.runtime.alignment import ALIGNMENT_BYTES, round_up
from ssdtrain_fx.runtime.memory.staging import HUGE_PAGE_BYTES

IDLE_BYTES = 96 << 20
"""What backward of one layer reads in GPT-2 of 12 layers, hidden 384, batch 8 x 512: tensors of 24, 18 and 6 MiB."""
FIT_RATIO = 1.25
"""How much larger than a tensor the mapping may be that it takes over."""
HEAP_SPARE_BYTES = 3 * ALIGNMENT_BYTES
"""To the next page, in it to where the tensor begins, and behind the tensor to the end of its last page."""


class _Mapping:
    """Memory from the system, which takes it back when this dies. It comes with the first touch."""

    __slots__ = ("_memory", "_skip_bytes", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        is_huge = size_bytes >= HUGE_PAGE_BYTES  # so it begins with a huge page
        spare_bytes = HUGE_PAGE_BYTES if is_huge else 0
        self._memory = mmap.mmap(-1, size_bytes + spare_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._skip_bytes = -address % HUGE_PAGE_BYTES if is_huge else 0
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    def array(self, array_type: Any, lead_bytes: int) -> Any:
        """A ctypes array over the memory from ``lead_bytes`` on. It keeps the mapping alive."""
        return array_type.from_buffer(self._memory, self._skip_bytes + lead_bytes)


class _Lease:
    """Dies with the storage of a tensor. May die anywhere, so it takes no lock."""

    __slots__ = ("_mapping", "_returned")

    def __init__(self, mapping: _Mapping, returned: collections.deque[_Mapping]) -> None:
        self._mapping = mapping
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._mapping)


class TensorMemory:
    """All methods may be called from any thread."""

    def __init__(self, idle_bytes: int = IDLE_BYTES, *, heap_below_bytes: int = 0) -> None:
        """Tensors of less than ``heap_below_bytes`` come from the heap."""
        self._heap_below_bytes = heap_below_bytes
        self._idle_limit_bytes = idle_bytes
        self._lock = threading.Lock()
        self._idle: list[_Mapping] = []
        """The one that has been idle for longest first."""
        self._returned: collections.deque[_Mapping] = collections.deque()
        self._array_types: dict[int, Any] = {}

    @property
    def idle_bytes(self) -> int:
        """What lies in mappings without a tensor."""
        with self._lock:
            self._collect()
            return sum(mapping.size_bytes for mapping in self._idle)

    def allocate(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        byte_count: int,
        lead_bytes: int = 0,
        idle_bytes: int | None = None,
    ) -> Tensor:
        """A CPU tensor at the start of its storage of ``byte_count`` bytes. Not initialised.

        Its byte ``lead_bytes``, less than a page, is at the start of a page. ``idle_bytes``, where given, is the limit
        for what lies idle behind it.
        """
        skip_bytes = -lead_bytes % ALIGNMENT_BYTES
        array_type = self._array_types.get(byte_count)
        if array_type is None:
            array_type = self._array_types[byte_count] = ctypes.c_char * byte_count
        left_bytes = self._idle_limit_bytes if idle_bytes is None else idle_bytes
        if self.uses_heap(byte_count):
            if self._idle or self._returned:
                with self._lock:
                    self._collect()
                    self._trim(left_bytes)
            heap = torch.UntypedStorage(byte_count + HEAP_SPARE_BYTES)  # no tensor: torch may be told to fill these
            array: Any = array_type.from_address(round_up(heap.data_ptr()) + skip_bytes)
            array.lease = heap
        else:
            with self._lock:
                self._collect()
                mapping = self._take(round_up(skip_bytes + byte_count))
                self._trim(left_bytes)
            array = mapping.array(array_type, skip_bytes)
            array.lease = _Lease(mapping, self._returned)
        return _torch_private.reinterpret(torch.frombuffer(array, dtype=dtype), size, stride)

    def uses_heap(self, byte_count: int) -> bool:
        """Whether a tensor of so many bytes lies on the heap."""
        return byte_count + HEAP_SPARE_BYTES < self._heap_below_bytes

    def release_idle(self) -> None:
        """Give what is idle back to the system."""
        if self._idle or self._returned:
            with self._lock:
                self._collect()
                self._trim(0)

    def _take(self, size_bytes: int) -> _Mapping:
        """The smallest that fits and lies idle, of several the one used last; else a new one."""
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
        """Let no more than ``left_bytes`` lie idle: the last ones used, which fit best what comes next."""
        idle_bytes = sum(mapping.size_bytes for mapping in self._idle)
        while idle_bytes > left_bytes:
            idle_bytes -= self._idle.pop(0).size_bytes
