"""Decide whether a tensor may leave memory, by the time that the training thread would have to wait for it.

The plan is made once, for a disk as fast as the hardware profile says. A disk that is slower today would stall every
step. Unplanned stalls may therefore take at most a share of the time, which an account enforces::

    balance    grows by max_stall_share seconds per second, up to BALANCE_LIMIT_S
    offload    is admitted if the balance covers the stall that is predicted for it, which is deducted at once
    stall      deducts how much longer it lasted than predicted and planned for the tensor
    token dies returns what was predicted and planned but did not happen: the plan may have waited for another tensor

A full balance covers any stall, and a long stall leaves a debt. A slow disk is therefore tried again from time to
time, and the share holds in the long run even if predictions are wrong. The exception are stalls longer than
DEBT_LIMIT_S, such as those of a disk that hangs or of a process that is suspended: the rest of them is forgotten.

The host of a GPU is ahead of it, and may wait while the device computes. That is no stall:
:mod:`ssdtrain_fx.runtime.policy.stalls` counts the time for which the device has nothing to do.

The caller holds the engine's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable

BALANCE_LIMIT_S = 0.5
"""Small compared with the time in which it is saved up, large compared with a hiccup of a healthy disk. A guess."""
DEBT_LIMIT_S = 5.0
"""No tensor moves until a debt is repaid, which takes 1,000 s at the default ``max_slowdown``. To repay a minute would
take hours, in which the memory that offloading saves may be missed. A guess."""
MIN_STALL_SHARE = 0.001
"""For ``max_stall_share=0``: without any stall, a recovery of the disk would go unnoticed."""


class Admission:
    """The account of one engine. ``max_stall_share=None`` admits every tensor and waits as long as it takes."""

    def __init__(self, max_stall_share: float | None, clock: Callable[[], float]) -> None:
        self._share = None if max_stall_share is None else max(max_stall_share, MIN_STALL_SHARE)
        self._clock = clock
        self._balance_s = BALANCE_LIMIT_S
        self._updated_s = clock()

    @property
    def is_limited(self) -> bool:
        """Whether stalls are limited at all."""
        return self._share is not None

    def admits(self, stall_s: float) -> bool:
        """Whether a tensor that is predicted to stall for ``stall_s`` may leave. Deducts nothing yet."""
        return self._share is None or max(0.0, stall_s) <= self._balance() or self._balance() >= BALANCE_LIMIT_S

    def charge(self, stall_s: float) -> None:
        """Deduct a stall from the balance; a negative ``stall_s`` returns a stall that did not happen."""
        if self._share is not None:
            self._balance_s = max(-DEBT_LIMIT_S, min(BALANCE_LIMIT_S, self._balance() - stall_s))

    def patience_s(self) -> float:
        """How long a release may wait now."""
        return math.inf if self._share is None else max(0.0, self._balance())

    def _balance(self) -> float:
        assert self._share is not None
        now_s = self._clock()
        self._balance_s = min(BALANCE_LIMIT_S, self._balance_s + self._share * (now_s - self._updated_s))
        self._updated_s = now_s
        return self._balance_s
