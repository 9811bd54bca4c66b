"""Live intervals, and their sum: the bytes that are live at each position of a step.

An interval is half-open, ``[start, end)``: the storage exists while the nodes at positions start..end-1 run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class LiveInterval:
    """The storage exists while the nodes at positions ``start <= p < end`` run."""

    storage_idx: int
    start: int
    end: int
    size_bytes: int

    def without(self, release: int, reload: int) -> tuple[LiveInterval, LiveInterval]:
        """The two intervals that remain when the storage is released at ``release`` and reloaded at ``reload``."""
        return (dataclasses.replace(self, end=release), dataclasses.replace(self, start=reload))


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Live bytes at every position of a graph."""

    live_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    @property
    def peak_position(self) -> int:
        """The first position at the peak; 0 for an empty graph."""
        return self.live_bytes.index(self.peak_bytes) if self.live_bytes else 0


def memory_profile(intervals: Iterable[LiveInterval], num_positions: int) -> MemoryProfile:
    """Sum the sizes of the live intervals at every position: + bytes at the start, - bytes at the end, running sum."""
    change = [0] * (num_positions + 1)
    for interval in intervals:
        change[interval.start] += interval.size_bytes
        change[interval.end] -= interval.size_bytes
    return MemoryProfile(live_bytes=tuple(itertools.accumulate(change))[:num_positions])
