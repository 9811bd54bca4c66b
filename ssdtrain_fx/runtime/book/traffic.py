"""The measured rates of the disk of one engine, averaged per direction.

Threads share the disk: while n transfers are in flight, each gets an n-th of it. A transfer therefore measures its
bytes by its *share* of the time, the integral of 1/n.

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


Transfer = tuple[Direction, float, int, int | None, int]
"""A transfer that has begun: its direction; what the share of a transfer was until then, which began with the first;
how many transfers of that direction were in flight then, including itself; how many the other direction had begun, or
None if one of them was in flight; and its bytes if it is in the queue, otherwise 0. A plain tuple: a class would cost
more than what is done with it."""

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

    def note(self, length_bytes: int, duration_s: float, *, busy: bool) -> None:
        """Add bytes that the disk took ``duration_s`` to move, doing nothing else.

        ``busy`` says whether it was busy all the time.
        """
        sample = duration_s / length_bytes
        last = self.s_per_byte
        if sample <= 0 or (not busy and (not last or sample > last)):
            return
        self._seen_bytes += length_bytes
        weight = max(1 - 0.5 ** (length_bytes / HALF_LIFE_BYTES), length_bytes / self._seen_bytes)
        self.s_per_byte = last + weight * (sample - last) if last else sample


class _Sharing:
    """How the transfers in flight in one direction share the disk."""

    __slots__ = ("begun", "share_s", "under_way", "updated_s")

    def __init__(self) -> None:
        self.begun = self.under_way = 0
        self.share_s = self.updated_s = 0.0

    def update(self, now_s: float) -> None:
        """Call this before ``under_way`` changes, and before ``share_s`` is read."""
        if now_s > self.updated_s:  # threads may come late with when a transfer ended
            if self.under_way:
                self.share_s += (now_s - self.updated_s) / self.under_way
            self.updated_s = now_s


class _Period:
    """A time in which a queue is never empty."""

    __slots__ = ("count", "ended_bytes", "is_disturbed", "start_s", "unsettled_bytes")

    def __init__(self) -> None:
        self.restart(0.0)

    def restart(self, start_s: float, unsettled_bytes: int = 0) -> None:
        self.start_s = start_s
        self.is_disturbed = False
        """The other direction was busy too, or a request failed, so it measures nothing."""
        self.unsettled_bytes = unsettled_bytes
        """So many bytes have to end before it begins: the disk may have served most of them before ``start_s``."""
        self.ended_bytes = self.count = 0


class Traffic:
    """The transfers in flight to and from one file, and how fast transfers have been so far."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.meters = (RateMeter(), RateMeter())
        """By :class:`Direction`."""
        self._sharings = (_Sharing(), _Sharing())
        self._queued_bytes = [0, 0]
        self._periods = (_Period(), _Period())

    def begin(self, direction: Direction, queued_bytes: int = 0, start_s: float | None = None) -> Transfer:
        """``queued_bytes`` is the length of a request in the queue; otherwise 0. It began at ``start_s``; None: now."""
        sharing, other = self._sharings[direction], self._sharings[1 - direction]
        if start_s is None:
            start_s = self.clock()
        sharing.update(start_s)
        sharing.under_way += 1
        sharing.begun += 1
        if queued_bytes:
            if not self._queued_bytes[direction]:
                self._periods[direction].restart(start_s)
            self._queued_bytes[direction] += queued_bytes
        if other.under_way:
            for period in self._periods:
                period.is_disturbed = True
        return direction, sharing.share_s, sharing.under_way, None if other.under_way else other.begun, queued_bytes

    def end(self, transfer: Transfer, length_bytes: int, end_s: float, *, busy_with: int = 1) -> None:
        """``transfer`` ended at ``end_s`` after ``length_bytes``, 0 after an error.

        ``busy_with`` transfers keep the disk busy, if it is not in the queue.
        """
        direction, began_share_s, began_with, others_begun, queued_bytes = transfer
        sharing = self._sharings[direction]
        sharing.update(end_s)
        busy = min(began_with, sharing.under_way) >= busy_with
        sharing.under_way -= 1
        if queued_bytes:
            period = self._periods[direction]
            self._queued_bytes[direction] -= queued_bytes
            period.is_disturbed |= length_bytes != queued_bytes
            if period.unsettled_bytes > 0:
                period.unsettled_bytes -= queued_bytes
                period.start_s = end_s
            else:
                period.ended_bytes += length_bytes
                period.count += 1
        elif length_bytes and others_begun == self._sharings[1 - direction].begun:
            self.meters[direction].note(length_bytes, sharing.share_s - began_share_s, busy=busy)

    def measure(self, end_s: float, *, is_late: bool) -> None:
        """Measure the queues, after all requests that have ended by ``end_s`` were passed to :meth:`end`.

        ``is_late``: they may have ended earlier.
        """
        for direction, period in enumerate(self._periods):
            left_bytes = self._queued_bytes[direction]
            if period.is_disturbed:
                if not self._sharings[1 - direction].under_way:
                    period.restart(end_s, left_bytes)
            elif period.ended_bytes > left_bytes:
                is_busy = left_bytes or (not is_late and (period.ended_bytes >= BUSY_BYTES or period.count > 1))
                self.meters[direction].note(period.ended_bytes, end_s - period.start_s, busy=bool(is_busy))
                period.restart(end_s)
