"""Propose sets of saved storages to recompute in backward.

Recomputation changes the graph: it adds nodes, and the storages that these read live longer. Only a plan for the new
graph shows the effect on the peak. So a few sets are proposed, and the pipeline makes a plan for each:

- The storages whose recomputation takes less compute-stream time than offloading them. The rule is applied to each
  storage by itself, because both options spend compute-stream time.
- A subset of these, and a subset of all storages that can be recomputed, in which no storage is recomputed from
  another. The cheapest per byte are chosen first. A chain that is recomputed as a whole saves no memory while its last
  storage is needed. These subsets are for an SSD that is too slow to offload the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.analysis.analyse import Analysis
from ssdtrain_fx.passes.analysis.find_recomputations import Recomputation, find_recomputations
from ssdtrain_fx.passes.analysis.node_costs import estimate_node_seconds
from ssdtrain_fx.passes.planning.transfer_problem import TransferProblem


def propose_recomputations(
    analysis: Analysis, problem: TransferProblem, *, hardware: Hardware, fused: bool
) -> Sequence[tuple[Recomputation, ...]]:
    """Return the sets to plan for. No set is empty, and no two are equal.

    Args:
        problem: the problem of the same graph.
        fused: Inductor compiles the graph.
    """
    found = find_recomputations(analysis.joint, analysis.alias_sets, analysis.candidates, fused=fused)
    if not found:
        return ()
    # Each node is estimated by itself. How the copies will be fused is not known yet, so this is an upper bound.
    node_s = estimate_node_seconds(analysis.joint, analysis.alias_sets, hardware, fused=False, facts=analysis.facts)
    seconds = dict(zip(analysis.joint.graph.nodes, analysis.measured.replace_in(analysis.joint, node_s), strict=True))
    moving_s = {
        movable.idx: problem.blocks_out_s(movable.size_bytes) + problem.blocks_in_s(movable.size_bytes)
        for movable in problem.movables
    }
    making_s = {idx: sum(seconds[node] for node in one.nodes) for idx, one in found.items()}
    cheap = {idx: one for idx, one in found.items() if making_s[idx] < moving_s.get(idx, 0.0)}
    sizes = {idx: interval.size_bytes for idx, interval in analysis.intervals.items()}

    def seconds_per_byte(one: Recomputation) -> tuple[float, int]:
        return making_s[one.storage_idx] / max(1, sizes.get(one.storage_idx, 0)), one.storage_idx

    ranked = sorted(found.values(), key=seconds_per_byte)
    ranked_cheap = [one for one in ranked if one.storage_idx in cheap]
    proposed = (tuple(cheap.values()), _without_chains(ranked_cheap), _without_chains(ranked))
    return [chosen for chosen in dict.fromkeys(proposed) if chosen]


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
