"""Use the memory below the peak: reserves of time, and ops in rows.

Neither changes which storages move, and neither raises the peak. Rows save time, and where time is what limits a plan,
that time is spent on further storages.
"""

from __future__ import annotations

import dataclasses
import math

from ssdtrain_fx.passes.planning.gather_ops import gather_ops
from ssdtrain_fx.passes.planning.place_transfers import Choice, choose_lowest_peak
from ssdtrain_fx.passes.planning.reserve_time import reserve_time
from ssdtrain_fx.passes.planning.transfer_problem import TransferProblem
from ssdtrain_fx.passes.planning.use_host_tier import use_host_tier

WORTH_ASKING = 0.05
"""The share of the allowed time that rows must save before the planner is asked again, which takes as long as the first
time. A guess."""


def use_room(problem: TransferProblem, choice: Choice) -> Choice:
    """Return ``choice`` with later releases and earlier reloads, in rows where that saves time."""
    return gather_ops(problem, reserve_time(problem, choice))


def choose_within_time(problem: TransferProblem, *, max_slowdown: float, floor_bytes: int) -> Choice:
    """Find the lowest peak that exposes at most ``max_slowdown`` of the step, with ops in rows.

    The planner counts every op as if it stood alone. So it is asked again, with the time that rows have saved.
    """
    alone = reserve_time(problem, _choose(problem, max_slowdown))
    best = gather_ops(problem, alone)
    allowed_s, saved_s = max_slowdown * problem.step_s, alone.simulation.exposed_s - best.simulation.exposed_s
    if not allowed_s or saved_s <= WORTH_ASKING * allowed_s or best.peak_bytes <= floor_bytes:
        return best
    for share in _larger_shares(problem, max_slowdown, alone, best):
        found = use_room(problem, _choose(problem, share))
        if found.peak_bytes < best.peak_bytes and found.simulation.exposed_s <= allowed_s:
            return found
    return best


def _choose(problem: TransferProblem, max_slowdown: float) -> Choice:
    choice = choose_lowest_peak(dataclasses.replace(problem, host=None), max_slowdown=max_slowdown)
    return use_host_tier(problem, choice, may_move_others=True)


def _larger_shares(
    problem: TransferProblem, max_slowdown: float, alone: Choice, in_rows: Choice
) -> tuple[float, float]:
    """What to allow instead of ``max_slowdown``: first as if rows saved the same share of a larger time, then as if
    they saved the same time."""
    alone_s = alone.simulation.exposed_s - problem.recompute_s
    in_rows_s = in_rows.simulation.exposed_s - problem.recompute_s
    for_moving = max_slowdown - problem.recompute_s / problem.step_s
    larger = for_moving * (alone_s / in_rows_s - 1) if in_rows_s > 0 else math.inf
    return (max_slowdown + larger, max_slowdown + (alone_s - in_rows_s) / problem.step_s)
