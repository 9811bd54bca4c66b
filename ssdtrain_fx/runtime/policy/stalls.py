"""How long the training thread waits for transfers: the predicted stall, the actual stall, and when it gives up.

The slowdown of the plan already includes planned stalls. Unplanned stalls are charged to the account of
:mod:`ssdtrain_fx.runtime.book.admission`: the predicted part when the tensor is offloaded, the rest when the stall
ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from ssdtrain_fx.errors import InternalError, StalledDiskError
from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Entry, Fill
from ssdtrain_fx.runtime.book.traffic import Direction
from ssdtrain_fx.runtime.memory.movers import Mark, Mover
from ssdtrain_fx.runtime.policy.patience import BLOCK_S, Clock, Patience
from ssdtrain_fx.runtime.policy.room import Room
from ssdtrain_fx.runtime.step_clock import step_clock


class Lane(Protocol):
    """The part of :class:`ssdtrain_fx.runtime.lanes.lane.Lane` that waiting needs."""

    staging_bytes: int

    @property
    def mover(self) -> Mover: ...

    def hurry(self, fill: Fill) -> None: ...

    def wait_for_progress(self, seen: int, timeout_s: float) -> bool: ...


LOOK_S = 0.001
"""How often a waiting host looks whether its device still computes. Stalls are counted as so much shorter at most."""


class _Device:
    """How long a device has had nothing to do since its host began to wait.

    The host is ahead of the device: while it waits, the device computes what was enqueued before. Only what comes after
    that makes the step longer, and counts as a stall. On a CPU, where there is no mark, all of it does.
    """

    def __init__(self, mark: Mark, clock: Clock) -> None:
        """``mark`` is the last thing that was enqueued."""
        self._mark = mark
        self._clock = clock
        self._began_s = clock()
        self._busy_s = 0.0
        """For how long it had something to do."""

    def look(self) -> None:
        """Ask the device. Call it without the lock."""
        if self._mark is not None:
            self._busy_s = self._clock() - self._began_s
            if self._mark.query():
                self._mark = None

    @property
    def is_busy(self) -> bool:
        """When it was last asked."""
        return self._mark is not None

    def stall_s(self, passed_s: float) -> float:
        """Of the ``passed_s`` for which the host has waited: how long the device had nothing to do."""
        return 0.0 if self._mark is not None else max(0.0, passed_s - self._busy_s)

    def limit_s(self, left_s: float) -> float:
        """How long to wait until the next look. The caller waits for ``left_s`` if the device has nothing to do."""
        return left_s if self._mark is None else LOOK_S


class Stalls:
    """The stalls of one engine. Methods whose name begins with "wait" are called without the ledger's lock, the others
    need it. Why: see :mod:`ssdtrain_fx.runtime.book.changes`."""

    def __init__(
        self, ledger: Ledger, timeout_s: float | None, clock: Clock, room: Room, describe: Callable[[], str]
    ) -> None:
        """``timeout_s`` is ``io_timeout_s``; ``room`` says which tensors may stay, and ``describe`` what is queued and
        in flight."""
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._clock = clock
        self._room = room
        self._describe = describe

    def is_ahead(self, entry: Entry) -> bool:
        """Whether the host is ahead of the device of ``entry``, which is new. Asks the device: call it without the
        lock."""
        return self._ledger.admission.is_limited and entry.ready is not None and not entry.ready.query()

    def predict_s(
        self, lane: Lane, entry: Entry, out_s: float | None, back_s: float | None, *, is_ahead: bool = False
    ) -> float:
        """How much longer than planned a release and a wait would stall. ``is_ahead`` is :meth:`is_ahead`."""
        meters, counters = self._ledger.traffic.meters, self._ledger.counters
        stall_s = 0.0
        if out_s is not None:
            staging_bytes = 0 if entry.from_source else lane.staging_bytes
            queued_bytes = counters.unwritten_bytes
            if is_ahead:
                # What the device has not made yet comes as slowly as this tensor, and the disk works until then. If it
                # does not keep up, the stall itself is charged.
                queued_bytes -= counters.unmade_bytes
            unstaged_bytes = queued_bytes + counters.held_bytes + entry.byte_count - staging_bytes
            late_s = unstaged_bytes * meters[Direction.WRITE].s_per_byte - out_s
            if late_s > 0:
                stall_s += late_s
        if back_s is not None and not entry.host:
            late_s = entry.byte_count * meters[Direction.READ].s_per_byte - back_s
            if late_s > 0:
                stall_s += late_s
        return stall_s

    def wait_until_copied(self, lane_of: Callable[[Entry], Lane], entry: Entry, awaited: Sequence[Entry]) -> None:
        """Wait until the ``awaited`` have left their tensors. If that takes too long, ``entry`` stays in memory,
        provided there is room."""
        ledger = self._ledger
        with ledger.lock, ledger.change:
            start_s = self._clock()
            limit_s = entry.prepaid_s + ledger.admission.patience_s()
            patience = self.patience()
        device = self._watch(lane_of(entry), entry)
        while True:
            device.look()
            with ledger.lock, ledger.change:
                seen = ledger.progress.count
                passed_s = self._clock() - start_s
                stall_s = device.stall_s(passed_s)
                if entry.fills or entry.ahead is not None:  # a reload that comes before the end of the release
                    limit_s = math.inf
                is_late = not device.is_busy and stall_s >= limit_s
                slow = next((other for other in awaited if other.uncopied), None)
                if slow is not None and is_late and entry.uncopied and not self._room.has(entry):
                    limit_s, is_late = math.inf, False
                if slow is None or is_late:
                    if slow is not None and entry.uncopied:
                        ledger.stay(entry)
                    ledger.counters.release_stall_s += passed_s
                    self.pay(entry, stall_s, passed_s)
                    return
            self.wait_for_progress(lane_of(slow), entry, patience, seen, device.limit_s(limit_s - stall_s))

    def wait_until_filled(self, lane: Lane, fill: Fill) -> Exception | None:
        """Wait until the target of ``fill`` holds its bytes. If it never will, the error is returned."""
        ledger = self._ledger
        with ledger.lock, ledger.change:
            lane.hurry(fill)
            start_s = self._clock()
            patience = self.patience()
        device = self._watch(lane, fill.entry)
        stalled: StalledDiskError | None = None
        while True:
            device.look()
            with ledger.lock, ledger.change:
                seen = ledger.progress.count
                if not fill.unissued or stalled is not None:
                    passed_s = self._clock() - start_s
                    ledger.counters.wait_stall_s += passed_s
                    self.pay(fill.entry, device.stall_s(passed_s), passed_s)
                    return fill.error if stalled is None else stalled
            try:
                self.wait_for_progress(lane, fill.entry, patience, seen, device.limit_s(BLOCK_S))
            except StalledDiskError as error:
                stalled = error.with_traceback(None)

    def _watch(self, lane: Lane, entry: Entry) -> _Device:
        """Begin to watch the device of ``entry``, whose host is about to wait. Nobody asks if stalls are unlimited."""
        is_limited = self._ledger.admission.is_limited
        return _Device(lane.mover.mark(entry.device) if is_limited else None, self._clock)

    def pay(self, entry: Entry, stall_s: float, passed_s: float) -> None:
        """Charge a stall of ``entry`` that has ended, less what was planned or already charged. The host has waited for
        ``passed_s``."""
        ledger = self._ledger
        step_clock.waited_s += passed_s
        if ledger.trace is not None:
            ledger.trace.add_stall(entry, passed_s)
        predicted_s = min(entry.prepaid_s, stall_s)
        entry.prepaid_s -= predicted_s
        ledger.admission.charge(stall_s - predicted_s)

    def wait_for_progress(
        self, lane: Lane, entry: Entry, patience: Patience, seen: int, limit_s: float = BLOCK_S
    ) -> None:
        """Block until something has changed since the caller ``seen`` the count of ``ledger.progress``, or a limit is
        reached. Raises StalledDiskError."""
        ledger = self._ledger
        with ledger.lock:
            ledger.check_usable(entry.name)
            if seen != ledger.progress.count:
                return  # what the caller waits for may be there by now, even if the time is over
            left_s = self.check(patience, repr(entry.name))
        if lane.wait_for_progress(seen, min(BLOCK_S, left_s, limit_s)):
            return
        with ledger.lock:
            if seen == ledger.progress.count:
                raise InternalError(f"{entry.name!r}: there is no transfer in flight to wait for")

    def patience(self, timeout_s: float = math.inf) -> Patience:
        """The shorter of ``timeout_s`` and the timeout that the user chose."""
        chosen_s = self._timeout_s
        return Patience(self._ledger, timeout_s if chosen_s is None else min(timeout_s, chosen_s), self._clock)

    def check(self, patience: Patience, awaited: str) -> float:
        """How long to wait for ``awaited`` at most. Raises StalledDiskError if no time is left."""
        left_s = patience.left_s()
        if not left_s:
            raise StalledDiskError(
                f"no transfer has finished for {self._timeout_s} s while waiting for {awaited}: the disk hangs, or "
                f"io_timeout_s is too short for it. {self._describe()}"
            )
        return left_s
