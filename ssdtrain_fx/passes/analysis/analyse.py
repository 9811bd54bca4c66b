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
from ssdtrain_fx.passes.analysis.module_wishes import Modules, Wish, find_wishes, keep_as_wished
from ssdtrain_fx.passes.analysis.node_calls import CostSources, MeasuredNodes, Times, measure_nodes
from ssdtrain_fx.passes.analysis.node_costs import estimate_node_seconds
from ssdtrain_fx.passes.analysis.subgraph_calls import SubgraphCall, find_subgraph_calls
from ssdtrain_fx.passes.graph.alias_sets import AliasSets, find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph


@dataclasses.dataclass(frozen=True, slots=True)
class Analysis:
    """Facts about one graph. They are stale as soon as the graph is rewritten."""

    joint: ScheduledJointGraph
    alias_sets: AliasSets
    candidates: tuple[Candidate, ...]
    intervals: Mapping[int, LiveInterval]
    """The live interval of each storage if nothing moves, by index."""
    node_s: tuple[float, ...]
    """Seconds of every node."""
    activations: frozenset[fx.Node] = frozenset()
    """Inputs that may move. Empty unless the graph is a link of a chain."""
    measured: MeasuredNodes = dataclasses.field(default_factory=MeasuredNodes)
    """The nodes whose ``node_s`` were measured. All others are estimated by roofline."""
    facts: NodeFacts | None = None
    """The facts from which ``node_s`` were estimated, for later estimates."""
    wishes: Mapping[int, Wish] = dataclasses.field(default_factory=dict[int, Wish])
    """What option ``modules`` wishes for storages, by index."""
    subgraph_calls: Mapping[fx.Node, SubgraphCall] = dataclasses.field(default_factory=dict[fx.Node, SubgraphCall])
    """What the nodes take that call a subgraph. ``node_s`` has their seconds; ``intervals`` have no workspaces."""

    @property
    def cost_sources(self) -> CostSources:
        """How many of ``node_s`` were measured and how many estimated."""
        return self.measured.sources(self.node_s)


def analyse(
    joint: ScheduledJointGraph,
    *,
    min_tensor_bytes: int,
    hardware: Hardware,
    fused: bool,
    times: Times | None = None,
    modules: Modules = (),
) -> Analysis:
    """Run all analyses.

    Args:
        min_tensor_bytes: smaller storages stay in memory.
        hardware: the rates from which seconds are estimated.
        fused: True if Inductor compiles the graph. Fusion keeps some storages out of memory and saves kernels.
        times: measures the nodes that are not fused. None: all seconds are estimated by roofline.
        modules: what the user wishes for the storages of single modules.
    """
    alias_sets = find_alias_sets(joint.graph)
    activations = find_activations(joint)
    intervals = find_live_intervals(joint.graph, alias_sets, activations)
    facts = NodeFacts(joint, alias_sets)
    if fused:
        intervals = fuse_intervals(intervals, find_fused_kernels(joint, alias_sets, found=facts), alias_sets)
    node_s = estimate_node_seconds(joint, alias_sets, hardware, fused=fused, facts=facts)
    measured = MeasuredNodes() if times is None else measure_nodes(joint, alias_sets, times, fused=fused)
    candidates = find_candidates(joint, alias_sets, min_tensor_bytes=min_tensor_bytes, activations=activations)
    wishes = find_wishes(candidates, modules)
    calls = find_subgraph_calls(joint, hardware=hardware, fused=fused, times=times)
    node_s = tuple(
        calls[node].seconds if node in calls else seconds
        for node, seconds in zip(joint.graph.nodes, measured.replace_in(joint, node_s), strict=True)
    )
    return Analysis(
        joint=joint,
        alias_sets=alias_sets,
        candidates=keep_as_wished(candidates, wishes),
        intervals=intervals,
        node_s=node_s,
        facts=facts,
        activations=activations,
        measured=measured,
        wishes=wishes,
        subgraph_calls=calls,
    )
