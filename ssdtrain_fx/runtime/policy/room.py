"""Whether a tensor may stay in memory to save time: only if the memory limit of this process leaves room for it.

A process that comes to a hard limit, such as that of a container, is killed. A step that waits for a slow disk only
takes longer. So time is saved only with memory that is not needed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from ssdtrain_fx.memory_limit import MemoryLimit
from ssdtrain_fx.runtime.book.records import Entry
from ssdtrain_fx.runtime.policy.patience import Clock
from ssdtrain_fx.units import format_bytes

log = logging.getLogger(__name__)

RESERVE_SHARE = 0.1
"""The share of the limit that tensors which stay leave free, for what the rest of the step still allocates. A guess."""
FRESH_S = 0.05
FRESH_FACTOR = 200
"""For how long one reading of the limit counts: so many times as long as it took, about 1 ms, or ``FRESH_S``."""


class Room:
    """The memory that is left to this process. Tensors on a GPU may always stay."""

    def __init__(self, read_limit: Callable[[], MemoryLimit | None], clock: Clock) -> None:
        """``read_limit`` returns the limit that leaves the least memory; None if there is no limit."""
        self._read_limit = read_limit
        self._clock = clock
        self._limit: MemoryLimit | None = None
        self._stale_s = -math.inf
        self._taken_bytes = 0
        """By tensors that stay since the limit was read."""
        self._has_warned = False

    def has(self, entry: Entry) -> bool:
        """Whether ``entry`` may stay, which it then does: it keeps memory that would have been reused, or is copied."""
        if entry.device.type != "cpu":
            return True
        now_s = self._clock()
        if now_s >= self._stale_s:
            self._limit, self._taken_bytes = self._read_limit(), 0
            self._stale_s = now_s + max(FRESH_S, FRESH_FACTOR * (self._clock() - now_s))
        limit, taken_bytes = self._limit, self._taken_bytes + entry.byte_count
        if limit is None or limit.left_bytes - taken_bytes >= RESERVE_SHARE * limit.limit_bytes:
            self._taken_bytes = taken_bytes
            return True
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the disk is slower than planned, but %r (%s) cannot stay in memory to save time: %s. Steps wait for "
                "the disk instead. Use a faster disk, or give the process more memory.",
                entry.name,
                format_bytes(entry.byte_count),
                limit,
            )
        return False
