"""What is to be decided, in numbers only: the graph is gone, positions, seconds and bytes remain.

The planner, the simulation and the exact solver all speak about this one value, so that they solve the same problem.

Time. Node p of the scheduled joint graph takes ``node_s[p]`` seconds on one compute stream. Everything in front of
``marker`` is forward. Of a moved storage

    offload   stands at ``complete``: it takes ``blocks_out_s`` of the compute stream, and the write may begin
    release   stands at ``release`` in ``[earliest_release, marker]``; the stream stalls there until it has left: its
              last byte is in staging, and all but the last ``staging_bytes`` of what was offloaded are written
    reload    stands at ``reload`` in ``[marker + 1, wait]``: it takes ``blocks_in_s``, then the read may begin
    wait      stands at ``wait``; the stream stalls there until the storage is back

Writes run one after the other in the order of ``complete``, reads in the order of ``reload``.

A storage of the host tier stays in staging: it has left when it is copied there, is neither written nor read, and a
copy brings it back. Meanwhile there is less staging for the others.

Memory. A storage is live in ``[start, end)``; a moved one in ``[start, release)`` and ``[reload, end)``.
``fixed_live_bytes`` counts every storage that cannot move.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ssdtrain_fx.hardware import Hardware

Tier = Literal["ssd", "host"]
"""Where a storage is while it is away."""


class Step(enum.IntEnum):
    """What may stand at one position, in this order.

    A release makes room before the next offload, unless it is the release of that very offload. A storage that is
    needed at once is asked for before anything is waited for; every other reload comes after the waits, which have made
    room for it.
    """

    RELEASE = 0
    OFFLOAD = 1
    RELEASE_AT_ONCE = 2
    RELOAD_AT_ONCE = 3
    WAIT = 4
    RELOAD = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Movable:
    """One storage that may leave memory between forward and backward. All positions mean "right before that node"."""

    idx: int
    """Index of its alias set."""
    size_bytes: int
    start: int
    complete: int
    earliest_release: int
    """Behind its last read in forward."""
    wait: int
    """Its first read in backward."""
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostTier:
    """Staging that storages may stay in."""

    budget_bytes: int
    """Held at most at any position; what is on its way to the SSD and back needs staging besides."""
    chunk_bytes: int = 1
    """Staging is given out in pieces of this size."""

    def held_bytes(self, size_bytes: int) -> int:
        """What a storage of ``size_bytes`` takes of the budget: whole pieces."""
        return -(-size_bytes // self.chunk_bytes) * self.chunk_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferProblem:
    """Everything that a placement depends on.

    What many placements of one problem share is computed once (for that it has no ``__slots__``).
    """

    node_s: tuple[float, ...]
    marker: int
    fixed_live_bytes: tuple[int, ...]
    movables: tuple[Movable, ...]
    """In the order of ``complete``; ties by idx."""
    hardware: Hardware
    recompute_s: float = 0.0
    """What recomputation has added to ``node_s``; it is exposed time, as stalls are."""
    host: HostTier | None = None
    """None: everything that leaves goes to the SSD."""

    @functools.cached_property
    def step_s(self) -> float:
        """Time of the step when nothing is moved or recomputed."""
        return sum(self.node_s) - self.recompute_s

    @functools.cached_property
    def elapsed_s(self) -> tuple[float, ...]:
        """When every node starts, and the last one ends, if nothing is moved."""
        return tuple(itertools.accumulate(self.node_s, initial=0.0))

    @functools.cached_property
    def node_seconds(self) -> NDArray[np.float64]:
        """``node_s`` as an array. Nobody may write to it."""
        return np.array(self.node_s, dtype=np.float64)

    @functools.cached_property
    def kept_live_bytes(self) -> NDArray[np.int64]:
        """Live bytes at every position with everything in memory. Nobody may write to it."""
        change = [0] * (len(self.node_s) + 1)
        for movable in self.movables:
            change[movable.start] += movable.size_bytes
            change[movable.end] -= movable.size_bytes
        moving = list(itertools.accumulate(change))[: len(self.node_s)]
        return np.array(self.fixed_live_bytes, dtype=np.int64) + np.array(moving, dtype=np.int64)

    def blocks_out_s(self, size_bytes: int) -> float:
        """Compute-stream time of one offload and its release, stalls not included."""
        hardware = self.hardware
        return hardware.offload_s + (hardware.copy_out.transfer_s(size_bytes) if hardware.copies_block_compute else 0.0)

    def blocks_in_s(self, size_bytes: int) -> float:
        """Compute-stream time of one reload and its wait, stalls not included."""
        hardware = self.hardware
        return hardware.reload_s + (hardware.copy_in.transfer_s(size_bytes) if hardware.copies_block_compute else 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where the release and the reload of one storage stand, and where it is in between."""

    release: int
    reload: int
    tier: Tier = "ssd"


Placements = Mapping[int, Placement]
"""By :attr:`Movable.idx`; a storage that is not in it stays in memory."""
