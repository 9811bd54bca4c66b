"""Let the host tier hold what is needed soonest, where that is no worse than the SSD for everything.

    staging of 40                          offload                 reload
    a  16 MiB   written, and read          |--- ssd ---------------|         back last
    b  16 MiB   stays in staging              |--- host --------|
    c  16 MiB   stays in staging                 |--- host --|               back first

A storage in the host tier is neither written nor read, so the SSD has time for others, and a copy brings it back sooner
than a read: its reload stands later, where there is less in memory. But it takes staging away from the writes, which
may hold up a release, and a shorter write queue serves fewer reloads from staging. So nothing is taken for granted:
shares of the budget are filled by Belady's rule (``assign_tiers``) and placed again, the simulation judges each, and
what has a higher peak or more exposed time than the plan without the tier is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ssdtrain_fx.passes.planning.assign_tiers import fill_host_tier
from ssdtrain_fx.passes.planning.place_transfers import HASTES, Choice, choose_lowest_peak, floor_bytes, place
from ssdtrain_fx.passes.planning.simulate import ROUNDING, simulate
from ssdtrain_fx.passes.planning.transfer_problem import Placement, TransferProblem

SHARES = (1.0, 0.5, 0.25)
"""Of the budget, tried one after the other: the rest is left to the writes. A guess."""


def use_host_tier(
    problem: TransferProblem, choice: Choice, *, may_move_others: bool = False, time_first: bool = False
) -> Choice:
    """The best choice with no higher peak and no more exposed time than ``choice``; that one, if none is better.

    The best one has the lowest peak, and then the fewest bytes on the SSD.

    Args:
        choice: without a host tier.
        may_move_others: not only the storages that ``choice`` moves. One more run of the planner without its local
            search, at one haste.
        time_first: the best one has the least exposed time.
    """
    if problem.host is None or not choice.placements:
        return choice
    exposed_s = choice.simulation.exposed_s
    allowed_s = exposed_s + ROUNDING * problem.step_s
    found = [
        Choice(placements, simulate(problem, placements), haste) for placements, haste in _arrange(problem, choice)
    ]
    if may_move_others and choice.peak_bytes > floor_bytes(problem):
        share = exposed_s / problem.step_s if problem.step_s else 0.0
        found.append(choose_lowest_peak(problem, max_slowdown=share, hastes=HASTES[:1], max_tried_positions=0))
    sizes = {movable.idx: movable.size_bytes for movable in problem.movables}

    def rank(one: Choice) -> tuple[float, ...]:
        written_bytes = sum(sizes[idx] for idx, placement in one.placements.items() if placement.tier == "ssd")
        ranked = (one.peak_bytes, written_bytes, one.simulation.exposed_s)
        return (round(one.simulation.exposed_s, 6), *ranked) if time_first else ranked

    not_worse = [one for one in found if one.peak_bytes <= choice.peak_bytes and one.simulation.exposed_s <= allowed_s]
    return min((choice, *not_worse), key=rank)  # the first one of equals


def _arrange(problem: TransferProblem, choice: Choice) -> Iterable[tuple[dict[int, Placement], float]]:
    """The storages of ``choice`` with the tier filled, and the haste: where it has them, and placed again."""
    assert problem.host is not None
    moved = [movable for movable in problem.movables if movable.idx in choice.placements]
    tiers = [dataclasses.replace(problem.host, budget_bytes=int(share * problem.host.budget_bytes)) for share in SHARES]
    for on_host in dict.fromkeys(fill_host_tier(tier, moved) for tier in tiers):
        if not on_host:
            continue
        same = {
            idx: dataclasses.replace(placement, tier="host" if idx in on_host else "ssd")
            for idx, placement in choice.placements.items()
        }
        yield same, choice.haste
        for haste in HASTES:
            yield place(problem, moved, haste, on_host=on_host), haste
