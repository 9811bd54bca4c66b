"""Whether a tensor may stay in memory to save time: only if the memory limit of this process leaves room for it.

A process that comes to a hard limit, such as that of a container, is killed. A step that waits for a slow disk only
takes longer. So time is saved only with memory that is not needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ssdtrain_fx.memory_limit import MemoryLimit
from ssdtrain_fx.runtime.book.records import Entry
from ssdtrain_fx.units import format_bytes

log = logging.getLogger(__name__)

RESERVE_SHARE = 0.1
"""The share of the limit that tensors which stay leave free, for what the rest of the step still allocates. A guess."""


class Room:
    """The memory that is left to this process. Tensors on a GPU may always stay."""

    def __init__(self, read_limit: Callable[[], MemoryLimit | None]) -> None:
        """``read_limit`` returns the limit that leaves the least memory; None if there is no limit."""
        self._read_limit = read_limit
        self._has_warned = False

    def has(self, entry: Entry) -> bool:
        """Whether ``entry`` may stay. It reads files of the system, so ask only if the tensor would stay otherwise.

        Tensors that stay take memory that was free, or keep memory that would have been reused; so does their copy.
        """
        limit = self._read_limit() if entry.device.type == "cpu" else None
        if limit is None or limit.left_bytes - entry.byte_count >= RESERVE_SHARE * limit.limit_bytes:
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
