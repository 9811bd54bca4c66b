"""Mark sums that are to be stored at their position, where Inductor would otherwise compute them at their reader.

    g1, g2 = mm(...), mm(...)
    s = add(g1, g2)           # the gradient of a tensor that every layer reads
    ...                       # the backward of a layer
    g3 = mm(...)
    t = add(s, g3)            # Inductor: g1 + g2 + g3, so g1 and g2 live until here

T5 has two tensors of this kind: the output of the encoder, and the bias of all attention scores. With six layers and a
batch of 8 x 512, this costs 72 MiB at the peak. A marked sum is stored: ``s`` lives instead of ``g1`` and ``g2``, at
the cost of one more pass over its memory.

A sum is marked if at least :data:`WAITS_FOR_KERNELS` kernels run before it is read and both terms can be freed once it
is stored. The results stay the same, because no sum is marked in a graph with 16-bit values, for two reasons:

- Inductor computes sums of such values in float32, and storing them would round them.
- On a CPU, loops over 16-bit values have vectors of twice as many elements. A reduction adds up one partial sum per
  element of a vector, so its bits depend on what else is read in its loop:

      g1, g2 = bf16[64, 64], bf16[64, 64]
      s = add(float(g1), float(g2))      # float32 on paper, but its reader loads 16-bit values ...
      r = sum(mul(s, x), -1)             # ... and has 32 partial sums, or 16 if ``s`` is stored
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.analysis.fused_kernels import NodeFacts
from ssdtrain_fx.passes.analysis.stored_results import STORED
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.graph.op_kinds import Kind
from ssdtrain_fx.passes.graph.tensor_sizes import Shape, shape_of

WAITS_FOR_KERNELS = 8
"""The backward of a layer has more matrix products than this. Sums within one layer do not live long."""


def store_sums(joint: ScheduledJointGraph) -> ScheduledJointGraph:
    """Mark nodes of backward in ``joint``, in place."""
    if any(map(_has_16_bits, joint.graph.nodes)):
        return joint
    positions = joint.positions()
    marker = positions[joint.marker]
    sums = [positions[node] for node in joint.graph.nodes if positions[node] > marker and _adds_equals(node)]
    if not sums:
        return joint
    found = NodeFacts(joint, find_alias_sets(joint.graph))
    facts, users = found.facts, found.users
    kernels_until = list(itertools.accumulate(fact.kind is Kind.KERNEL for fact in facts))

    def dies(node: fx.Node, reader: int, elements: int) -> bool:
        """Whether storing ``reader`` frees a tensor of ``elements`` elements that ``node`` is, or is computed from."""
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


def _has_16_bits(node: fx.Node) -> bool:
    values = _torch_private.tree_leaves(node.meta.get("val"))
    return any(isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16) for value in values)


def _adds_equals(node: fx.Node) -> bool:
    """Whether the node adds two tensors of its own shape and dtype, and Inductor computes in that dtype."""
    if str(node.target) != "aten.add.Tensor" or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    kinds: set[tuple[torch.dtype, Shape]] = set()
    for argument in (node, *node.all_input_nodes):
        value = argument.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float64):
            return False
        kinds.add((value.dtype, shape_of(value)))
    return len(kinds) == 1
