"""Propose sets of saved storages to recompute in backward.

Recomputation changes the graph: it adds nodes, and the storages that these read live longer. Only a plan for the new
graph shows the effect on the peak. So a few sets are proposed, and the pipeline makes a plan for each:

- *Cheaper than moving.* The storages whose recomputation takes less compute-stream time than offloading them, and the
  same without chains. A chain that is recomputed as a whole saves no memory while its last storage is needed.
- *As many as possible.* All storages without chains, for an SSD that is too slow to offload the rest.
- *Without those that lift the floor.* The last two, without storages whose sources would have to be in memory where the
  working set is largest.
- *As many as the time allows.* Of these, the ones that relieve the peak most per second, until the time of
  ``max_slowdown`` is used up. A second set takes half of the time and leaves the other half to offloading.
- *What offloading has left.* The same, beside the offloads of the plan without recomputation, in the time that this
  plan leaves. So each storage is offloaded or recomputed, whichever is cheaper where it matters.

With a budget, the last two add storages until the peak is within the budget instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.analysis.analyse import Analysis
from ssdtrain_fx.passes.analysis.find_recomputations import (
    NoRecomputation,
    Recomputation,
    find_recomputations,
    judge_recomputations,
)
from ssdtrain_fx.passes.analysis.node_costs import estimate_node_seconds
from ssdtrain_fx.passes.planning.relieve_peak import find_floor_raisers, relieve_peak
from ssdtrain_fx.passes.planning.remakes import Remake
from ssdtrain_fx.passes.planning.simulate import ROUNDING
from ssdtrain_fx.passes.planning.transfer_problem import Placements, TransferProblem
from ssdtrain_fx.units import some_of

log = logging.getLogger(__name__)

TIME_SHARES = (1.0, 0.5)
"""Shares of the allowed time that recomputation may take; offloading gets the rest."""


def propose_recomputations(
    analysis: Analysis,
    problem: TransferProblem,
    *,
    hardware: Hardware,
    fused: bool,
    allowed_s: float,
    goal_bytes: int = 0,
    moved: Placements | None = None,
    exposed_s: float = 0.0,
) -> Sequence[tuple[Recomputation, ...]]:
    """Return the sets to plan for. No set is empty, and no two are equal.

    Args:
        problem: the problem of the same graph.
        fused: Inductor compiles the graph.
        allowed_s: the most time that the step may gain.
        goal_bytes: the peak that is low enough.
        moved: the offloads of the plan without recomputation, which expose ``exposed_s``. None: there is no such plan.
    """
    found = _optional(analysis, fused=fused)
    if not found:
        return ()
    making_s = _seconds(analysis, found, hardware)
    moving_s = {
        movable.idx: problem.blocks_out_s(movable.size_bytes) + problem.blocks_in_s(movable.size_bytes)
        for movable in problem.movables
    }
    cheap = {idx: one for idx, one in found.items() if making_s[idx] < moving_s.get(idx, 0.0)}
    sizes = {idx: interval.size_bytes for idx, interval in analysis.intervals.items()}

    def seconds_per_byte(one: Recomputation) -> tuple[float, int]:
        return making_s[one.storage_idx] / max(1, sizes.get(one.storage_idx, 0)), one.storage_idx

    ranked = sorted(found.values(), key=seconds_per_byte)
    ranked_cheap = [one for one in ranked if one.storage_idx in cheap]
    sources = {idx: one.sources for idx, one in found.items()}
    lifting = find_floor_raisers(problem, sources)
    proposed = [tuple(cheap.values())]
    for those in (ranked_cheap, ranked):
        proposed.append(_without_chains(those))
        proposed.append(_without_chains([one for one in those if one.storage_idx not in lifting]))

    def relieve(placements: Placements, time_s: float) -> None:
        chosen = relieve_peak(
            problem,
            sources,
            making_s,
            moved=placements,
            allowed_s=time_s + ROUNDING * problem.step_s,
            goal_bytes=goal_bytes,
            at=problem.marker if analysis.is_link else None,
        )
        proposed.append(tuple(found[idx] for idx in chosen))

    for share in TIME_SHARES:
        relieve({}, share * allowed_s)
    if moved:
        relieve(moved, allowed_s - exposed_s)
    return [chosen for chosen in dict.fromkeys(proposed) if chosen]


def pose_remakes(
    analysis: Analysis, problem: TransferProblem, *, hardware: Hardware, fused: bool
) -> tuple[Remake, ...]:
    """The recomputations that are possible, in numbers, for ``solve_exactly``."""
    found = _optional(analysis, fused=fused)
    making_s = _seconds(analysis, found, hardware)
    movable = {movable.idx for movable in problem.movables}
    return tuple(
        Remake(idx=idx, seconds=making_s[idx], sources=tuple(source for source in one.sources if source in movable))
        for idx, one in sorted(found.items())
        if idx in movable
    )


def wished_recomputations(analysis: Analysis, *, fused: bool) -> tuple[Recomputation, ...]:
    """The recomputations that option ``modules`` asks for. A warning names what cannot be recomputed, and why."""
    wished = [idx for idx, wish in analysis.wishes.items() if wish == "recompute"]
    if not wished:
        return ()
    judged = judge_recomputations(analysis.joint, analysis.alias_sets, analysis.candidates, fused=fused)
    refused = {idx: verdict.reason for idx in wished if isinstance(verdict := judged.get(idx), NoRecomputation)}
    if refused:
        storages = analysis.alias_sets.storages
        log.warning(
            "option modules asks to recompute %d storages that backward cannot recompute bit for bit. They are planned "
            "as if no pattern matched: %s",
            len(refused),
            some_of([f"{storages[idx].allocator.name} ({reason})" for idx, reason in sorted(refused.items())]),
        )
    verdicts = (judged.get(idx) for idx in sorted(wished))
    return tuple(verdict for verdict in verdicts if isinstance(verdict, Recomputation))


def _optional(analysis: Analysis, *, fused: bool) -> Mapping[int, Recomputation]:
    """What backward could recompute, but for what must be offloaded."""
    found = find_recomputations(analysis.joint, analysis.alias_sets, analysis.candidates, fused=fused)
    return {idx: one for idx, one in found.items() if analysis.wishes.get(idx) != "offload"}


def _seconds(analysis: Analysis, found: Mapping[int, Recomputation], hardware: Hardware) -> dict[int, float]:
    """The seconds of each recomputation. Each node is estimated by itself: how the copies will be fused is not known
    yet, so this is an upper bound."""
    node_s = estimate_node_seconds(analysis.joint, analysis.alias_sets, hardware, fused=False, facts=analysis.facts)
    seconds = dict(zip(analysis.joint.graph.nodes, analysis.measured.replace_in(analysis.joint, node_s), strict=True))
    return {idx: sum(seconds[node] for node in one.nodes) for idx, one in found.items()}


def _without_chains(ranked: Sequence[Recomputation]) -> tuple[Recomputation, ...]:
    """Greedily choose recomputations such that none reads a storage that another one recomputes."""
    made: set[int] = set()
    read: set[int] = set()
    chosen: list[Recomputation] = []
    for one in ranked:
        if one.storage_idx not in read and made.isdisjoint(one.sources):
            made.add(one.storage_idx)
            read.update(one.sources)
            chosen.append(one)
    return tuple(sorted(chosen, key=lambda one: one.storage_idx))
