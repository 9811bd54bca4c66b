"""What the planner knows about a scheduled joint graph: aliases, candidates, live intervals, seconds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from torch import fx

from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.analysis.candidates import Candidate, find_candidates
from ssdtrain_fx.passes.analysis.chains import find_activations
from ssdtrain_fx.passes.analysis.checkpoint_wishes import must_offload
from ssdtrain_fx.passes.analysis.estimates import estimate
from ssdtrain_fx.passes.analysis.fused_kernels import NodeFacts
from ssdtrain_fx.passes.analysis.kernel_workspaces import find_kernel_workspaces
from ssdtrain_fx.passes.analysis.layout_copies import LayoutCopy
from ssdtrain_fx.passes.analysis.liveness import LiveInterval
from ssdtrain_fx.passes.analysis.module_wishes import Modules, Wish, find_wishes, keep_as_wished
from ssdtrain_fx.passes.analysis.node_calls import CostSources, MeasuredNodes, Times
from ssdtrain_fx.passes.analysis.subgraph_calls import SubgraphCall, find_subgraph_calls, workspace_name
from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Facts about one graph. They are stale as soon as the graph is rewritten."""

    joint: ScheduledJointGraph
    alias_sets: AliasSets
    candidates: tuple[Candidate, ...]
    intervals: Mapping[int, LiveInterval]
    """The live interval of each storage if nothing moves, by index."""
    node_s: tuple[float, ...]
    """Seconds of every node."""
    reads: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict[int, Sequence[int]])
    """Where fused kernels read each storage, by index. Empty if nothing is fused: then nodes read where they stand."""
    layout_copies: tuple[LayoutCopy, ...] = ()
    """Copies of inputs that are not in the graph."""
    activations: frozenset[fx.Node] = frozenset()
    """Inputs that may move. Empty unless the graph is a link of a chain."""
    is_link: bool = False
    """The graph is a link of a chain, so what it holds between forward and backward counts, and not its own peak."""
    measured: MeasuredNodes = dataclasses.field(default_factory=MeasuredNodes)
    """The nodes whose ``node_s`` were measured. All others are estimated by roofline."""
    facts: NodeFacts | None = None
    """The facts from which ``node_s`` were estimated, for later estimates."""
    wishes: Mapping[int, Wish] = dataclasses.field(default_factory=dict[int, Wish])
    """What selective checkpoints and option ``modules`` wish for storages, by index."""
    subgraph_calls: Mapping[fx.Node, SubgraphCall] = dataclasses.field(default_factory=dict[fx.Node, SubgraphCall])
    """What the nodes take that call a subgraph. ``node_s`` has their seconds; ``intervals`` have no workspaces."""
    kernel_workspaces: Mapping[fx.Node, int] = dataclasses.field(default_factory=dict[fx.Node, int])
    """The bytes that kernels need besides their arguments and results. ``intervals`` do not have them."""

    @functools.cached_property
    def extras(self) -> Mapping[str, LiveInterval]:
        """What is in memory beside the storages of the graph, by name: workspaces of subgraphs, layout copies, and
        workspaces of kernels.

        Their ``storage_idx`` is no storage's. That of a subgraph's workspace is negative."""
        positions, count = self.joint.positions(), len(self.alias_sets.storages)
        subgraphs = {
            workspace_name(node): LiveInterval(-1 - at, positions[node], positions[node] + 1, call.workspace_bytes)
            for at, (node, call) in enumerate(self.subgraph_calls.items())
        }
        copies = {
            f"channels-last copy of {copy.source.name}": LiveInterval(count + at, copy.start, copy.end, copy.size_bytes)
            for at, copy in enumerate(self.layout_copies)
        }
        kernels = {
            workspace_name(node): LiveInterval(count + at, positions[node], positions[node] + 1, size_bytes)
            for at, (node, size_bytes) in enumerate(self.kernel_workspaces.items(), len(copies))
        }
        return {**subgraphs, **copies, **kernels}

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
    in_flight: int = 1,
) -> Analysis:
    """Run all analyses.

    Args:
        min_tensor_bytes: smaller storages stay in memory.
        hardware: the rates from which seconds are estimated.
        fused: True if Inductor compiles the graph. Fusion keeps some storages out of memory and saves kernels.
        times: measures the nodes that are not fused. None: all seconds are estimated by roofline.
        modules: what the user wishes for the storages of single modules.
        in_flight: how many forwards of the graph run before the first of their backwards. With several, the graph is a
            link of a chain whose other links are these forwards.
    """
    activations = find_activations(joint)
    found = estimate(joint, hardware=hardware, fused=fused, times=times, activations=activations)
    calls = find_subgraph_calls(joint, hardware=hardware, fused=fused, times=times)
    node_s = tuple(
        calls[node].seconds if node in calls else seconds
        for node, seconds in zip(joint.graph.nodes, found.node_s, strict=True)
    )
    analysis = Analysis(
        joint=joint,
        alias_sets=found.alias_sets,
        candidates=(),
        intervals=found.intervals,
        reads=found.reads,
        layout_copies=found.layout_copies,
        node_s=node_s,
        facts=found.facts,
        activations=activations,
        is_link=bool(activations) or in_flight > 1,
        measured=found.measured,
        wishes={},
        subgraph_calls=calls,
        kernel_workspaces={} if hardware.is_gpu else find_kernel_workspaces(joint.graph),
    )
    return with_candidates(analysis, min_tensor_bytes=min_tensor_bytes, modules=modules)


def with_candidates(analysis: Analysis, *, min_tensor_bytes: int, modules: Modules) -> Analysis:
    """The same analysis with the candidates of other options. For these, see :func:`analyse`."""
    candidates = find_candidates(
        analysis.joint, analysis.alias_sets, min_tensor_bytes=min_tensor_bytes, activations=analysis.activations
    )
    wishes = must_offload(candidates) | find_wishes(candidates, modules)
    return dataclasses.replace(analysis, candidates=keep_as_wished(candidates, wishes), wishes=wishes)
