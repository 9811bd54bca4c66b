"""How long to wait for a disk that does not answer.

The limit is on the time without progress, not on the length of one wait. A long wait is no error if the disk is slow
and the queue is long. A disk that finishes no transfer is an error. A time in which the process was suspended says
nothing about the disk, so it does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ssdtrain_fx.runtime.book.ledger import Ledger

Clock = Callable[[], float]

BLOCK_S = 0.5
"""How often a waiting thread checks whether the engine was closed, and how long it has waited."""


class Patience:
    """Runs out when no transfer of an engine has finished for ``timeout_s``; None: never. Needs the ledger's lock."""

    def __init__(self, ledger: Ledger, timeout_s: float | None, clock: Clock) -> None:
        self._ledger = ledger
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._clock = clock
        self._ended = ledger.ended_transfers
        self._seen_s = clock()
        self._passed_s = 0.0

    def left_s(self) -> float:
        """Seconds until it runs out; 0 when it has.

        Of the time since the last call, at most twice ``BLOCK_S`` counts: the process was suspended for the rest of it.
        """
        now_s = self._clock()
        if self._ended != self._ledger.ended_transfers:
            self._ended, self._passed_s = self._ledger.ended_transfers, 0.0
        else:
            self._passed_s += min(now_s - self._seen_s, 2 * BLOCK_S)
        self._seen_s = now_s
        return max(0.0, self._timeout_s - self._passed_s)
