"""Which of the storages that leave a GPU may stay in host memory, and which go on to the SSD.

Belady's rule, for a step that is known before it runs: what is needed again soonest stays nearest (L. A. Belady, "A
study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966). Forward and backward
are mirrored, so these are the storages that leave last, whose way to the SSD and back would be in the greatest hurry:

    budget 16        offload                 reload
    a   8 MiB           |--- ssd ---------------|         back last
    b   8 MiB              |--- host --------|
    c   8 MiB                 |--- host --|               back first

For storages of one size no assignment writes less to the SSD: it is the choice of most intervals of which no more than
k overlap (M. C. Carlisle, E. L. Lloyd, "On the k-coloring of intervals", Discrete Applied Mathematics 59, 1995). For
others it is a knapsack problem, and what holds is less. Nothing on the SSD would fit in addition. Where all are away at
one position, as between forward and backward, less of the budget is left over there than the smallest one on the SSD
takes, and whatever is on the SSD comes back no sooner than anything on the host of its size or more.

On a CPU there is nothing to assign: host memory is what the storages should leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ssdtrain_fx.passes.planning.live_intervals import LiveInterval
from ssdtrain_fx.passes.planning.transfer_problem import HostTier, Movable, Tier


def assign_tiers(absences: Sequence[LiveInterval], *, host_budget_bytes: int) -> dict[int, Tier]:
    """The tier of every storage, by its index.

    Args:
        absences: one for each storage that leaves: the host would hold it from ``start``, where it is offloaded, until
            ``end``, where it is back.
        host_budget_bytes: what the host tier holds at most, at any position. What is on its way to the SSD needs
            staging besides.
    """
    held_bytes = np.zeros(max((absence.end for absence in absences), default=0), dtype=np.int64)
    tiers: dict[int, Tier] = {}
    for absence in sorted(absences, key=lambda one: (one.end, -one.start, one.storage_idx)):
        away = held_bytes[absence.start : absence.end]  # a view
        fits = int(away.max(initial=0)) + absence.size_bytes <= host_budget_bytes
        tiers[absence.storage_idx] = "host" if fits else "ssd"
        if fits:
            away += absence.size_bytes
    return tiers


def fill_host_tier(host: HostTier | None, moved: Iterable[Movable]) -> frozenset[int]:
    """Which of ``moved`` the host tier holds, by index; none where there is no such tier.

    Each is held from its copy out until it is needed again.
    """
    if host is None:
        return frozenset()
    absences = [
        LiveInterval(
            storage_idx=movable.idx,
            start=movable.complete,
            end=movable.wait,
            size_bytes=host.held_bytes(movable.size_bytes),
        )
        for movable in moved
    ]
    tiers = assign_tiers(absences, host_budget_bytes=host.budget_bytes)
    return frozenset(idx for idx, tier in tiers.items() if tier == "host")
