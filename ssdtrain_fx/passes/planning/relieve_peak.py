"""Choose recomputations that relieve the peak, within a time, without chains.

1. *Fill.* Add the storage that covers the current peak and frees most bytes per second, until the time is used up. No
   storage is recomputed from another one that is.
2. *Exchange.* Cheap storages may block better ones: if 'b' is recomputed from 'a' and 'd', neither of these can be
   recomputed. So insert each storage in turn, remove those that it excludes, and fill again. Keep the better set.

One fill of n storages and m positions takes O(n (n + m)). The number of exchanges is limited.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ssdtrain_fx.passes.planning.place_transfers import place_all
from ssdtrain_fx.passes.planning.simulate import live_bytes
from ssdtrain_fx.passes.planning.transfer_problem import Placements, TransferProblem

MAX_WORK = 2_000_000
"""Limit of the exchanges: fills times storages times positions. Small graphs are searched well, large ones stay fast. A
guess."""
SHARPNESS = 16
"""The power that turns a memory profile into one number: high enough that the highest positions decide."""


def relieve_peak(
    problem: TransferProblem,
    sources: Mapping[int, Sequence[int]],
    making_s: Mapping[int, float],
    *,
    moved: Placements,
    allowed_s: float,
    goal_bytes: int = 0,
    at: int | None = None,
) -> tuple[int, ...]:
    """Return the storages to recompute, in order.

    Args:
        sources: for each storage that can be recomputed, the storages that it is made from.
        making_s: the seconds of each recomputation.
        moved: what is offloaded. These stay offloaded; a recomputation that reads one brings it back earlier.
        allowed_s: the most seconds that all recomputations together may take.
        goal_bytes: stop when the peak is this low.
        at: relieve this position instead of the peak.
    """
    search = _Search(problem, sources, making_s, moved, allowed_s, goal_bytes, at)
    best = search.fill(())
    best_cost = search.cost(best)
    tries = MAX_WORK // max(1, len(search.idx) * len(problem.node_s)) if best else 0
    improved = True
    while improved:
        improved = False
        for turn in range(len(search.idx)):
            if tries == 0:
                break
            if turn in best:
                continue
            tries -= 1
            found = search.fill((*(other for other in best if other not in search.excludes[turn]), turn))
            cost = search.cost(found)
            if cost < best_cost:
                best, best_cost, improved = found, cost, True
    return tuple(sorted(search.idx[turn] for turn in best))


def find_floor_raisers(problem: TransferProblem, sources: Mapping[int, Sequence[int]]) -> set[int]:
    """The storages whose recomputation lifts the working-set floor, because it needs its sources where they would
    otherwise be away or dead."""
    profile = np.array(live_bytes(problem, place_all(problem)), dtype=np.int64)
    floor_bytes = int(profile.max(initial=0))
    by_idx = {movable.idx: movable for movable in problem.movables}

    def with_sources(wait: int, read: Sequence[int]) -> NDArray[np.int64]:
        needed = profile.copy()
        for source in (by_idx[idx] for idx in read if idx in by_idx):
            start, end = (source.live_end, wait + 1) if source.live_end <= wait else (wait, source.wait)
            needed[start:end] += source.size_bytes
        return needed

    return {
        idx
        for idx, read in sources.items()
        if idx in by_idx and with_sources(by_idx[idx].wait, read).max(initial=0) > floor_bytes
    }


class _Search:
    """Sets of storages, each given by its turn: its index among those that can be recomputed."""

    def __init__(
        self,
        problem: TransferProblem,
        sources: Mapping[int, Sequence[int]],
        making_s: Mapping[int, float],
        moved: Placements,
        allowed_s: float,
        goal_bytes: int,
        at: int | None,
    ) -> None:
        movables = [movable for movable in problem.movables if movable.idx in sources and movable.idx not in moved]
        self.idx = [movable.idx for movable in movables]
        self._by_idx = {movable.idx: movable for movable in problem.movables}
        self._sources = sources
        self._moved = moved
        self._allowed_s = allowed_s
        self._goal_bytes = goal_bytes
        self._at = at
        turn_of = {idx: turn for turn, idx in enumerate(self.idx)}
        self.excludes: list[set[int]] = [set() for _ in movables]
        """For each storage, those that cannot be recomputed beside it: its sources, and what is made from it."""
        for turn, idx in enumerate(self.idx):
            for source in sources[idx]:
                if source in turn_of:
                    self.excludes[turn].add(turn_of[source])
                    self.excludes[turn_of[source]].add(turn)
        self._gone_from = np.array([movable.earliest_release for movable in movables], dtype=np.int64)
        self._gone_until = np.array([movable.wait for movable in movables], dtype=np.int64)
        self._sizes = np.array([movable.size_bytes for movable in movables], dtype=np.int64)
        self._need_s = np.array([making_s[idx] for idx in self.idx], dtype=np.float64)
        self._bytes_per_s = self._sizes / np.maximum(self._need_s, 1e-12)
        self._profile = np.array(live_bytes(problem, moved), dtype=np.int64)

    def fill(self, turns: Sequence[int]) -> tuple[int, ...]:
        """Add storages to ``turns``. If these take too long already, the result is empty."""
        chosen = list(turns)
        left_s = self._allowed_s - float(self._need_s[chosen].sum()) if chosen else self._allowed_s
        if left_s < 0:
            return ()
        available = np.ones(len(self.idx), dtype=bool)
        for turn in chosen:
            available[[turn, *self.excludes[turn]]] = False
        profile = self._profile_with(chosen)
        while profile.max(initial=0) > self._goal_bytes:
            position = int(profile.argmax()) if self._at is None else self._at
            fits = available & (self._need_s <= left_s) & (self._gone_from <= position) & (position < self._gone_until)
            if not fits.any():
                break
            turn = int(np.where(fits, self._bytes_per_s, -1.0).argmax())
            left_s -= float(self._need_s[turn])
            chosen.append(turn)
            available[[turn, *self.excludes[turn]]] = False
            if any(source in self._moved for source in self._sources[self.idx[turn]]):
                profile = self._profile_with(chosen)
            else:
                profile[self._gone_from[turn] : self._gone_until[turn]] -= self._sizes[turn]
        return tuple(chosen)

    def cost(self, turns: Collection[int]) -> tuple[float, float]:
        """What to minimise: how high the profile is, mostly where it is highest; then the seconds."""
        if self._at is not None:
            return -float(self._sizes[list(turns)].sum()), float(self._need_s[list(turns)].sum())
        highest = max(1, int(self._profile.max(initial=0)))
        profile = np.maximum(self._profile_with(turns), self._goal_bytes) / highest
        return float((profile**SHARPNESS).sum()), float(self._need_s[list(turns)].sum())

    def _profile_with(self, turns: Collection[int]) -> NDArray[np.int64]:
        profile = self._profile.copy()
        back_at = {idx: placement.reload for idx, placement in self._moved.items()}
        for turn in turns:
            profile[self._gone_from[turn] : self._gone_until[turn]] -= self._sizes[turn]
            wait = int(self._gone_until[turn])
            for source in self._sources[self.idx[turn]]:
                if back_at.get(source, 0) > wait:
                    profile[wait : back_at[source]] += self._by_idx[source].size_bytes
                    back_at[source] = wait
        return profile
