"""How far a spill file may grow on its file system.

Why: checkpoints and logs are often written to the disk that holds the spill file. Without a limit, the file takes the
last bytes that a checkpoint needs. And each attempt to reserve blocks on a full disk searches the whole disk for them,
takes what is left for a moment, and gives it back: with an attempt for each chunk, a checkpoint fails although the file
does not grow.

Guarantees:

* Growth leaves ``reserve_bytes`` free. Nothing is attempted if there is less room.
* After a failure, nothing is attempted for ``RETRY_AFTER_S``, except a smaller growth. No system call is made either.
* The room is measured again after that, so the file grows as soon as there is space again.

Not thread-safe: the file calls it with its lock held.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from ssdtrain_fx.runtime.alignment import ALIGNMENT_BYTES
from ssdtrain_fx.units import format_bytes

RETRY_AFTER_S = 10.0
"""A guess: rare enough to cost nothing, and soon enough after a checkpoint has been deleted."""
RESERVE_BYTES = 1 << 30
RESERVE_SHARE = 0.05
"""The default reserve is ``RESERVE_BYTES``, but at most this share of the file system. Both are guesses."""


class _Failure(NamedTuple):
    """Why the file could not have ``size_bytes``. An exception would hold the frames that it passed, and tensors."""

    size_bytes: int
    errno: int
    reason: str
    retry_at_s: float


class DiskSpace:
    """The room that one file has on its file system."""

    def __init__(
        self, descriptor: int, reserve_bytes: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``reserve_bytes`` None: the default. ``clock`` returns seconds."""
        self._descriptor = descriptor
        self._reserve_bytes = reserve_bytes
        self._clock = clock
        self._failure: _Failure | None = None

    def grow(
        self, from_bytes: int, needed_bytes: int, wanted_bytes: int, grow_to: Callable[[int], OSError | None]
    ) -> OSError | None:
        """Grow the file, which has ``from_bytes``, to ``needed_bytes`` or up to ``wanted_bytes``, as there is room.

        ``grow_to`` sets the size, or returns an error and changes nothing. Returns the error if the file has not grown.
        """
        failure = self._failure
        if failure is not None and needed_bytes >= failure.size_bytes and self._clock() < failure.retry_at_s:
            return OSError(failure.errno, failure.reason)
        error = self._try_to_grow(from_bytes, needed_bytes, wanted_bytes, grow_to)
        if error is not None:
            reason, retry_at_s = error.strerror or str(error), self._clock() + RETRY_AFTER_S
            self._failure = _Failure(needed_bytes, error.errno or errno.EIO, reason, retry_at_s)
        return error

    def _try_to_grow(
        self, from_bytes: int, needed_bytes: int, wanted_bytes: int, grow_to: Callable[[int], OSError | None]
    ) -> OSError | None:
        try:
            status = os.statvfs(self._descriptor)
        except OSError as error:
            return error.with_traceback(None)
        if status.f_blocks:  # some file systems in user space report zeros
            total_bytes, free_bytes = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
            reserve_bytes = self._reserve_bytes
            if reserve_bytes is None:
                reserve_bytes = min(RESERVE_BYTES, int(RESERVE_SHARE * total_bytes))
            largest_bytes = (from_bytes + free_bytes - reserve_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            if needed_bytes > largest_bytes:
                return OSError(
                    errno.ENOSPC,
                    f"its file system has {format_bytes(free_bytes)} left, and the option disk_reserve_bytes keeps "
                    f"{format_bytes(reserve_bytes)} free",
                )
            wanted_bytes = min(wanted_bytes, largest_bytes)
        error = grow_to(wanted_bytes)
        if error is not None and wanted_bytes != needed_bytes:
            error = grow_to(needed_bytes)
        return error
