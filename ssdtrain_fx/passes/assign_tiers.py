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

On a CPU there is nothing to assign: host memory is what the storages should leave. No plan has a host tier yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ssdtrain_fx.passes.liveness import LiveInterval

Tier = Literal["ssd", "host"]


def assign_tiers(absences: Sequence[LiveInterval], *, host_budget_bytes: int) -> dict[int, Tier]:
    """The tier of every storage, by its index.

    Args:
        absences: one for each storage that leaves: the host would hold it from ``start``, where it is offloaded, until
            ``end``, where it is back.
        host_budget_bytes: what the host tier holds at most, at any position. What is on its way to the SSD needs
            staging besides.
    """
    held_bytes = [0] * max((absence.end for absence in absences), default=0)
    tiers: dict[int, Tier] = {}
    for absence in sorted(absences, key=lambda one: (one.end, -one.start, one.storage_idx)):
        away = range(absence.start, absence.end)
        fits = max((held_bytes[position] for position in away), default=0) + absence.size_bytes <= host_budget_bytes
        tiers[absence.storage_idx] = "host" if fits else "ssd"
        if fits:
            for position in away:
                held_bytes[position] += absence.size_bytes
    return tiers
