"""Let releases and reloads stand where another op stands anyway, for devices whose compute thread runs the ops.

Why: an op that follows a kernel finds its code and its data gone from the caches of the processor; one that follows
another op finds them there. In a BERT step on 2 cores a release takes 223 us behind a kernel and 7 us behind an op,
a reload 272 and 71 us (medians, 2026-11-21).

::

    forward    n1 |offload b| n2 |release a| n3 |offload c| n4         the release of a waits for the offload of c
    backward   n7 |wait b| n8 |reload a| n9 |wait a| n10               the reload of a comes with the wait for b

Tensors are in memory a little longer for it, but neither half of the step has a higher peak, and nothing stalls longer.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from ssdtrain_fx.passes.place_transfers import Choice
from ssdtrain_fx.passes.simulate import ROUNDING, simulate
from ssdtrain_fx.passes.transfer_problem import TransferProblem


def gather_ops(problem: TransferProblem, choice: Choice) -> Choice:
    """``choice`` with later releases and earlier reloads, or itself where that would cost more than it does."""
    if not problem.hardware.copies_block_compute:
        return choice
    marker, placements = problem.marker, dict(choice.placements)
    chosen = [movable for movable in problem.movables if movable.idx in placements]
    live_bytes = np.array(choice.simulation.live_bytes)
    forward_limit, backward_limit = live_bytes[: marker + 1].max(), live_bytes[marker:].max()

    offloads = sorted({movable.complete for movable in chosen})
    for movable in sorted(chosen, key=lambda movable: (placements[movable.idx].release, movable.idx)):
        placement = placements[movable.idx]
        following = bisect.bisect_left(offloads, placement.release)
        if following == len(offloads):
            continue
        longer = live_bytes[placement.release : offloads[following]]
        if len(longer) and longer.max() + movable.size_bytes <= forward_limit:
            longer += movable.size_bytes
            placements[movable.idx] = dataclasses.replace(placement, release=offloads[following])

    waits = sorted({movable.wait for movable in chosen})
    for movable in sorted(chosen, key=lambda movable: (-placements[movable.idx].reload, -movable.idx)):
        placement = placements[movable.idx]
        before = bisect.bisect_right(waits, placement.reload) - 1
        if before < 0:
            continue
        longer = live_bytes[waits[before] : placement.reload]
        if len(longer) and longer.max() + movable.size_bytes <= backward_limit:
            longer += movable.size_bytes
            placements[movable.idx] = dataclasses.replace(placement, reload=waits[before])

    simulation = simulate(problem, placements)
    if simulation.exposed_s > choice.simulation.exposed_s + ROUNDING * problem.step_s:
        return choice
    return dataclasses.replace(choice, placements=placements, simulation=simulation)
