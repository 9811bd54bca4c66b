"""The measured rates of the disk of one engine, averaged per direction.

Threads share the disk: by Little's law, each of n concurrent transfers takes n times as long as it would take alone. So
every transfer measures the rate of the disk, regardless of the others.

Requests that one thread submits to the kernel form a queue. Their order is the disk's choice, and requests that began
together often end together. So one of them measures nothing. But a *period* in which the queue is never empty does: the
bytes that ended in it, by its length. It ends with the queue, or when more bytes have ended than are left in the queue.

There are two exceptions:

* While both directions are busy, they share the disk; such a transfer or period measures nothing.
* Fewer transfers than it takes to keep the disk busy give only a lower bound, and so does an end that was noticed late,
  unless the queue kept the disk busy. A bound above the current rate still counts: otherwise a rate that was once
  measured too low would remain, because tensors that stay in memory measure nothing.

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


Transfer = tuple[Direction, float, int, bool, int]
"""A transfer that has begun: its direction; when it began; how many transfers of that direction were in flight then,
including itself; whether the other direction was idle; and its bytes if it is in the queue, otherwise 0. A plain tuple:
a class would cost more than what is done with it."""

BUSY_BYTES = 4 << 20
"""One request of this size keeps the disk busy. A guess."""


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


class _Period:
    """A time in which a queue is never empty."""

    __slots__ = ("count", "ended_bytes", "is_disturbed", "start_s")

    def __init__(self) -> None:
        self.restart(0.0)

    def restart(self, start_s: float) -> None:
        self.start_s = start_s
        self.is_disturbed = False
        """The other direction was busy too, or a request failed, so it measures nothing."""
        self.ended_bytes = self.count = 0


class Traffic:
    """The transfers in flight to and from one file, and how fast transfers have been so far."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.meters = (RateMeter(), RateMeter())
        """By :class:`Direction`."""
        self._under_way = [0, 0]
        self._queued_bytes = [0, 0]
        self._periods = (_Period(), _Period())

    def begin(self, direction: Direction, queued_bytes: int = 0) -> Transfer:
        """``queued_bytes`` is the length of a request in the queue; otherwise 0."""
        under_way, start_s = self._under_way, self.clock()
        under_way[direction] += 1
        alone = not under_way[1 - direction]
        if queued_bytes:
            if not self._queued_bytes[direction]:
                self._periods[direction].restart(start_s)
            self._queued_bytes[direction] += queued_bytes
        if not alone:
            for period in self._periods:
                period.is_disturbed = True
        return direction, start_s, under_way[direction], alone, queued_bytes

    def end(self, transfer: Transfer, length_bytes: int, end_s: float, *, busy_with: int = 1) -> None:
        """``transfer`` ended at ``end_s`` after ``length_bytes``, 0 after an error.

        ``busy_with`` transfers keep the disk busy, if it is not in the queue.
        """
        direction, start_s, began_with, alone, queued_bytes = transfer
        under_way = self._under_way[direction]
        self._under_way[direction] -= 1
        if queued_bytes:
            period = self._periods[direction]
            self._queued_bytes[direction] -= queued_bytes
            period.ended_bytes += length_bytes
            period.count += 1
            period.is_disturbed |= length_bytes != queued_bytes
        elif length_bytes and alone and not self._under_way[1 - direction]:
            busy = min(began_with, under_way) >= busy_with
            self.meters[direction].note(length_bytes, end_s - start_s, (began_with + under_way) / 2, busy=busy)

    def measure(self, end_s: float, *, is_late: bool) -> None:
        """Measure the queues, after all requests that have ended by ``end_s`` were passed to :meth:`end`.

        ``is_late``: they may have ended earlier.
        """
        for direction, period in enumerate(self._periods):
            left_bytes = self._queued_bytes[direction]
            if period.is_disturbed:
                if not self._under_way[1 - direction]:
                    period.restart(end_s)
            elif period.ended_bytes > left_bytes:
                is_busy = left_bytes or (not is_late and (period.ended_bytes >= BUSY_BYTES or period.count > 1))
                self.meters[direction].note(period.ended_bytes, end_s - period.start_s, 1, busy=bool(is_busy))
                period.restart(end_s)
