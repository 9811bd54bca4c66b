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

from collections.abc import Collection

from torch import fx

from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.op_targets import WAIT
from ssdtrain_fx.passes.planning.live_intervals import LiveInterval


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
