"""Move matrix products to where Inductor will run them: next to the sum that Inductor merges them with.

    before   g1 = mm(a, b)                # the gradient of tied weights: the term of the head
             ...                          # all of backward
             g = add(g1, g2)              # g2: the term of the embedding

    after    ...                          # a and b stay live
             g1 = mm(a, b)
             g = add(g1, g2)              # Inductor: addmm(g2, a, b)

The results are the same. But all later passes take positions for times. If nodes run in another order than in the
graph, their predictions are wrong: here ``a`` may be the gradient of the logits, which lives longer than predicted.
"""

from __future__ import annotations

from torch import fx

from ssdtrain_fx._torch_private import FakeTensor
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets, find_written_storages
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph

_PRODUCT, _SUM = "aten.mm.default", "aten.add.Tensor"


def sink_matrix_products(joint: ScheduledJointGraph) -> ScheduledJointGraph:
    """Rewrite ``joint`` in place, by the rule of Inductor's post-grad pass (as of torch 2.13)."""
    found = [(product, node) for node in joint.graph.nodes if (product := _find_product(node)) is not None]
    if not found:
        return joint
    positions = joint.positions()
    marker = positions[joint.marker]
    alias_sets = find_alias_sets(joint.graph)
    written = find_written_storages(joint.graph, alias_sets)
    for product, node in found:
        same_half = (positions[product] < marker) == (positions[node] < marker)
        read = {idx for source in product.all_input_nodes for idx in alias_sets.by_node[source]}
        if same_half and written.isdisjoint(read):
            node.prepend(product)
    joint.gm.recompile()
    return joint


def _find_product(node: fx.Node) -> fx.Node | None:
    """The product that Inductor merges with this sum, if any. If both arguments qualify, it is the second."""
    if str(node.target) != _SUM or node.kwargs:
        return None
    first, second = node.args
    for product, other in ((second, first), (first, second)):
        if not (isinstance(product, fx.Node) and isinstance(other, fx.Node)):
            return None
        if str(product.target) == _PRODUCT and len(product.users) == 1 and _fits(product, other):
            return None if _stays_apart(node) else product
    return None


def _fits(product: fx.Node, other: fx.Node) -> bool:
    """Whether ``other`` can be the bias of ``product``."""
    bias, result = other.meta["val"], product.meta["val"]
    if not isinstance(bias, FakeTensor) or bias.dtype != result.dtype or bias.dim() > result.dim():
        return False
    pairs = zip(reversed(bias.shape), reversed(result.shape), strict=False)
    return all(size in (1, wanted) for size, wanted in pairs)


def _stays_apart(node: fx.Node) -> bool:
    """Whether Inductor fuses the sum with pointwise ops that read it instead. It does so on a GPU, unless the sum is
    an output, such as a gradient."""
    return node.meta["val"].device.type != "cpu" and all(user.op != "output" for user in node.users)
