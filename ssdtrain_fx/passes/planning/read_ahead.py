"""When the reads of the next backward begin in a chain of graphs: as late as its first waits permit.

The first tensors that a backward needs cannot be read in time if their reads begin with it. So they begin while the
backward before it still runs, right after one of its waits:

    backward 3   | wait c | ..... | wait b | ..... | wait a | .... |
    backward 2                                       [ read c ]      | wait c | ... | wait b | ...

``lead_s`` of c in backward 2 is how long before that backward its read should begin. ``left_s`` of a wait in backward 3
is how much of that backward is left when the next wait comes. The reads that begin after a wait are those with a lead
above that: for them, the next wait would be too late. Earlier, they would only take memory.

The engine compares both at run time, so the two graphs may differ. The plan of a graph assumes that they are equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from ssdtrain_fx.passes.planning.live_intervals import LiveInterval
from ssdtrain_fx.passes.planning.place_transfers import SSD_SPEEDUPS
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Placements, TransferProblem


class AheadTimes(NamedTuple):
    """What the runtime needs to know of an offloaded storage of a graph in a chain, in seconds."""

    lead_s: float
    """How long before the backward its read should begin; 0: it begins where its reload stands."""
    left_s: float
    """The time from the next wait to the end of the backward; 0 if no wait comes after its own."""


def ahead_times(problem: TransferProblem, placements: Placements) -> dict[int, AheadTimes]:
    """The times of all offloaded storages, by index. Reads take as long as the placement of reloads assumes."""
    elapsed_s = problem.elapsed_s
    found: dict[int, AheadTimes] = {}
    begin_s, left_s = elapsed_s[-1], 0.0
    for wait, together in itertools.groupby(reversed(_in_order_of_waits(problem, placements)), key=lambda one: one[0]):
        for _, movable in together:
            read_s = problem.hardware.read.transfer_s(movable.size_bytes) / SSD_SPEEDUPS[0]
            begin_s = min(begin_s, elapsed_s[wait]) - read_s
            found[movable.idx] = AheadTimes(max(0.0, elapsed_s[problem.marker] - begin_s), left_s)
        left_s = elapsed_s[-1] - elapsed_s[wait]
    return found


def read_ahead_spans(
    problem: TransferProblem, placements: Placements, times: Mapping[int, AheadTimes]
) -> list[LiveInterval]:
    """When the tensors of the next backward are in memory during this one, if both are equal.

    As in the engine, they take no more memory than what this backward has waited for and used.
    """
    spans: list[LiveInterval] = []
    waits = _in_order_of_waits(problem, placements)
    to_read = [movable for _, movable in waits if times[movable.idx].lead_s > 0]
    room_bytes = last_bytes = 0
    for wait, movable in waits:
        room_bytes, last_bytes = room_bytes + last_bytes, movable.size_bytes
        left_s = times[movable.idx].left_s
        while to_read and times[to_read[0].idx].lead_s > left_s and to_read[0].size_bytes <= room_bytes:
            size_bytes = to_read.pop(0).size_bytes
            room_bytes -= size_bytes
            spans.append(LiveInterval(-1, wait, len(problem.node_s), size_bytes))
    return spans


def _in_order_of_waits(problem: TransferProblem, placements: Placements) -> list[tuple[int, Movable]]:
    """The positions of all waits, and what they wait for."""
    chosen = [movable for movable in problem.movables if movable.idx in placements]
    waits = [(placements[movable.idx].wait_of(movable), movable) for movable in chosen]
    return sorted(waits, key=lambda wait: (wait[0], wait[1].idx))
