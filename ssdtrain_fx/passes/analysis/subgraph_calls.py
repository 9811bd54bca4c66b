"""What a call of a subgraph takes: its seconds, and the memory that it needs while it runs.

A graph may call another graph as one node. torch's auto-chunker makes such calls, one for each chunk of a loss head.
The subgraph is analysed like any other graph, once for all of its calls:

    0  y, s = call(head, x, w)      returns 2 MiB, and holds 18 MiB at its own peak: a workspace of 16 MiB
         a = mm(x, w)               8 MiB
         b = exp(a)                 8 MiB
         return mm(b, w), sum(b)

A workspace exists only at the position of its call. It has no storage in the calling graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.analysis.estimates import estimate
from ssdtrain_fx.passes.analysis.node_calls import Times
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.planning.live_intervals import memory_profile
from ssdtrain_fx.passes.planning.transfer_problem import add_up


@dataclasses.dataclass(frozen=True, slots=True)
class SubgraphCall:
    """What one call of a subgraph takes."""

    seconds: float
    workspace_bytes: int
    """The peak of the subgraph, without its arguments and results."""


def workspace_name(call: fx.Node) -> str:
    """The name of the workspace of ``call`` in reports. Nodes have no such names."""
    return f"inside {call.name}"


def find_subgraph_calls(
    joint: ScheduledJointGraph, *, hardware: Hardware, fused: bool, times: Times | None = None
) -> Mapping[fx.Node, SubgraphCall]:
    """What every node takes that calls a subgraph. Arguments as for ``analyse``."""
    calls: dict[fx.Node, SubgraphCall] = {}
    known: dict[str, SubgraphCall] = {}
    for node in joint.graph.nodes:
        name = _torch_private.called_subgraph(node)
        if name is None:
            continue
        if name not in known:
            subgraph = joint.gm.get_submodule(name)
            assert isinstance(subgraph, fx.GraphModule)
            known[name] = _analyse(subgraph, hardware, fused, times)
        calls[node] = known[name]
    return calls


def _analyse(subgraph: fx.GraphModule, hardware: Hardware, fused: bool, times: Times | None) -> SubgraphCall:
    inside = ScheduledJointGraph(gm=subgraph, saved=(), backward_inputs=())
    found = estimate(inside, hardware=hardware, fused=fused, times=times)
    profile = memory_profile(found.intervals.values(), len(found.node_s))
    returned_bytes = profile.live_bytes[-1]
    return SubgraphCall(add_up(found.node_s), profile.peak_bytes - returned_bytes)
