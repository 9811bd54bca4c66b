"""How fast the disk of one engine really is: transfers timed one by one, averaged per direction.

By Little's law, of n transfers that are under way together each lasts n times as long as it would take the disk alone.
So every transfer tells the rate of the disk, whatever the others are doing, with two exceptions:

* While both directions are busy they share the disk; such a transfer tells nothing.
* Fewer transfers than it takes to keep the disk busy give a lower bound only.

The caller holds the engine's lock.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

HALF_LIFE_BYTES = 64 << 20
"""A transfer counts half when that many bytes have followed it. A guess."""


class Direction(enum.IntEnum):
    """An index, because hashing an Enum costs more than all else that is done per transfer."""

    WRITE = 0
    READ = 1


class Transfer(NamedTuple):
    """One that has begun."""

    direction: Direction
    start_s: float
    under_way: int
    """Transfers of this direction, this one included, when it began."""
    alone: bool
    """The other direction rested when it began."""


class RateMeter:
    """Bytes per second in one direction."""

    def __init__(self) -> None:
        self._s_per_byte: float | None = None
        self._seen_bytes = 0

    @property
    def bytes_per_s(self) -> float | None:
        """None until a transfer has told."""
        return None if self._s_per_byte is None else 1 / self._s_per_byte

    def transfer_s(self, size_bytes: int) -> float:
        """How long ``size_bytes`` take; 0 while nothing is known."""
        return 0.0 if self._s_per_byte is None else size_bytes * self._s_per_byte

    def note(self, length_bytes: int, duration_s: float, under_way: float, *, busy: bool) -> None:
        """``under_way`` transfers, on average, shared the disk for ``duration_s``, and it was ``busy`` with them."""
        sample = duration_s / (length_bytes * under_way)
        last = self._s_per_byte
        if sample <= 0 or (not busy and (last is None or sample > last)):
            return
        self._seen_bytes += length_bytes
        weight = max(1 - 0.5 ** (length_bytes / HALF_LIFE_BYTES), length_bytes / self._seen_bytes)
        self._s_per_byte = sample if last is None else last + weight * (sample - last)


class Traffic:
    """What is under way to and from one file, and how fast it was so far."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.meters = (RateMeter(), RateMeter())
        """By :class:`Direction`."""
        self._under_way = [0, 0]

    def begin(self, direction: Direction) -> Transfer:
        under_way = self._under_way
        under_way[direction] += 1
        return Transfer(direction, self.clock(), under_way[direction], not under_way[1 - direction])

    def end(self, transfer: Transfer, length_bytes: int, end_s: float, *, busy_with: int) -> None:
        """``length_bytes`` were moved until ``end_s``, 0 after an error. ``busy_with`` transfers keep the disk busy."""
        direction = transfer.direction
        under_way = self._under_way[direction]
        self._under_way[direction] -= 1
        if length_bytes and transfer.alone and not self._under_way[1 - direction]:
            self.meters[direction].note(
                length_bytes,
                end_s - transfer.start_s,
                (transfer.under_way + under_way) / 2,
                busy=min(transfer.under_way, under_way) >= busy_with,
            )
