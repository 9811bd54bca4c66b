"""What a graph takes if nothing moves: when each storage is in memory, and the seconds of every node."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import fx

from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.analysis.fuse_intervals import find_reads, fuse_intervals
from ssdtrain_fx.passes.analysis.fused_kernels import NodeFacts, find_fused_kernels
from ssdtrain_fx.passes.analysis.layout_copies import LayoutCopy, find_layout_copies
from ssdtrain_fx.passes.analysis.liveness import LiveInterval, find_live_intervals
from ssdtrain_fx.passes.analysis.node_calls import MeasuredNodes, Times, measure_nodes
from ssdtrain_fx.passes.analysis.node_costs import estimate_node_seconds
from ssdtrain_fx.passes.graph.alias_sets import AliasSets, find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph


@dataclasses.dataclass(frozen=True, slots=True)
class Estimates:
    """The storages and the times of one graph."""

    alias_sets: AliasSets
    intervals: Mapping[int, LiveInterval]
    """The live interval of each storage, by index."""
    reads: Mapping[int, Sequence[int]]
    """Where fused kernels read each storage, by index. Empty if nothing is fused: then nodes read where they stand."""
    layout_copies: tuple[LayoutCopy, ...]
    """Copies of inputs that are not in the graph."""
    node_s: tuple[float, ...]
    """Seconds of every node."""
    facts: NodeFacts
    """The facts from which ``node_s`` were estimated."""
    measured: MeasuredNodes
    """The nodes whose ``node_s`` were measured. All others are estimated by roofline."""


def estimate(
    joint: ScheduledJointGraph,
    *,
    hardware: Hardware,
    fused: bool,
    times: Times | None,
    activations: frozenset[fx.Node] = frozenset(),
) -> Estimates:
    """Find live intervals and times. Arguments as for ``analyse``."""
    alias_sets = find_alias_sets(joint.graph)
    facts = NodeFacts(joint, alias_sets, for_gpu=hardware.is_gpu)
    reads: dict[int, list[int]] = {}
    copies: tuple[LayoutCopy, ...] = ()
    if fused:
        kernels = find_fused_kernels(facts)
        reads = find_reads(facts, kernels)
        copies = find_layout_copies(facts)
        intervals = fuse_intervals(joint.graph, alias_sets, facts, kernels, reads, activations)
    else:
        intervals = find_live_intervals(joint.graph, alias_sets, activations)
    node_s = estimate_node_seconds(joint, alias_sets, hardware, fused=fused, facts=facts)
    measured = MeasuredNodes() if times is None else measure_nodes(joint, alias_sets, times, fused=fused)
    return Estimates(alias_sets, intervals, reads, copies, measured.replace_in(joint, node_s), facts, measured)
