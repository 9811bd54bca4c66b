"""What the planner knows about a scheduled joint graph: aliases, candidates, live intervals, seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import fx

from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.analysis.candidates import Candidate, find_candidates
from ssdtrain_fx.passes.analysis.chains import find_activations
from ssdtrain_fx.passes.analysis.fuse_intervals import fuse_intervals
from ssdtrain_fx.passes.analysis.fused_kernels import NodeFacts, find_fused_kernels
from ssdtrain_fx.passes.analysis.liveness import LiveInterval, find_live_intervals
from ssdtrain_fx.passes.analysis.node_calls import CostSources, MeasuredNodes, Times, measure_nodes
from ssdtrain_fx.passes.analysis.node_costs import estimate_node_seconds
from ssdtrain_fx.passes.graph.alias_sets import AliasSets, find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph


@dataclasses.dataclass(frozen=True, slots=True)
class Analysis:
    """Facts about one graph; stale as soon as the graph is rewritten."""

    joint: ScheduledJointGraph
    alias_sets: AliasSets
    candidates: tuple[Candidate, ...]
    intervals: Mapping[int, LiveInterval]
    """When each storage is live if nothing moves, by its index."""
    node_s: tuple[float, ...]
    """Seconds of every node."""
    activations: frozenset[fx.Node] = frozenset()
    """Inputs that may move. Empty unless the graph is one of a chain."""
    measured: MeasuredNodes = dataclasses.field(default_factory=MeasuredNodes)
    """Which of ``node_s`` were measured; all others are by roofline."""
    facts: NodeFacts | None = None
    """What ``node_s`` were estimated from, for whoever estimates again."""

    @property
    def cost_sources(self) -> CostSources:
        """Where ``node_s`` come from."""
        return self.measured.sources(self.node_s)


def analyse(
    joint: ScheduledJointGraph,
    *,
    min_tensor_bytes: int,
    hardware: Hardware,
    fused: bool,
    times: Times | None = None,
) -> Analysis:
    """Run all analyses.

    Args:
        min_tensor_bytes: storages smaller than this are no candidates.
        hardware: gives the rates behind the seconds.
        fused: the graph will be compiled by Inductor, which keeps some storages out of memory and saves kernels.
        times: measured times of what is not fused. None: all is by roofline.
    """
    alias_sets = find_alias_sets(joint.graph)
    activations = find_activations(joint)
    intervals = find_live_intervals(joint.graph, alias_sets, activations)
    facts = NodeFacts(joint, alias_sets)
    if fused:
        intervals = fuse_intervals(intervals, find_fused_kernels(joint, alias_sets, found=facts), alias_sets)
    node_s = estimate_node_seconds(joint, alias_sets, hardware, fused=fused, facts=facts)
    measured = MeasuredNodes() if times is None else measure_nodes(joint, alias_sets, times, fused=fused)
    return Analysis(
        joint=joint,
        alias_sets=alias_sets,
        candidates=find_candidates(joint, alias_sets, min_tensor_bytes=min_tensor_bytes, activations=activations),
        intervals=intervals,
        node_s=measured.replace_in(joint, node_s),
        facts=facts,
        activations=activations,
        measured=measured,
    )
