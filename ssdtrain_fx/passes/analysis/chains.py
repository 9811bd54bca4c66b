"""Graphs that run in a chain: what a graph knows about the graphs before and after it, and what it should move.

If each layer is compiled separately (or a graph break splits a model), a graph sees only one layer. Other graphs run
between its forward and its backward, and what *all* of them have saved is in memory at once:

    forward 1 -> forward 2 -> ... -> forward n,  backward n -> ... -> backward 2 -> backward 1
    [==================== the saved tensors of graph 1 are in memory this long ================]

So the peak that one graph sees is not the peak of the model. The model's peak depends on what every graph keeps in
memory between its two halves. With n equal graphs, each byte of that counts n times. Timing differs too. Writes that
have not finished when a forward ends continue while the next forward runs. The reads of a backward begin while the
backward before it runs. So only the rates count:

    step of one graph = max(forward, its writes) + max(backward, its reads)

Nothing about the other graphs is known at compile time. A graph assumes that they are equal to itself, which is true if
layers are compiled one by one, and for the micro-batches that a stage of a pipeline holds at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph


def find_activation_inputs(example_inputs: Sequence[Any]) -> frozenset[int]:
    """Indices of the inputs that are activations: results of a computation that backward continues through.

    An activation has an autograd history, so it is not a leaf. Parameters, buffers and user data are leaves: something
    outside holds them, so moving them would free nothing. Sometimes the caller also holds an activation, which cannot
    be known in advance.
    """
    return frozenset(
        number
        for number, value in enumerate(example_inputs)
        if isinstance(value, torch.Tensor)
        and not isinstance(value, torch.nn.Parameter)
        and value.is_floating_point()
        and value.requires_grad
        and not value.is_leaf
    )


def find_activations(joint: ScheduledJointGraph) -> frozenset[fx.Node]:
    """The inputs that may move: activations if the graph is a link of a chain, otherwise none.

    A graph is a link if other graphs run before it, and between its forward and its backward. Graphs run before it if
    an input is an activation. Graphs run after it if it returns more than a loss, so that backward starts from a
    gradient that is not a scalar.
    """
    tangents = [node.meta["val"] for node in joint.backward_inputs if _torch_private.is_tangent(node.meta.get("desc"))]
    if not any(isinstance(value, torch.Tensor) and value.dim() > 0 for value in tangents):
        return frozenset()
    # Inputs that AOTAutograd has merged or split have no number.
    return frozenset(
        node
        for node in joint.graph.find_nodes(op="placeholder")
        if _torch_private.input_number(node.meta.get("desc")) in joint.activation_inputs
    )


def name_graph(joint: ScheduledJointGraph) -> str:
    """A name that only equal graphs share. It is the same in every process."""
    values = ((node.name, node.meta.get("val")) for node in joint.graph.nodes)
    lines = [f"{name} {tuple(value.shape) if isinstance(value, torch.Tensor) else value}" for name, value in values]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
