"""Lanes: a lane moves the chunks of one kind of device between tensors and the file.

There are two kinds. :mod:`ssdtrain_fx.runtime.lanes.threads.thread_lane` has its own threads, and
:mod:`ssdtrain_fx.runtime.lanes.aio.aio_lane` works within the ops and leaves the transfers to the kernel.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Entry, Fill
from ssdtrain_fx.runtime.lanes.ends import Ends
from ssdtrain_fx.runtime.memory.movers import Mover
from ssdtrain_fx.runtime.memory.staging import StagingPool
from ssdtrain_fx.runtime.policy.patience import BLOCK_S, Patience


class Lane(abc.ABC):
    """The engine's view of a lane. Methods that say so need the ledger's lock."""

    has_host_tier = False
    """Bytes may stay in its staging buffers, because tensors live in other memory."""
    has_stopped = False
    """It was closed, and moves no byte any more."""
    from_source_bytes = math.inf
    """Tensors of at least this size are written straight from their memory, without staging."""

    def __init__(self, ledger: Ledger, mover: Mover, pool: StagingPool, *, checksum: bool, busy_with: int = 2) -> None:
        """``busy_with`` transfers in one direction keep the disk busy."""
        self.mover = mover
        self.pool = pool
        self.chunk_bytes = pool.chunk_bytes
        self.direct_chunk_bytes = pool.chunk_bytes
        """The same for tensors that are written without staging."""
        self.io_path = ledger.file.io_path
        """See :attr:`ssdtrain_fx.runtime.statistics.Statistics.io_path`."""
        self.staging_bytes = pool.buffer_limit * pool.chunk_bytes
        """How many bytes may be between staged tensors and the file."""
        self.planned_staging_bytes = self.staging_bytes
        """The same for the large tensors that plans move."""
        self._ledger = ledger
        self._checksum = checksum
        self._ends = Ends(ledger, pool, busy_with)

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for reads and currently unused."""
        return 0

    def release_idle(self) -> None:
        """Return the unused memory to the system."""
        return

    @property
    def will_read_ahead(self) -> bool:
        """Whether a thread of the lane is about to read ahead. Needs the lock."""
        return False

    @abc.abstractmethod
    def enlist_copies(self, entry: Entry) -> None:
        """Queue the chunks of ``entry`` to be written. Needs the lock."""

    @abc.abstractmethod
    def enlist_reads(self, fill: Fill) -> None:
        """Queue the chunks of ``fill`` to be reloaded. Needs the lock."""

    @abc.abstractmethod
    def hurry(self, fill: Fill) -> None:
        """Move ``fill`` before everything that has not begun, because a thread waits for it. Needs the lock."""

    @abc.abstractmethod
    def close(self, patience: Patience) -> bool:
        """Finish what has begun and drop the rest. The ledger is already closed. May be called again.

        False: patience ran out, and buffers and tensors are left to the transfers that may still use them. If it
        raises, ``has_stopped`` says whether any byte may still move."""

    def begin_copies(self) -> None:
        """Begin copies on the caller's thread if a device does them. After ``enlist_copies``, without the lock."""
        return

    def make_progress(self) -> None:
        """Note what has finished and begin what can begin. Never blocks on the disk. Needs the lock and a change."""
        return

    def wait_for_progress(self, seen: int, timeout_s: float = BLOCK_S) -> bool:
        """Block until something has changed since the caller ``seen`` the count of ``ledger.progress``; call it in a
        loop, without the lock. False: nothing is in flight, so waiting is pointless."""
        ledger = self._ledger
        with ledger.lock:
            waiter = ledger.progress.enlist() if seen == ledger.progress.count else None
        if waiter is not None and not waiter.acquire(True, timeout_s):
            with ledger.lock:
                ledger.progress.withdraw(waiter)
        return True

    def allocate(self, entry: Entry, stride: Sequence[int], device: torch.device) -> Tensor:
        """Allocate a tensor like ``entry`` as the target of reads."""
        return torch.empty_strided(entry.size, stride, dtype=entry.dtype, device=device)
