"""Which sets of saved storages are worth planning for as made again in backward.

Recomputation changes the graph: there are more nodes, and what these read lives longer. What that does to the peak
only a plan for the new graph tells, so a few sets are proposed, and the pipeline plans for each of them:

- what is made again in less time of the compute stream than moving it takes. The rule is per storage: the compute
  stream is what both spend;
- of these, and of everything that can be made again, a part in which no storage is made from another one of the part,
  the cheapest per byte first. A chain that is made again as a whole saves nothing while its last storage is needed.
  This is for an SSD that is too slow to move the rest.
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
    """Sets to plan for, none of them empty, no two equal.

    Args:
        problem: posed for the same graph.
        fused: Inductor compiles the graph.
    """
    found = find_recomputations(analysis.joint, analysis.alias_sets, analysis.candidates, fused=fused)
    if not found:
        return ()
    # Node by node: what a copy is fused with is not known yet, so this is the most that it takes.
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
    """As many of the first ones as possible that neither read what another one makes nor make what it reads."""
    made: set[int] = set()
    read: set[int] = set()
    chosen: list[Recomputation] = []
    for one in ranked:
        if one.storage_idx not in read and made.isdisjoint(one.sources):
            made.add(one.storage_idx)
            read.update(one.sources)
            chosen.append(one)
    return tuple(sorted(chosen, key=lambda one: one.storage_idx))
