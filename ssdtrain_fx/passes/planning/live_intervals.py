"""Live intervals and what they add up to: how many bytes are live at each position of a step.

An interval is half-open, ``[start, end)``: the storage exists while the nodes at positions start..end-1 run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class LiveInterval:
    """One storage exists while positions ``start <= p < end`` run."""

    storage_idx: int
    start: int
    end: int
    size_bytes: int

    def without(self, release: int, reload: int) -> tuple[LiveInterval, LiveInterval]:
        """What is left when the storage is away from position ``release`` until position ``reload``."""
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
        """First position with the peak; 0 for an empty graph."""
        return self.live_bytes.index(self.peak_bytes) if self.live_bytes else 0


def memory_profile(intervals: Iterable[LiveInterval], num_positions: int) -> MemoryProfile:
    """Sum of the sizes of all intervals at every position (+bytes at start, -bytes at end, running sum)."""
    change = [0] * (num_positions + 1)
    for interval in intervals:
        change[interval.start] += interval.size_bytes
        change[interval.end] -= interval.size_bytes
    return MemoryProfile(live_bytes=tuple(itertools.accumulate(change))[:num_positions])
