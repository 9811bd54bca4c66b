"""Allocation of spill slots: byte ranges of one file.

Why: reusing the slots of one file needs no file creation and no unlink per tensor, and the size of the file stays
bounded by the largest number of bytes that were offloaded at one time.

Guarantees:

* A slot begins and ends on a multiple of :data:`ALIGNMENT_BYTES`, as direct I/O requires.
* Two slots in use never overlap.
* First fit, lowest offset first: the same calls give the same slots.
* Once every slot is freed, there are no holes left and ``end_bytes`` is 0.

Pure bookkeeping: no I/O, no locks. The engine calls it with its lock held.
"""

from __future__ import annotations

from typing import NamedTuple

from ssdtrain_fx.runtime.alignment import round_up


class Slot(NamedTuple):
    """The half-open byte range ``[offset_bytes, end_bytes)`` of the file."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


class SlotAllocator:
    """First fit with coalescing, in a space that grows when no hole fits."""

    def __init__(self) -> None:
        self._free: list[Slot] = []  # sorted by offset; no two touch; none touches end_bytes
        self._in_use: dict[int, Slot] = {}
        self.end_bytes = 0
        self.bytes_in_use = 0

    @property
    def slots_in_use(self) -> int:
        return len(self._in_use)

    @property
    def free_ranges(self) -> tuple[Slot, ...]:
        """Holes below ``end_bytes``, by offset."""
        return tuple(self._free)

    def allocate(self, size_bytes: int) -> Slot:
        """Allocate a slot of ``size_bytes``, rounded up to the alignment."""
        if size_bytes <= 0:
            raise ValueError(f"a slot holds at least one byte, got {size_bytes}")
        size_bytes = round_up(size_bytes)
        for index, hole in enumerate(self._free):
            if hole.size_bytes < size_bytes:
                continue
            offset_bytes = hole.offset_bytes
            if hole.size_bytes == size_bytes:
                del self._free[index]
            else:
                self._free[index] = Slot(offset_bytes + size_bytes, hole.size_bytes - size_bytes)
            return self._take(offset_bytes, size_bytes)
        offset_bytes = self.end_bytes
        self.end_bytes = offset_bytes + size_bytes
        return self._take(offset_bytes, size_bytes)

    def allocate_tail(self, from_bytes: int, until_bytes: int) -> Slot | None:
        """Allocate what is free at the end of ``[from_bytes, until_bytes)``. Returns None if nothing is.

        This keeps other slots out of the tail of the file while it is cut off.
        """
        offset_bytes = max(from_bytes, self.end_bytes)
        if until_bytes <= offset_bytes:
            return None
        if offset_bytes > self.end_bytes:
            self._free.append(Slot(self.end_bytes, offset_bytes - self.end_bytes))
        self.end_bytes = until_bytes
        return self._take(offset_bytes, until_bytes - offset_bytes)

    def free(self, slot: Slot) -> None:
        """Free ``slot`` and merge it with the free ranges that it touches."""
        if self._in_use.pop(slot.offset_bytes, None) != slot:
            raise ValueError(f"{slot} is not in use")
        self.bytes_in_use -= slot.size_bytes
        index = self._first_free_after(slot.offset_bytes)
        start, end = slot.offset_bytes, slot.end_bytes
        if index < len(self._free) and self._free[index].offset_bytes == end:
            end = self._free.pop(index).end_bytes
        if index > 0 and self._free[index - 1].end_bytes == start:
            index -= 1
            start = self._free.pop(index).offset_bytes
        if end == self.end_bytes:
            self.end_bytes = start
        else:
            self._free.insert(index, Slot(start, end - start))

    def _take(self, offset_bytes: int, size_bytes: int) -> Slot:
        slot = self._in_use[offset_bytes] = Slot(offset_bytes, size_bytes)
        self.bytes_in_use += size_bytes
        return slot

    def _first_free_after(self, offset_bytes: int) -> int:
        low, high = 0, len(self._free)
        while low < high:
            middle = (low + high) // 2
            if self._free[middle].offset_bytes < offset_bytes:
                low = middle + 1
            else:
                high = middle
        return low
