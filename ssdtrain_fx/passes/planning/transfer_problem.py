"""The planning problem as plain numbers: positions, seconds and bytes, without the graph.

The planner, the simulation and the exact solver all take this value, so they all solve the same problem.

Time. Node p of the scheduled joint graph takes ``node_s[p]`` seconds on one compute stream. All nodes before ``marker``
are forward. An offloaded storage has four ops:

    offload   at ``offload``, or later: takes ``blocks_out_s`` of the compute stream; the write may then begin
    release   at ``release`` in ``[earliest_release, marker]``: the stream stalls until the storage has left: its last
              byte is in staging, and all but the last ``staging_bytes`` of the bytes offloaded so far are written
    reload    at ``reload`` in ``[marker + 1, wait]``: takes ``blocks_in_s`` of the stream; the read may then begin
    wait      at ``wait``, or earlier: the stream stalls until the storage is reloaded

Writes run one at a time in the order of ``offload``, reads in the order of ``reload``.

A storage in the host tier stays in staging. It has left once it is copied there, it is neither written nor read, and a
copy reloads it. Until then, less staging is available to the other storages.

Memory. A storage is live in ``[live_start, live_end)``; an offloaded one in ``[live_start, release)`` and
``[reload, live_end)``. ``fixed_live_bytes`` counts every storage that cannot be offloaded.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import operator
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdtrain_fx.hardware import Channel, Hardware


def add_up(seconds: Iterable[float]) -> float:
    """The sum from left to right, rounded at each step like the clock of the simulation.

    From Python 3.12 on, ``sum`` rounds floats in another way.
    """
    return functools.reduce(operator.add, seconds, 0.0)


Tier = Literal["ssd", "host"]
"""Where a storage is kept between its release and its reload."""


class Step(enum.IntEnum):
    """The ops that may be inserted at one position, in their order.

    A release frees memory before the next offload, unless it belongs to that offload. A reload whose wait is at the
    same position comes before all waits. Every other reload comes after the waits, which have made room for it.
    """

    RELEASE = 0
    OFFLOAD = 1
    RELEASE_AT_ONCE = 2
    RELOAD_AT_ONCE = 3
    WAIT = 4
    RELOAD = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Movable:
    """A storage that may be offloaded. Every position means "right before that node"."""

    idx: int
    """Index of its alias set."""
    size_bytes: int
    live_start: int
    offload: int
    """Where the offload is inserted: right after the node that makes it."""
    earliest_release: int
    """Right after its last read in forward."""
    wait: int
    """Its first read in backward."""
    live_end: int
    must_move: bool = False
    """Every placement offloads it, at any cost in time. The exact solver ignores this: its bound is that of a free
    choice."""
    prefers_host: bool = False
    """The host tier takes it before all others. The exact solver ignores this too."""


class MovingTimes(NamedTuple):
    """What moving one storage takes, in seconds."""

    out_s: float
    """Compute-stream time of its offload and release, without stalls."""
    in_s: float
    """Compute-stream time of its reload and wait, without stalls."""
    next_out_s: float
    """``out_s`` and ``in_s`` where the ops follow those of another storage."""
    next_in_s: float
    write_s: float
    read_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostTier:
    """The part of staging in which storages may stay instead of going to the SSD."""

    budget_bytes: int
    """The most it may hold at any position. Transfers to and from the SSD need additional staging."""


HOST_IDLE_SHARE = 0.7
"""Share of the time in which the host has nothing to launch that it may spend on ops. The rest is for what else delays
it: Dynamo's guards, the optimizer, other threads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferProblem:
    """Everything that a placement depends on.

    Values that all placements of a problem share are cached. The class has no ``__slots__`` for that reason.
    """

    node_s: tuple[float, ...]
    marker: int
    fixed_live_bytes: tuple[int, ...]
    movables: tuple[Movable, ...]
    """In the order of ``offload``; ties by idx."""
    hardware: Hardware
    recompute_s: float = 0.0
    """Time that recomputation adds to ``node_s``. It counts as exposed time, as stalls do."""
    host: HostTier | None = None
    """None: every offloaded storage goes to the SSD."""

    def with_ops_in_one_row(self) -> TransferProblem:
        """The same problem if ops took as little time wherever they stand as they take in a row."""
        hardware = self.hardware
        offload_s, reload_s = hardware.offload_seconds(is_next=True), hardware.reload_seconds(is_next=True)
        return dataclasses.replace(self, hardware=dataclasses.replace(hardware, offload_s=offload_s, reload_s=reload_s))

    @functools.cached_property
    def step_s(self) -> float:
        """Time of the step without offloading and recomputation."""
        return add_up(self.node_s) - self.recompute_s

    @functools.cached_property
    def elapsed_s(self) -> tuple[float, ...]:
        """Start time of every node, then the end of the last one, without offloading."""
        return tuple(itertools.accumulate(self.node_s, initial=0.0))

    @functools.cached_property
    def wished(self) -> tuple[Movable, ...]:
        """The movables that must move."""
        return tuple(movable for movable in self.movables if movable.must_move)

    @functools.cached_property
    def start_s(self) -> NDArray[np.float64]:
        """Start time of every node without offloading. Read-only: it is shared."""
        return np.array(self.elapsed_s[:-1], dtype=np.float64)

    @functools.cached_property
    def moving_times(self) -> Mapping[int, MovingTimes]:
        """By :attr:`Movable.idx`, in the order of the movables."""
        return {
            movable.idx: MovingTimes(
                self.blocks_out_s(movable.size_bytes),
                self.blocks_in_s(movable.size_bytes),
                self.blocks_out_s(movable.size_bytes, is_next=True),
                self.blocks_in_s(movable.size_bytes, is_next=True),
                self.hardware.write.transfer_s(movable.size_bytes),
                self.hardware.read.transfer_s(movable.size_bytes),
            )
            for movable in self.movables
        }

    @functools.cached_property
    def node_seconds(self) -> NDArray[np.float64]:
        """``node_s`` as an array. Read-only: it is shared."""
        return np.array(self.node_s, dtype=np.float64)

    @functools.cached_property
    def kept_live_bytes(self) -> NDArray[np.int64]:
        """Live bytes at every position without offloading. Read-only: it is shared."""
        change = [0] * (len(self.node_s) + 1)
        for movable in self.movables:
            change[movable.live_start] += movable.size_bytes
            change[movable.live_end] -= movable.size_bytes
        moving = list(itertools.accumulate(change))[: len(self.node_s)]
        return np.array(self.fixed_live_bytes, dtype=np.int64) + np.array(moving, dtype=np.int64)

    def blocks_out_s(self, size_bytes: int, *, is_next: bool = False) -> float:
        """Compute-stream time of one offload and its release, without stalls.

        Args:
            is_next: they follow the ops of another storage.
        """
        return self._blocks_s(self.hardware.offload_seconds(is_next=is_next), self.hardware.copy_out, size_bytes)

    def blocks_in_s(self, size_bytes: int, *, is_next: bool = False) -> float:
        """The same for one reload and its wait."""
        return self._blocks_s(self.hardware.reload_seconds(is_next=is_next), self.hardware.copy_in, size_bytes)

    def _blocks_s(self, ops_s: float, copy: Channel, size_bytes: int) -> float:
        if self.hardware.copies_block_compute:
            return ops_s + copy.transfer_s(size_bytes)
        return ops_s * self._delaying_share.get(size_bytes, 1.0)

    @functools.cached_property
    def _delaying_share(self) -> Mapping[int, float]:
        """The share of the time of ops that delays a GPU, by the size of the storage. Sizes of no movable are missing.

        The host runs ops while the GPU computes what it has launched. Once it has no more time for that, ops delay the
        GPU. The largest storages get the time, because they are worth the most per op.
        """
        hardware = self.hardware
        launches = sum(seconds > 0 for seconds in self.node_s)
        idle_s = HOST_IDLE_SHARE * max(0.0, self.step_s - launches * hardware.kernel_s)
        counts = collections.Counter(movable.size_bytes for movable in self.movables)
        shares: dict[int, float] = {}
        for size_bytes in sorted(counts, reverse=True):
            needed_s = counts[size_bytes] * (hardware.offload_s + hardware.reload_s)
            shares[size_bytes] = max(0.0, 1.0 - idle_s / needed_s) if needed_s else 1.0
            idle_s = max(0.0, idle_s - needed_s)
        return shares


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """The positions of a storage's ops, and where it is kept in between."""

    release: int
    reload: int
    tier: Tier = "ssd"
    offload: int | None = None
    """None: :attr:`Movable.offload`. At a later position it counts as one that follows another offload in a row."""
    wait: int | None = None
    """None: :attr:`Movable.wait`. At an earlier position it counts as one that follows another wait in a row."""

    def offload_of(self, movable: Movable) -> int:
        """Where the offload of ``movable``, whose placement this is, is inserted."""
        return movable.offload if self.offload is None else self.offload

    def wait_of(self, movable: Movable) -> int:
        """The same for its wait."""
        return movable.wait if self.wait is None else self.wait


Placements = Mapping[int, Placement]
"""Keyed by :attr:`Movable.idx`. A storage without an entry stays in memory."""
