"""Live intervals of storages, and the bytes that are live at each position of a graph.

An interval is half-open, ``[start, end)``: the storage exists while the nodes at positions start..end-1 run. While a
node runs, its result and its arguments are live together. The interval of an argument that is last read at position p
ends at p + 1. The caller holds graph outputs, so they live to the end. The caller owns inputs, so they do not count.

    0  a = mm(x, w)     8 MiB    a [0, 3)      bytes: 8
    1  b = relu(a)      8 MiB    b [1, 4)             16
    2  c = add(a, b)    8 MiB    c [2, 4)             24   <- peak
    3  return (b, c)                                  16

A reloaded storage is live from its reload, which allocates the memory, although only the wait returns the tensor.

A collective returns a tensor that ``wait_tensor`` returns again, once it is complete. The graph shows two storages, but
there is only one: the first ends where the second starts. They are not one alias set, because a storage may be moved
only once it is complete.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.op_targets import WAIT
from ssdtrain_fx.passes.planning.live_intervals import LiveInterval

WAIT_FOR_COLLECTIVE = "_c10d_functional.wait_tensor.default"


def find_live_intervals(
    graph: fx.Graph, alias_sets: AliasSets, activations: Collection[fx.Node] = ()
) -> dict[int, LiveInterval]:
    """The live interval of every storage that the graph allocates, by storage index.

    Args:
        activations: placeholders that count as well, until the graph reads them for the last time.

    Storages whose size depends on data are left out, because their size is not known before they exist.
    """
    positions = {node: position for position, node in enumerate(graph.nodes)}
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    for node, position in positions.items():
        for idx in alias_sets.by_node[node]:
            start.setdefault(idx, positions[node.all_input_nodes[0]] if node.target is WAIT else position)
            end[idx] = position + 1
        read_until = position if str(node.target) == WAIT_FOR_COLLECTIVE else position + 1
        for source in node.all_input_nodes:
            for idx in alias_sets.by_node[source]:
                end[idx] = read_until
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
