"""Copy nodes within a graph, each with a new value, and erase nodes without users."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch.fx.node import Argument, map_aggregate, map_arg

from ssdtrain_fx import _torch_private
from ssdtrain_fx._torch_private import FakeTensor
from ssdtrain_fx.passes.graph.alias_sets import AliasSets

COPY_OF = "ssdtrain_copy_of"
"""Metadata key of a copied node: the name of the original, and of the first member of the storage that the copy
recomputes. Only reports read it."""


def copy_nodes(graph: fx.Graph, nodes: Iterable[fx.Node], alias_sets: AliasSets) -> dict[fx.Node, fx.Node]:
    """Copy ``nodes`` to the insertion point. A copy reads the copies of its sources, or the sources themselves."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copy = graph.node_copy(node, lambda source: copies.get(source, source))
        copy.meta = dict(node.meta)
        copy.meta["val"] = _fake_copy(node, copy, alias_sets)
        copies[node] = copy
    return copies


def _fake_copy(node: fx.Node, copy: fx.Node, alias_sets: AliasSets) -> object:
    """The value of a copy: a view shares the storage of its argument, any other value gets a new storage."""
    inherited = {idx for source in node.all_input_nodes for idx in alias_sets.by_node[source]}
    if inherited.issuperset(alias_sets.by_node[node]):
        return fake_result(copy)
    return map_aggregate(node.meta["val"], _like)


def fake_result(node: fx.Node) -> object:
    """Run the node on the current values of its arguments."""
    values = [leaf for source in node.all_input_nodes for leaf in _torch_private.tree_leaves(source.meta["val"])]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    assert callable(node.target)
    with mode:
        return node.target(*map_arg(node.args, _value_of), **map_arg(node.kwargs, _value_of))


def _like(value: Argument) -> Argument:
    """A fake tensor with the same layout on a new storage."""
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _value_of(node: fx.Node) -> Argument:
    return node.meta["val"]


def erase_unread(nodes: Iterable[fx.Node]) -> None:
    """Erase the nodes without users. ``nodes`` must be functional and in graph order."""
    for node in reversed(list(nodes)):
        if not node.users:
            node.graph.erase_node(node)
