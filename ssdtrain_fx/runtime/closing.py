"""The end of an engine.

Everything that can be closed is closed, whatever raises. Closing may be called again until it has succeeded: after an
interrupt, an error, or a disk that hung.
"""

from __future__ import annotations

import functools
import logging
import threading

from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.lanes.open_lanes import Lanes
from ssdtrain_fx.runtime.policy.stalls import Stalls
from ssdtrain_fx.runtime.shield import shielded

log = logging.getLogger(__name__)

_abandoned: list[Closing] = []
"""Of engines that were closed while their disk hung. Threads or the kernel may still use their memory."""

AFTER_FAILURE_S = 1.0
"""How long closing waits for the next transfer to end after an unexpected exception, such as that of a device that
answers no more."""


class Closing:
    """Closes one engine: its lanes, its ledger, its file."""

    def __init__(self, ledger: Ledger, lanes: Lanes, stalls: Stalls) -> None:
        self.is_done = False
        """The engine holds nothing any more."""
        self._ledger = ledger
        self._lanes = lanes
        self._stalls = stalls
        self._lock = threading.Lock()

    def close(self, timeout_s: float) -> None:
        """Close, or go on with closing. See :meth:`ssdtrain_fx.runtime.engine.Engine.close`."""
        shielded(functools.partial(self._close, timeout_s))

    def _close(self, timeout_s: float) -> None:
        ledger = self._ledger
        if self.is_done:
            return
        with ledger.lock:
            ledger.change.check()
            ledger.closed = True
            ledger.progress.notify_all()
        if not self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            return  # another thread has closed this engine for as long as this one may wait
        try:
            self._close_parts(timeout_s)
        finally:
            self._lock.release()

    def _close_parts(self, timeout_s: float) -> None:
        ledger = self._ledger
        failure = ledger.change.failure
        if failure is not None and not failure.is_interrupt:
            timeout_s = min(timeout_s, AFTER_FAILURE_S)
        lanes = self._lanes.opened()
        errors: list[BaseException] = []
        are_closed = True
        for lane in lanes:
            try:
                are_closed &= lane.close(self._stalls.patience(timeout_s))
            except BaseException as error:
                errors.append(error)
        with ledger.lock:
            left_over = self._lanes.describe_transfers()
            ledger.discard_entries(can_be_in_flight=not all(lane.has_stopped for lane in lanes))
        ledger.tidy()
        if all(lane.has_stopped for lane in lanes):
            ledger.file.close()
        elif self not in _abandoned:
            _abandoned.append(self)
            log.error(
                "closed an engine although its transfers do not finish. Its memory and its file stay allocated until "
                "the process ends. %s",
                left_over,
            )
        if errors:
            raise errors.pop(0)
        if are_closed:
            self.is_done = True
            if self in _abandoned:
                _abandoned.remove(self)

    def forget_after_fork(self) -> None:
        """In a forked child: leave everything to the parent, in whatever state it was at the fork."""
        self.is_done = True
        self._ledger.forget_after_fork()
