"""When is each storage live, and how many bytes are live at each position of a graph?

An interval is half-open, ``[start, end)``: the storage exists while the nodes at positions start..end-1 run. A node's
result and its arguments are live together while it runs; an argument that is read for the last time at position p ends
at p + 1. Graph outputs are held by the caller and live to the end. Inputs belong to the caller and are not counted.

    0  a = mm(x, w)     8 MiB    a [0, 3)      bytes: 8
    1  b = relu(a)      8 MiB    b [1, 4)             16
    2  c = add(a, b)    8 MiB    c [2, 4)             24   <- peak
    3  return (b, c)                                  16

The memory of a reloaded storage is allocated by its reload, though it has a name only from its wait on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable

from torch import fx

from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.op_targets import WAIT


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


def find_live_intervals(
    graph: fx.Graph, alias_sets: AliasSets, activations: Collection[fx.Node] = ()
) -> dict[int, LiveInterval]:
    """The live interval of every storage that the graph allocates, by storage index.

    Args:
        activations: placeholders that count as well, as long as the graph needs them.

    Storages whose size depends on data are left out: nobody knows their bytes before they exist.
    """
    positions = {node: position for position, node in enumerate(graph.nodes)}
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    for node, position in positions.items():
        for idx in alias_sets.by_node[node]:
            start.setdefault(idx, positions[node.all_input_nodes[0]] if node.target is WAIT else position)
            end[idx] = position + 1
        for source in node.all_input_nodes:
            for idx in alias_sets.by_node[source]:
                end[idx] = position + 1
    intervals: dict[int, LiveInterval] = {}
    for storage in alias_sets.storages:
        if not storage.is_input or storage.allocator in activations:
            try:
                size_bytes = storage.hint_bytes
            except ValueError:
                continue
            idx = storage.idx
            intervals[idx] = LiveInterval(storage_idx=idx, start=start[idx], end=end[idx], size_bytes=size_bytes)
    return intervals


def memory_profile(intervals: Iterable[LiveInterval], num_positions: int) -> MemoryProfile:
    """Sum of the sizes of all intervals at every position (+bytes at start, -bytes at end, running sum)."""
    change = [0] * (num_positions + 1)
    for interval in intervals:
        change[interval.start] += interval.size_bytes
        change[interval.end] -= interval.size_bytes
    return MemoryProfile(live_bytes=tuple(itertools.accumulate(change))[:num_positions])
