"""The scheduled joint graph: forward and backward in one graph, in execution order.

A partitioner returns two graphs. ``join`` merges them, so that a tensor that forward makes and backward reads is one
node with all its users. ``split`` separates the rewritten graph again, following AOTAutograd's calling convention.

    forward  (primals)        -> outputs, saved tensors, saved symbols
    backward (saved symbols, saved tensors, tangents) -> gradients

    joint    (primals, tangents):  forward nodes;  backward_starts();  backward nodes  -> ((outputs), (gradients))

The partitioner's own recomputations are already in the graphs: a recomputed node appears once in each half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument, map_arg

from ssdtrain_fx import _torch_private
from ssdtrain_fx.errors import InternalError

SAVED = "ssdtrain_saved"
"""Key in the metadata of nodes that the partitioner saves for backward, and of the offloads of such nodes."""
VIEWED_AT = "ssdtrain_viewed_at"
"""Key in the metadata of an offloaded node of which the partitioner saves only views: the name of the first view, then
those of the nodes before it, last first."""


def backward_starts() -> None:
    """Mark the end of forward and the start of backward in a scheduled joint graph. Does nothing when run."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledJointGraph:
    """Forward and backward in one graph. Passes rewrite ``gm`` in place; the other fields remain valid."""

    gm: fx.GraphModule
    saved: tuple[fx.Node, ...]
    """What the partitioner saved for backward, in its order: tensors first, symbols last."""

    backward_inputs: tuple[fx.Node, ...]
    """Placeholders that only backward has: tangents, and the seeds and states of random number generators."""

    activation_inputs: frozenset[int] = frozenset()
    """Indices of the compiled function's arguments that are results of other graphs, or of operators between graphs."""

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    @property
    def marker(self) -> fx.Node:
        """The ``backward_starts()`` node."""
        return self.graph.find_nodes(op="call_function", target=backward_starts)[0]

    @property
    def forward_outputs(self) -> Sequence[Argument]:
        return _output_pair(self.graph)[0]

    @property
    def gradients(self) -> Sequence[Argument]:
        return _output_pair(self.graph)[1]

    def positions(self) -> dict[fx.Node, int]:
        """Position of every node. Backward nodes come after the marker."""
        return {node: position for position, node in enumerate(self.graph.nodes)}

    def copy(self) -> tuple[ScheduledJointGraph, Mapping[fx.Node, fx.Node]]:
        """A copy of the graph that can be rewritten, and a map from each node to its copy."""
        gm, env = _torch_private.copy_graph(self.gm)
        saved, backward_inputs = (tuple(env[node] for node in nodes) for nodes in (self.saved, self.backward_inputs))
        return dataclasses.replace(self, gm=gm, saved=saved, backward_inputs=backward_inputs), env

    def text(self) -> str:
        """The graph as readable Python with shapes and strides."""
        return self.gm.print_readable(print_output=False, include_stride=True, include_device=False)


JointPass = Callable[[ScheduledJointGraph], ScheduledJointGraph]
"""A pass: it may rewrite the graph in place, or return another one. Options of a pass are keyword-only parameters."""


