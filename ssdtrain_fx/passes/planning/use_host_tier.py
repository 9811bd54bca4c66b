"""Keep the storages needed soonest in the host tier, unless the plan with the SSD alone is better.

    staging of 40                          offload                 reload
    a  16 MiB   written and read           |--- ssd ---------------|         reloaded last
    b  16 MiB   stays in staging              |--- host --------|
    c  16 MiB   stays in staging                 |--- host --|               reloaded first

A storage in the host tier is neither written nor read, so the SSD has more time for others. A copy is faster than a
read, so its reload can be placed later, where less memory is in use. On the other hand, it takes staging from the
writes, which may delay a release, and a shorter write queue serves fewer reloads from staging. Therefore several shares
of the budget are filled by Belady's rule (``assign_tiers``), and the storages are placed again. Each result is
simulated, and is dropped if its peak or its exposed time is higher than without the tier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ssdtrain_fx.passes.planning.assign_tiers import fill_host_tier
from ssdtrain_fx.passes.planning.place_transfers import SSD_SPEEDUPS, Choice, choose_lowest_peak, floor_bytes, place
from ssdtrain_fx.passes.planning.simulate import ROUNDING, simulate
from ssdtrain_fx.passes.planning.transfer_problem import Placement, TransferProblem

SHARES = (1.0, 0.5, 0.25)
"""Shares of the budget to try, in this order. The rest is left to the writes. A guess."""


def use_host_tier(
    problem: TransferProblem, choice: Choice, *, may_move_others: bool = False, time_first: bool = False
) -> Choice:
    """Return the best choice whose peak and exposed time are no higher than those of ``choice``, or ``choice`` itself.

    The best choice has the lowest peak, and among equals the fewest bytes on the SSD.

    Args:
        choice: a choice without a host tier.
        may_move_others: also try storages that ``choice`` does not offload. This runs the planner once more, at one
            ``ssd_speedup`` and without its local search.
        time_first: rank by exposed time before the peak.
    """
    if problem.host is None or not choice.placements:
        return choice
    exposed_s = choice.simulation.exposed_s
    allowed_s = exposed_s + ROUNDING * problem.step_s
    found = [
        Choice(placements, simulate(problem, placements), ssd_speedup)
        for placements, ssd_speedup in _arrange(problem, choice)
    ]
    if may_move_others and choice.peak_bytes > floor_bytes(problem):
        share = exposed_s / problem.step_s if problem.step_s else 0.0
        found.append(
            choose_lowest_peak(problem, max_slowdown=share, ssd_speedups=SSD_SPEEDUPS[:1], max_tried_positions=0)
        )
    sizes = {movable.idx: movable.size_bytes for movable in problem.movables}

    def rank(one: Choice) -> tuple[float, ...]:
        written_bytes = sum(sizes[idx] for idx, placement in one.placements.items() if placement.tier == "ssd")
        ranked = (one.peak_bytes, written_bytes, one.simulation.exposed_s)
        return (round(one.simulation.exposed_s, 6), *ranked) if time_first else ranked

    not_worse = [one for one in found if one.peak_bytes <= choice.peak_bytes and one.simulation.exposed_s <= allowed_s]
    return min((choice, *not_worse), key=rank)  # the first among equals


def _arrange(problem: TransferProblem, choice: Choice) -> Iterable[tuple[dict[int, Placement], float]]:
    """Placements of the storages of ``choice`` with the tier filled: at their old positions, and placed again."""
    assert problem.host is not None
    moved = [movable for movable in problem.movables if movable.idx in choice.placements]
    tiers = [dataclasses.replace(problem.host, budget_bytes=int(share * problem.host.budget_bytes)) for share in SHARES]
    for on_host in dict.fromkeys(fill_host_tier(tier, moved, problem.hardware) for tier in tiers):
        if not on_host:
            continue
        same = {
            idx: dataclasses.replace(placement, tier="host" if idx in on_host else "ssd")
            for idx, placement in choice.placements.items()
        }
        yield same, choice.ssd_speedup
        for ssd_speedup in SSD_SPEEDUPS:
            yield place(problem, moved, ssd_speedup, on_host=on_host), ssd_speedup
