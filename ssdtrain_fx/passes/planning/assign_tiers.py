"""Choose which storages offloaded from a GPU stay in host memory, and which go to the SSD.

This is Belady's rule, for a step that is known before it runs: the storages needed again soonest stay closest (L. A.
Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966). Backward
mirrors forward, so these are the storages offloaded last, which have the least time for a round trip to the SSD:

    budget 16        offload                 reload
    a   8 MiB           |--- ssd ---------------|         reloaded last
    b   8 MiB              |--- host --------|
    c   8 MiB                 |--- host --|               reloaded first

For storages of equal size, no assignment writes less to the SSD: this selects the most intervals of which at most k
overlap (M. C. Carlisle, E. L. Lloyd, "On the k-coloring of intervals", Discrete Applied Mathematics 59, 1995). For
storages of different sizes it is a knapsack problem, and the guarantees are weaker. No storage on the SSD would still
fit into the tier. If all storages are away at one position, as between forward and backward, the budget left there is
smaller than the smallest storage on the SSD, and a storage on the SSD is reloaded no sooner than any storage on the
host of its size or more.

On a CPU there is nothing to assign, because storages are offloaded to free host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.planning.live_intervals import LiveInterval
from ssdtrain_fx.passes.planning.transfer_problem import HostTier, Movable, Tier


def assign_tiers(
    absences: Sequence[LiveInterval], *, host_budget_bytes: int, preferred: Collection[int] = ()
) -> dict[int, Tier]:
    """Assign a tier to every storage, by its index.

    Args:
        absences: one interval for each offloaded storage. The host would hold it from ``start``, where it is offloaded,
            until ``end``, where it is reloaded.
        host_budget_bytes: the most the host tier may hold at any position. Transfers to the SSD need additional
            staging.
        preferred: the storages that come first, by index.
    """

    def rank(absence: LiveInterval) -> tuple[int, ...]:
        return (absence.storage_idx not in preferred, absence.end, -absence.start, absence.storage_idx)

    held_bytes = np.zeros(max((absence.end for absence in absences), default=0), dtype=np.int64)
    tiers: dict[int, Tier] = {}
    for absence in sorted(absences, key=rank):
        away = held_bytes[absence.start : absence.end]  # a view
        fits = int(away.max(initial=0)) + absence.size_bytes <= host_budget_bytes
        tiers[absence.storage_idx] = "host" if fits else "ssd"
        if fits:
            away += absence.size_bytes
    return tiers


def fill_host_tier(host: HostTier | None, moved: Iterable[Movable], hardware: Hardware) -> frozenset[int]:
    """Return the indices of the storages in ``moved`` that the host tier holds. The result is empty without a tier.

    A storage is held from its copy out until it is needed again.
    """
    if host is None:
        return frozenset()
    moved = list(moved)
    absences = [
        LiveInterval(
            storage_idx=movable.idx,
            start=movable.offload,
            end=movable.wait,
            size_bytes=hardware.staged_bytes(movable.size_bytes),
        )
        for movable in moved
    ]
    preferred = {movable.idx for movable in moved if movable.prefers_host}
    tiers = assign_tiers(absences, host_budget_bytes=host.budget_bytes, preferred=preferred)
    return frozenset(idx for idx, tier in tiers.items() if tier == "host")
