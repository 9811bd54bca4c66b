"""Strides of tensors with symbolic sizes, as arguments of nodes."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from ssdtrain_fx.passes.graph.tensor_sizes import hint

Argument = int | fx.Node


def strides_like(
    graph: fx.Graph, size: Sequence[Argument], stride: Sequence[Argument], wanted: Sequence[int]
) -> list[Argument]:
    """Strides that are ``wanted`` for the hints of the sizes, as arguments at the insertion point of ``graph``.

    Args:
        size: of the tensor, as arguments.
        stride: that its node has now. Kept if they are equal for the hints, if the tensor has gaps, so that its strides
            are no products of its sizes, or if the hints do not tell the order, because two of them are 1.
        wanted: the strides that the tensor really has for the hints.
    """
    if not any(isinstance(number, fx.Node) for number in (*size, *stride)):
        return [*wanted]
    has_no_order = sum(isinstance(number, fx.Node) and _hint(number) == 1 for number in size) > 1
    if has_no_order or [_hint(number) for number in stride] == [*wanted]:
        return [*stride]
    arguments = [*stride]
    step: Argument = 1
    for dim in sorted(range(len(size)), key=lambda dim: (wanted[dim], _hint(size[dim]))):
        if wanted[dim] != _hint(step) and _hint(size[dim]) != 1:
            return [*stride]
        arguments[dim] = step
        step = _product(graph, step, size[dim])
    return arguments


def _value(number: Argument) -> int | torch.SymInt:
    return number.meta["val"] if isinstance(number, fx.Node) else number


def _hint(number: Argument) -> int:
    return hint(_value(number))


def _product(graph: fx.Graph, one: Argument, other: Argument) -> Argument:
    if one == 1 or other == 1:
        return other if one == 1 else one
    if isinstance(one, int) and isinstance(other, int):
        return one * other
    node = graph.call_function(operator.mul, (one, other))
    node.meta["val"] = _value(one) * _value(other)
    return node
