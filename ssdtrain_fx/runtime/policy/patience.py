"""How long to wait for a disk that does not answer.

Why by progress and not by the length of one wait: behind a long queue, a wait on a slow disk may take long, and that is
no error. A disk on which nothing comes to an end is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ssdtrain_fx.runtime.book.ledger import Ledger

Clock = Callable[[], float]

BLOCK_S = 0.5
"""Who waits looks up this often whether the engine was closed."""


class Patience:
    """Runs out when no transfer of an engine has ended for ``timeout_s``; None: never. Used with the ledger's lock."""

    def __init__(self, ledger: Ledger, timeout_s: float | None, clock: Clock) -> None:
        self._ledger = ledger
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._clock = clock
        self._ended = ledger.ended_transfers
        self._since_s = clock()

    def left_s(self) -> float:
        """Seconds until it runs out; 0 when it has."""
        now_s = self._clock()
        if self._ended != self._ledger.ended_transfers:
            self._ended, self._since_s = self._ledger.ended_transfers, now_s
        return max(0.0, self._since_s + self._timeout_s - now_s)
