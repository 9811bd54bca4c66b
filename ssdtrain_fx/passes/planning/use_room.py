"""Use the memory below the peak: reserves of time, and ops in rows.

Neither changes which storages move, and neither raises the peak. Rows save time, and where time is what limits a plan,
that time is spent on further storages.
"""

from __future__ import annotations

import dataclasses

from ssdtrain_fx.passes.planning.gather_ops import gather_ops
from ssdtrain_fx.passes.planning.place_transfers import Choice, choose_lowest_peak
from ssdtrain_fx.passes.planning.reserve_time import reserve_time
from ssdtrain_fx.passes.planning.transfer_problem import TransferProblem
from ssdtrain_fx.passes.planning.use_host_tier import use_host_tier


def use_room(problem: TransferProblem, choice: Choice) -> Choice:
    """Return ``choice`` with later releases and earlier reloads, in rows where that saves time."""
    return gather_ops(problem, reserve_time(problem, choice))


def choose_within_time(problem: TransferProblem, *, max_slowdown: float, floor_bytes: int) -> Choice:
    """Find the lowest peak that exposes at most ``max_slowdown`` of the step, with ops in rows.

    The planner counts every op as if it stood alone. So it is asked again, with the time that rows have saved.
    """
    plain = _choose(problem, max_slowdown)
    best = use_room(problem, plain)
    for share in _larger_shares(problem, max_slowdown, plain, best):
        if best.peak_bytes <= floor_bytes:
            break
        found = use_room(problem, _choose(problem, share))
        if found.peak_bytes < best.peak_bytes and found.simulation.exposed_s <= max_slowdown * problem.step_s:
            return found
    return best


def _choose(problem: TransferProblem, max_slowdown: float) -> Choice:
    choice = choose_lowest_peak(dataclasses.replace(problem, host=None), max_slowdown=max_slowdown)
    return use_host_tier(problem, choice, may_move_others=True)


def _larger_shares(problem: TransferProblem, max_slowdown: float, plain: Choice, in_rows: Choice) -> tuple[float, ...]:
    """What to allow instead of ``max_slowdown``: if rows save the same share of a larger time, and if they save the
    same time."""
    alone_s = plain.simulation.exposed_s - problem.recompute_s
    in_rows_s = in_rows.simulation.exposed_s - problem.recompute_s
    if not 0 < in_rows_s < alone_s:
        return ()
    free = max_slowdown - problem.recompute_s / problem.step_s
    return (max_slowdown + free * (alone_s / in_rows_s - 1), max_slowdown + (alone_s - in_rows_s) / problem.step_s)
