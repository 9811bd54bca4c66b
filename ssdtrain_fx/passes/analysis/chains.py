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

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.planning.place_transfers import HASTES, Choice, place
from ssdtrain_fx.passes.planning.simulate import simulate
from ssdtrain_fx.passes.planning.transfer_problem import Movable, TransferProblem


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


def choose_most(problem: TransferProblem, *, max_slowdown: float) -> Choice:
    """The most bytes that can be away between forward and backward, for at most ``max_slowdown`` of the time.

    Where several storages cost the same per byte, those that are away longest come first: in backward, they are needed
    last. The simulation in the result is that of the graph alone, but its ``exposed_s`` is that of the chain.
    """
    allowed_s = max_slowdown * problem.step_s

    def price(movable: Movable) -> tuple[float, ...]:
        cost_s = problem.blocks_out_s(movable.size_bytes) + problem.blocks_in_s(movable.size_bytes)
        return (cost_s / max(1, movable.size_bytes), movable.earliest_release - movable.wait, movable.idx)

    chosen: list[Movable] = []
    for movable in sorted(problem.movables, key=price):
        if exposed_in_chain_s(problem, [*chosen, movable]) <= allowed_s:
            chosen.append(movable)
    placements = place(problem, chosen, HASTES[0])
    alone = simulate(problem, placements)
    forward_s = alone.start_s[problem.marker]
    in_chain = dataclasses.replace(
        alone,
        exposed_s=exposed_in_chain_s(problem, chosen),
        # What leaves at the end of forward may do so until the next forward has ended.
        release_stall_s={
            movable.idx: 2 * forward_s - alone.start_s[movable.complete]
            for movable in chosen
            if placements[movable.idx].release == problem.marker
        },
        wait_stall_s={},
    )
    return Choice(placements, in_chain, HASTES[0])


def exposed_in_chain_s(problem: TransferProblem, chosen: Sequence[Movable]) -> float:
    """How much longer each graph of a chain of alike ones takes when ``chosen`` move in each."""
    hardware = problem.hardware
    sizes = [movable.size_bytes for movable in chosen]
    write_s, read_s = sum(map(hardware.write.transfer_s, sizes)), sum(map(hardware.read.transfer_s, sizes))
    forward_s, backward_s = sum(problem.node_s[: problem.marker]), sum(problem.node_s[problem.marker :])
    longer_forward_s = max(sum(map(problem.blocks_out_s, sizes)), write_s - forward_s)
    longer_backward_s = max(sum(map(problem.blocks_in_s, sizes)), read_s - backward_s)
    return longer_forward_s + longer_backward_s + problem.recompute_s
