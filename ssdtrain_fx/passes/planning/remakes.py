"""Recomputation in the planning problem: which storages backward may recompute, in numbers.

A recomputed storage is freed after its last read in forward, and its nodes run again right before its first
read in backward. They read other storages, which have to be in memory by then: if one of them is offloaded, its wait
moves there.

The planner does not decide from these numbers. It plans for rewritten graphs, which also show how copies are fused and
which temporaries they need. ``solve_exactly`` decides from them, to evaluate the planner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ssdtrain_fx.passes.planning.transfer_problem import TransferProblem


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Remake:
    """A movable that backward may recompute."""

    idx: int
    seconds: float
    """Time that its nodes take when they run again."""
    sources: tuple[int, ...]
    """Other movables that they read. None of these may be recomputed as well."""


def with_remakes(problem: TransferProblem, chosen: Sequence[Remake]) -> TransferProblem:
    """The problem that is left when the storages in ``chosen`` are recomputed.

    Raises:
        ValueError: one of them is made from another.
    """
    made = {one.idx for one in chosen}
    if any(not made.isdisjoint(one.sources) for one in chosen):
        raise ValueError(f"storages {sorted(made)} are made from each other.")
    by_idx = {movable.idx: movable for movable in problem.movables}
    node_s, fixed_live_bytes = list(problem.node_s), list(problem.fixed_live_bytes)
    for one in chosen:
        movable = by_idx[one.idx]
        node_s[movable.wait] += one.seconds
        for start, end in ((movable.live_start, movable.earliest_release), (movable.wait, movable.live_end)):
            for position in range(start, end):
                fixed_live_bytes[position] += movable.size_bytes
        for source in one.sources:
            if source in by_idx:
                read = by_idx[source]
                by_idx[source] = dataclasses.replace(
                    read, wait=min(read.wait, movable.wait), live_end=max(read.live_end, movable.wait + 1)
                )
    return dataclasses.replace(
        problem,
        node_s=tuple(node_s),
        fixed_live_bytes=tuple(fixed_live_bytes),
        movables=tuple(by_idx[movable.idx] for movable in problem.movables if movable.idx not in made),
        recompute_s=problem.recompute_s + sum(one.seconds for one in chosen),
    )
