"""Mark sums that are to be stored where they stand, though Inductor would compute them where they are read.

    g1, g2 = mm(...), mm(...)
    s = add(g1, g2)           # the gradient of something that every layer reads ...
    ...                       # the backward of a layer
    g3 = mm(...)
    t = add(s, g3)            # ... Inductor: g1 + g2 + g3, so g1 and g2 live until here

T5 has two such things, what the encoder returns and the bias of all attention scores: with six layers, 72 MiB at the
peak of 8 x 512. A marked sum is stored: ``s`` lives instead of ``g1`` and ``g2``, for one more pass over its memory.

Marked are sums that wait for :data:`WAITS_FOR_KERNELS` kernels or more, and of which both terms die with them. Their
numbers stay the same, since what is added has the type of the result: a smaller one would be rounded when it is stored.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.analysis.fused_kernels import STORED, NodeFacts
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.graph.op_kinds import Kind
from ssdtrain_fx.passes.graph.tensor_sizes import Shape, shape_of

WAITS_FOR_KERNELS = 8
"""The backward of a layer has more matrix products. What a layer adds up within itself does not live for long."""


def store_sums(joint: ScheduledJointGraph) -> ScheduledJointGraph:
    """Mark nodes of backward in ``joint``, in place."""
    positions = joint.positions()
    marker = positions[joint.marker]
    sums = [positions[node] for node in joint.graph.nodes if positions[node] > marker and _adds_equals(node)]
    if not sums:
        return joint
    found = NodeFacts(joint, find_alias_sets(joint.graph))
    facts, users = found.facts, found.users
    kernels_until = list(itertools.accumulate(fact.kind is Kind.KERNEL for fact in facts))

    def dies(node: fx.Node, reader: int, elements: int) -> bool:
        """Does so much memory become free when ``reader``, which needs the value of ``node``, is stored?"""
        while facts[positions[node]].kind is Kind.FREE and node.all_input_nodes:
            node = node.all_input_nodes[0]
        position = positions[node]
        if position < marker or facts[position].kind is Kind.FREE or set(users[position]) != {reader}:
            return False
        if facts[position].kind is Kind.POINTWISE and STORED not in node.meta:  # computed in ``reader``
            return any(dies(source, position, elements) for source in node.all_input_nodes)
        return math.prod(shape_of(node.meta["val"])) == elements

    for position in sums:
        node = facts[position].node
        first = min(users[position], default=position)
        if first == len(facts) - 1 or kernels_until[first - 1] - kernels_until[position] < WAITS_FOR_KERNELS:
            continue
        if all(dies(term, position, math.prod(facts[position].shape)) for term in node.all_input_nodes):
            node.meta[STORED] = node.meta[_torch_private.REALIZE_TO_STRIDES] = True
    return joint


def _adds_equals(node: fx.Node) -> bool:
    """Is it the sum of two tensors like its result, whose type is the one that Inductor computes with?"""
    if str(node.target) != "aten.add.Tensor" or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    kinds: set[tuple[torch.dtype, Shape]] = set()
    for argument in (node, *node.all_input_nodes):
        value = argument.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float64):
            return False
        kinds.add((value.dtype, shape_of(value)))
    return len(kinds) == 1
