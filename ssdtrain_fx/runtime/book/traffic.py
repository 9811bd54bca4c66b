"""The measured rates of the disk of one engine: each transfer is timed, and the rates are averaged per direction.

Threads share the disk: by Little's law, each of n concurrent transfers takes n times as long as it would take alone.
Requests that one thread submits to the kernel are served in order instead: a transfer that began after others takes as
long as all their bytes and its own bytes. So every transfer measures the rate of the disk, regardless of the others,
with two exceptions:

* While both directions are busy, they share the disk; such a transfer measures nothing.
* Fewer transfers than it takes to keep the disk busy give only a lower bound, and so does a transfer whose end was
  noticed late. A bound above the current rate still counts: otherwise a rate that was once measured too low would
  remain, because tensors that stay in memory measure nothing.

The caller holds the engine's lock.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

HALF_LIFE_BYTES = 64 << 20
"""The weight of a transfer has halved when this many bytes have followed it. A guess."""


class Direction(enum.IntEnum):
    """An index, because hashing an Enum costs more than everything else that is done per transfer."""

    WRITE = 0
    READ = 1


Transfer = tuple[Direction, float, int, bool, int, int]
"""A transfer that has begun: its direction; when it began; how many transfers of that direction were in flight then,
including itself; whether the other direction was idle; and, for a transfer that is served in order, its bytes and the
bytes of all that were in flight, including itself, otherwise 0 and 0. A plain tuple: a class would cost more than what
is done with it."""


class RateMeter:
    """Bytes per second in one direction."""

    def __init__(self) -> None:
        self.s_per_byte = 0.0
        """0 while unknown."""
        self._seen_bytes = 0

    @property
    def bytes_per_s(self) -> float | None:
        """None until a transfer was measured."""
        return 1 / self.s_per_byte if self.s_per_byte else None

    def note(self, length_bytes: int, duration_s: float, under_way: float, *, busy: bool) -> None:
        """Add a transfer that took ``duration_s`` while an average of ``under_way`` transfers shared the disk.

        ``busy`` says whether these kept the disk busy.
        """
        sample = duration_s / (length_bytes * under_way)
        last = self.s_per_byte
        if sample <= 0 or (not busy and (not last or sample > last)):
            return
        self._seen_bytes += length_bytes
        weight = max(1 - 0.5 ** (length_bytes / HALF_LIFE_BYTES), length_bytes / self._seen_bytes)
        self.s_per_byte = last + weight * (sample - last) if last else sample


class Traffic:
    """The transfers in flight to and from one file, and how fast transfers have been so far."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.meters = (RateMeter(), RateMeter())
        """By :class:`Direction`."""
        self._under_way = [0, 0]
        self._queued_bytes = [0, 0]

    def begin(self, direction: Direction, queued_bytes: int = 0) -> Transfer:
        """``queued_bytes`` is the length of a transfer that the disk serves after those in flight; otherwise 0."""
        under_way = self._under_way
        under_way[direction] += 1
        alone = not under_way[1 - direction]
        if not queued_bytes:
            return direction, self.clock(), under_way[direction], alone, 0, 0
        self._queued_bytes[direction] += queued_bytes
        return direction, self.clock(), under_way[direction], alone, queued_bytes, self._queued_bytes[direction]

    def end(self, transfer: Transfer, length_bytes: int, end_s: float, *, busy_with: float) -> None:
        """``transfer`` ended at ``end_s`` after ``length_bytes``, 0 after an error.

        ``busy_with`` transfers keep the disk busy; infinite if ``end_s`` is when the end was noticed, not when the
        bytes were moved.
        """
        direction, start_s, began_with, alone, own_bytes, queued_bytes = transfer
        under_way = self._under_way[direction]
        self._under_way[direction] -= 1
        self._queued_bytes[direction] -= own_bytes
        if length_bytes and alone and not self._under_way[1 - direction]:
            busy = min(began_with, under_way) >= busy_with
            if length_bytes == own_bytes:
                self.meters[direction].note(queued_bytes, end_s - start_s, 1, busy=busy)
            elif not own_bytes:
                self.meters[direction].note(length_bytes, end_s - start_s, (began_with + under_way) / 2, busy=busy)
