"""Memory of tensors that the disk reads into: on huge pages, and used again.

Why huge pages: direct I/O pins every page it reads into, and 512 small ones cost more than the transfer of 2 MiB itself
(figures in :mod:`ssdtrain_fx.runtime.staging`). Why used again: the first touch of fresh memory is as dear as a copy,
and dearer by far where the host of a virtual machine has taken freed memory away.

Where the heap is glibc's, it keeps what activations leave (:mod:`ssdtrain_fx.runtime.heap`), and tensors come from it:
what backward has freed is what the next reload takes, and nothing lies idle for reloads alone. Larger tensors, and all
where the heap is another one, come from ranges of addresses that are held here. One range serves tensors of all sizes:
kept apart by size, what one layer needs lies idle beside what the next one needs.

Guarantees:

* A tensor owns whole pages: nobody else's data lies on them.
* Memory is given out again only after the last tensor on its storage has died.
* Of the ranges: after an allocation, what lies idle behind the last tensor is at most what its caller allows, or else
  ``idle_bytes``; after :meth:`TensorMemory.release_idle` it is nothing.
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
from ssdtrain_fx.runtime.slots import ALIGNMENT_BYTES, Slot, SlotAllocator, round_up
from ssdtrain_fx.runtime.staging import HUGE_PAGE_BYTES

IDLE_BYTES = 96 << 20
"""What backward of one layer reads in GPT-2 of 12 layers, hidden 384, batch 8 x 512: tensors of 24, 18 and 6 MiB."""
SEGMENT_BYTES = 1 << 30
"""Address space that is taken at a time. Memory comes with the first touch."""
HEAP_SPARE_BYTES = 3 * ALIGNMENT_BYTES
"""To the next page, in it to where the tensor begins, and behind the tensor to the end of its last page."""


class _Segment:
    """A range of addresses. ``slots`` says which bytes of it belong to tensors."""

    __slots__ = ("_memory", "_skip", "size_bytes", "slots", "touched_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._skip = -ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) % HUGE_PAGE_BYTES
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.slots = SlotAllocator()
        self.touched_bytes = 0
        """Nothing behind it has memory."""

    @property
    def idle_bytes(self) -> int:
        """What can be given back while the tensors in front of it live."""
        return self.touched_bytes - self.slots.end_bytes

    def allocate(self, size_bytes: int) -> Slot | None:
        slot = self.slots.allocate_below(size_bytes, self.size_bytes)
        if slot is not None:
            self.touched_bytes = max(self.touched_bytes, slot.end_bytes)
        return slot

    def array(self, array_type: Any, slot: Slot, lead_bytes: int) -> Any:
        """A ctypes array over the memory of ``slot``, from ``lead_bytes`` on. It keeps the segment alive."""
        return array_type.from_buffer(self._memory, self._skip + slot.offset_bytes + lead_bytes)

    def give_back(self, spare_bytes: int, *, holes: bool = False) -> None:
        """Memory behind the last tensor goes back to the system, but for ``spare_bytes``, and that of the holes."""
        end_bytes = self.slots.end_bytes + spare_bytes
        self._discard(end_bytes, self.touched_bytes + HUGE_PAGE_BYTES)
        self.touched_bytes = min(self.touched_bytes, end_bytes)
        if holes:
            for hole in self.slots.free_ranges:
                self._discard(hole.offset_bytes, hole.end_bytes)

    def _discard(self, start: int, end: int) -> None:
        """The huge pages that lie in ``[start, end)`` as a whole.

        Not by MADV_FREE, which is lazier: some kernels could lose what direct I/O reads into such pages.
        """
        start = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = min(end, self.size_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, self._skip + start, end - start)


class _Lease:
    """Dies with the storage of a tensor. May die anywhere, so it takes no lock."""

    __slots__ = ("_returned", "_segment", "_slot")

    def __init__(self, segment: _Segment, slot: Slot, returned: collections.deque[tuple[_Segment, Slot]]) -> None:
        self._segment = segment
        self._slot = slot
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append((self._segment, self._slot))


class TensorMemory:
    """All methods may be called from any thread."""

    def __init__(
        self, idle_bytes: int = IDLE_BYTES, segment_bytes: int = SEGMENT_BYTES, *, heap_below_bytes: int = 0
    ) -> None:
        """Tensors of less than ``heap_below_bytes`` come from the heap."""
        self._heap_below_bytes = heap_below_bytes
        self._idle_limit_bytes = idle_bytes
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []
        self._returned: collections.deque[tuple[_Segment, Slot]] = collections.deque()
        self._may_hold_idle = False
        self._array_types: dict[int, Any] = {}

    @property
    def idle_bytes(self) -> int:
        """What lies behind the last tensor of each segment."""
        with self._lock:
            self._collect()
            return sum(segment.idle_bytes for segment in self._segments)

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
            if self._segments:
                with self._lock:
                    self._collect()
                    self._trim(left_bytes)
            heap = torch.UntypedStorage(byte_count + HEAP_SPARE_BYTES)  # no tensor: torch may be told to fill these
            array: Any = array_type.from_address(round_up(heap.data_ptr()) + skip_bytes)
            array.lease = heap
        else:
            with self._lock:
                self._collect()
                segment, slot = self._take(skip_bytes + byte_count)
                self._trim(left_bytes)
                self._may_hold_idle = True
            array = segment.array(array_type, slot, skip_bytes)
            array.lease = _Lease(segment, slot, self._returned)
        return _torch_private.reinterpret(torch.frombuffer(array, dtype=dtype), size, stride)

    def uses_heap(self, byte_count: int) -> bool:
        """Whether a tensor of so many bytes lies on the heap."""
        return byte_count + HEAP_SPARE_BYTES < self._heap_below_bytes

    def release_idle(self) -> None:
        """Give what is idle back to the system."""
        if not self._may_hold_idle:
            return
        with self._lock:
            self._collect()
            for segment in self._segments:
                segment.give_back(0, holes=True)
            self._segments = [segment for segment in self._segments if segment.slots.slots_in_use]
            self._may_hold_idle = bool(self._segments)

    def _take(self, size_bytes: int) -> tuple[_Segment, Slot]:
        for segment in self._segments:
            slot = segment.allocate(size_bytes)
            if slot is not None:
                return segment, slot
        segment = _Segment(-(-max(self._segment_bytes, size_bytes) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
        self._segments.append(segment)
        slot = segment.allocate(size_bytes)
        assert slot is not None
        return segment, slot

    def _collect(self) -> None:
        while self._returned:
            segment, slot = self._returned.popleft()
            segment.slots.free(slot)

    def _trim(self, left_bytes: int) -> None:
        """Let no more than ``left_bytes`` lie idle."""
        for segment in self._segments:
            if segment.idle_bytes > left_bytes:
                segment.give_back(left_bytes)
            left_bytes -= segment.idle_bytes
