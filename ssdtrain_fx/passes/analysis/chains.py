"""Graphs that run in a chain: what a graph knows of the graphs before and after it, and what it should move.

Where each layer is compiled on its own (or a graph break cuts a model), a graph sees one layer only. Between its
forward and its backward other graphs run, and what *all* of them have saved is in memory at once:

    forward 1 -> forward 2 -> ... -> forward n,  backward n -> ... -> backward 2 -> backward 1
    [======================== what graph 1 has saved waits for that long =====================]

So the peak that one graph sees is not the peak of the model. What counts is what every graph leaves behind between its
two halves, and with n alike graphs each byte of it counts n times. Time is different too: what has not been written
when a forward ends is written while the next forward runs, and the reads of a backward begin while the backward before
it runs. Only the rates count:

    step of one graph = max(forward, its writes) + max(backward, its reads)

Nothing of the other graphs is known at compile time. A graph takes them to be like itself, which is what they are where
layers are compiled one by one.
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
    """Which inputs of a graph are activations: results of a computation that goes on in backward.

    Such an input has a history (it is no leaf). Parameters, buffers and data of the user are leaves: somebody holds
    them, so moving them would free nothing. So does, at times, the caller of an activation; nobody can tell beforehand.
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
    """The inputs that may move: activations, if the graph is a link of a chain; none otherwise.

    It is one if other graphs run before it, and between its forward and its backward. Before it, if an activation comes
    in. Behind it, if more than a loss goes out: then backward begins with a gradient that is no scalar.
    """
    tangents = [node.meta["val"] for node in joint.backward_inputs if _torch_private.is_tangent(node.meta.get("desc"))]
    if not any(isinstance(value, torch.Tensor) and value.dim() > 0 for value in tangents):
        return frozenset()
    # What AOTAutograd has merged or taken apart has no number.
    return frozenset(
        node
        for node in joint.graph.find_nodes(op="placeholder")
        if _torch_private.input_number(node.meta.get("desc")) in joint.activation_inputs
    )


def name_link(joint: ScheduledJointGraph) -> str:
    """A name that only graphs alike have in common, the same in every process."""
    values = ((node.name, node.meta.get("val")) for node in joint.graph.nodes)
    lines = [f"{name} {tuple(value.shape) if isinstance(value, torch.Tensor) else value}" for name, value in values]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
