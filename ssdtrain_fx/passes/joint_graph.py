"""The scheduled joint graph, for programs that write a pass: see :mod:`ssdtrain_fx.passes.graph.joint_graph`."""

from ssdtrain_fx.passes.graph.joint_graph import (
    JointPass,
    ScheduledJointGraph,
    backward_starts,
    join,
    split,
)

__all__ = ["JointPass", "ScheduledJointGraph", "backward_starts", "join", "split"]