def join(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    num_forward_outputs: int,
    activation_inputs: frozenset[int] = frozenset(),
) -> ScheduledJointGraph:
    """Build the scheduled joint graph of a partitioned training step.

    Args:
        forward: returns ``num_forward_outputs`` outputs, then what it saves for backward.
        backward: takes the saved symbols, the other saved values, and then its own inputs (tangents, ...).

    Raises:
        InternalError: the two graphs do not fit together.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    forward_results = _outputs(forward.graph)
    saved = [node for node in forward_results[num_forward_outputs:] if isinstance(node, fx.Node)]
    placeholders = backward.graph.find_nodes(op="placeholder")
    if len(saved) != len(forward_results) - num_forward_outputs or len(saved) > len(placeholders):
        raise InternalError(
            f"Forward saves {forward_results[num_forward_outputs:]}. These must be nodes, and no more than the "
            f"placeholders of backward, {placeholders}."
        )
    # Match by position, as the runtime passes them: functionalised random states have different names in the halves.
    received = [node for node in saved if is_symbol(node)] + [node for node in saved if not is_symbol(node)]
    own_placeholders = placeholders[len(saved) :]

    def copy(nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node.op != "output" and node not in env:
                env[node] = graph.node_copy(node, env.__getitem__)
                env[node].meta = dict(node.meta)

    copy(forward.graph.find_nodes(op="placeholder"))
    copy(own_placeholders)
    copy(forward.graph.nodes)
    graph.call_function(backward_starts)
    for node in saved:
        env[node].meta[SAVED] = True
    env.update({mine: env[theirs] for mine, theirs in zip(placeholders, received, strict=False)})
    copy(backward.graph.nodes)

    output = graph.output(
        (
            tuple(_map(value, env) for value in forward_results[:num_forward_outputs]),
            tuple(_map(value, env) for value in _outputs(backward.graph)),
        )
    )
    output.meta["desc"] = (_descriptors(forward.graph)[:num_forward_outputs], _descriptors(backward.graph))
    gm = _torch_private.graph_module(_attributes(forward, backward), graph, "ScheduledJointGraph")
    gm.meta = dict(forward.meta)
    return ScheduledJointGraph(
        gm=gm,
        saved=tuple(env[node] for node in saved),
        backward_inputs=tuple(env[node] for node in own_placeholders),
        activation_inputs=activation_inputs,
    )


def split(joint: ScheduledJointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph: every forward value that backward still reads becomes a saved value.

    New saved tensors (tokens) come first, then the partitioner's in its order, then symbols: AOTAutograd expects
    tensors without a version check to be the last tensors. All symbols that the partitioner saved stay saved, because
    they bind sizes that no node mentions.
    """
    nodes = list(joint.graph.nodes)
    boundary = nodes.index(joint.marker)
    forward_nodes, backward_nodes = nodes[:boundary], nodes[boundary + 1 : -1]
    saved = find_saved(joint)
    values = [node for node in saved if not is_symbol(node)]
    symbols = [node for node in saved if is_symbol(node)]
    descriptors = joint.graph.output_node().meta["desc"]
    forward = _extract(
        joint.gm,
        [node for node in forward_nodes if node.op == "placeholder" and node not in joint.backward_inputs],
        forward_nodes,
        [*joint.forward_outputs, *values, *symbols],
        [*descriptors[0], *_torch_private.saved_descriptors([*values, *symbols])],
    )
    backward = _extract(
        joint.gm,
        [*symbols, *values, *joint.backward_inputs],
        [node for node in forward_nodes if node.op == "get_attr"] + backward_nodes,
        list(joint.gradients),
        descriptors[1],
    )
    for node in backward.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            node.meta["autograd_backward"] = True
    return forward, backward


def find_saved(joint: ScheduledJointGraph) -> tuple[fx.Node, ...]:
    """What backward reads of forward, and all symbols that the partitioner saved: values first, then symbols.

    New values come before those that the partitioner saved, new symbols after them.
    """
    nodes = list(joint.graph.nodes)
    boundary = nodes.index(joint.marker)
    in_backward = set(nodes[boundary + 1 : -1])
    gradients = {node for node in joint.gradients if isinstance(node, fx.Node)}
    backward_inputs = set(joint.backward_inputs)
    forward = [node for node in nodes[:boundary] if node.op != "get_attr" and node not in backward_inputs]
    read = dict.fromkeys(node for node in forward if node in gradients or not in_backward.isdisjoint(node.users))
    values = [node for node in joint.saved if not is_symbol(node) and node in read]
    symbols = [node for node in joint.saved if is_symbol(node)]
    known = {*joint.saved}
    new = [node for node in read if node not in known]
    return (
        *(node for node in new if not is_symbol(node)),
        *values,
        *symbols,
        *(node for node in new if is_symbol(node)),
    )


def _extract(
    gm: fx.GraphModule,
    inputs: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    outputs: Sequence[Argument],
    descriptors: Sequence[object],
) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in nodes:
        if node.op not in ("placeholder", "output") and node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].meta = dict(node.meta)
    output = graph.output(tuple(_map(value, env) for value in outputs))
    output.meta["desc"] = list(descriptors)
    output.meta["output_stack_traces"] = [
        value.meta.get("stack_trace") if isinstance(value, fx.Node) else None for value in outputs
    ]
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    graph.lint()
    extracted = _torch_private.graph_module(gm, graph, "GraphModule")
    extracted.meta = dict(gm.meta)
    return extracted


def is_symbol(node: fx.Node) -> bool:
    """Is the value of this node a number that is known at run time only?"""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _outputs(graph: fx.Graph) -> Sequence[Argument]:
    results = graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    return results


def _output_pair(graph: fx.Graph) -> tuple[Sequence[Argument], Sequence[Argument]]:
    forward, gradients = _outputs(graph)
    assert isinstance(forward, (tuple, list)) and isinstance(gradients, (tuple, list))
    return forward, gradients


def _descriptors(graph: fx.Graph) -> list[object]:
    output = graph.output_node()
    return list(output.meta.get("desc", [None] * len(_outputs(graph))))


def _map(value: Argument, env: Mapping[fx.Node, fx.Node]) -> Argument:
    return map_arg(value, env.__getitem__)


def _attributes(forward: fx.GraphModule, backward: fx.GraphModule) -> dict[str, Any]:
    """Every attribute that a ``get_attr`` node of either graph names. Both come from one module, so the names agree."""
    found: dict[str, Any] = {}
    for gm in (forward, backward):
        for node in gm.graph.find_nodes(op="get_attr"):
            name = str(node.target)
            value = attrgetter(name)(gm)
            if found.setdefault(name, value) is not value:
                raise InternalError(f"Forward and backward both have an attribute {name!r}, with different values.")
    return found
