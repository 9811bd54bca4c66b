"""Move reloads earlier and releases later, where that raises neither the peak nor the exposed time.

The planner places reloads as late and releases as early as the profile's rates allow, which is best at the peak.
Elsewhere memory is available, and a disk that is briefly slower than its profile would stall the step needlessly::

    planned    |-------- n4 |reload a| n5 |wait a| ...        the read may take as long as n5
    reserved   |reload a| n4 -------- n5 |wait a| ...         the read may take twice as long

Releases are moved later and reloads earlier, so that a disk at a quarter of the rate would still keep up, while memory
there stays below 80 % of the peak. If that raises the peak or the exposed time, half of the rate is tried.

Guarantees: the peak and the exposed time do not rise, and reads and releases keep their order.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ssdtrain_fx.passes.planning.place_transfers import Choice, place
from ssdtrain_fx.passes.planning.simulate import ROUNDING, simulate
from ssdtrain_fx.passes.planning.transfer_problem import Placement, TransferProblem

RESERVES = (0.25, 0.5)
"""Shares of its rate at which the SSD would still keep up, tried in this order. Guesses: on shared machines, hiccups
that double the time are common; more than four times the time is not a hiccup."""

ROOM_SHARE = 0.8
"""The share of the peak up to which reserves may fill memory. A compiler orders kernels slightly differently than
planned: with 1.0, GPT-2 used 1.22 times the planned peak, with 0.9 BERT used 1.11, and with 0.8 GPT-2 used 1.02
(resident memory by ``ssdtrain-fx bench``, ``max_slowdown`` 0.03 and 0.04, 12 layers, hidden 384, batch 8 x 512,
2026-11-22)."""


def reserve_time(problem: TransferProblem, choice: Choice) -> Choice:
    """Return ``choice`` with later releases and earlier reloads."""
    movables = [movable for movable in problem.movables if movable.idx in choice.placements]
    on_host = {idx for idx, placement in choice.placements.items() if placement.tier == "host"}
    for reserve in RESERVES:
        wanted = place(problem, movables, reserve, on_host=on_host)
        placements = _move_towards(problem, choice, wanted)
        simulation = simulate(problem, placements)
        if (
            simulation.peak_bytes <= choice.peak_bytes
            and simulation.exposed_s <= choice.simulation.exposed_s + ROUNDING * problem.step_s
        ):
            return dataclasses.replace(choice, placements=placements, simulation=simulation)
    return choice


def _move_towards(problem: TransferProblem, choice: Choice, wanted: dict[int, Placement]) -> dict[int, Placement]:
    """Move every position of ``choice`` as far towards the ``wanted`` one as memory allows."""
    placements = dict(choice.placements)
    size_bytes = {movable.idx: movable.size_bytes for movable in problem.movables}
    live_bytes = np.array(choice.simulation.live_bytes, dtype=np.int64)
    room_bytes = int(ROOM_SHARE * choice.peak_bytes) - live_bytes
    # The earliest reload is handled first: it is closest to the peak and most likely to need the reserve.
    before = problem.marker
    for idx in sorted(placements, key=lambda idx: (placements[idx].reload, size_bytes[idx], idx)):
        now = placements[idx]
        reload = _first_with_room(room_bytes, max(before + 1, wanted[idx].reload), now.reload, size_bytes[idx])
        placements[idx] = dataclasses.replace(now, reload=reload)
        before = max(before, reload)
    behind = problem.marker + 1
    for idx in sorted(placements, key=lambda idx: (-placements[idx].release, size_bytes[idx], idx)):
        now = placements[idx]
        release = _last_with_room(room_bytes, now.release, min(behind - 1, wanted[idx].release), size_bytes[idx])
        placements[idx] = dataclasses.replace(now, release=release)
        behind = min(behind, release)
    return placements


def _first_with_room(room_bytes: NDArray[np.int64], first: int, last: int, size_bytes: int) -> int:
    """Find the first position with room from there to ``last``, and take the room."""
    if first >= last:
        return last
    full = np.flatnonzero(room_bytes[first:last] < size_bytes)
    found = first + int(full[-1]) + 1 if full.size else first
    room_bytes[found:last] -= size_bytes
    return found


def _last_with_room(room_bytes: NDArray[np.int64], first: int, last: int, size_bytes: int) -> int:
    """Find the last position with room from ``first`` to there, and take the room."""
    if last <= first:
        return first
    full = np.flatnonzero(room_bytes[first:last] < size_bytes)
    found = first + int(full[0]) if full.size else last
    room_bytes[first:found] -= size_bytes
    return found
