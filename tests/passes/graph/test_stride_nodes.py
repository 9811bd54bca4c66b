"""Strides of a tensor with symbolic sizes as products of its sizes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ssdtrain_fx.passes.graph.stride_nodes import strides_like

SIZE = (4, 6, 10, 12)


def symbolic_size(sizes: tuple[int, ...], static_dim: int) -> tuple[fx.Graph, list[Any]]:
    """A graph whose placeholders are ``sizes``; one of them is a number."""
    dynamic = [DimDynamic.STATIC if dim == static_dim else DimDynamic.DYNAMIC for dim in range(len(sizes))]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
    x = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(sizes), symbolic_context=context)
    graph = fx.Graph()
    arguments: list[Any] = []
    for dim, size in enumerate(x.shape):
        argument: Any = size
        if dim != static_dim:
            argument = graph.placeholder(f"s{dim}")
            argument.meta["val"] = size
        arguments.append(argument)
    return graph, arguments


def stride_of_order(sizes: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Of a dense tensor whose dimension ``order[0]`` is the innermost."""
    strides, step = [0] * len(sizes), 1
    for dim in order:
        strides[dim], step = step, step * sizes[dim]
    return tuple(strides)


def run(graph: fx.Graph, strides: list[Any], values: list[int]) -> tuple[int, ...]:
    graph.output(tuple(strides))
    return fx.GraphModule({}, graph)(*values)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_every_order_holds_for_other_sizes_too(order: tuple[int, ...]) -> None:
    graph, size = symbolic_size(SIZE, static_dim=1)
    contiguous: list[Any] = list(torch.empty(SIZE).stride())
    strides = strides_like(graph, size, contiguous, stride_of_order(SIZE, order))
    nodes = [number for number in strides if isinstance(number, fx.Node)]
    assert all(isinstance(node.meta["val"], torch.SymInt) for node in nodes)
    others = (5, 6, 3, 7)
    if order == (3, 2, 1, 0):
        assert strides == contiguous
    else:
        assert run(graph, strides, [5, 3, 7]) == stride_of_order(others, order)


def test_dimensions_of_length_1_do_not_hide_an_order() -> None:
    graph, size = symbolic_size((4, 1, 10), static_dim=1)
    strides = strides_like(graph, size, [10, 10, 1], (1, 7, 4))
    assert run(graph, strides, [5, 3])[::2] == (1, 5)


def test_the_strides_of_a_tensor_with_gaps_stay() -> None:
    graph, size = symbolic_size(SIZE, static_dim=1)
    stride: list[Any] = [720, 120, 12, 1]
    assert strides_like(graph, size, stride, (1440, 240, 24, 2)) == stride


def test_two_sizes_that_are_1_now_have_no_order() -> None:
    graph, size = symbolic_size(SIZE, static_dim=1)
    for argument in (size[2], size[3]):
        argument.meta["val"] = 1
    stride: list[Any] = [6, 1, 1, 1]
    assert strides_like(graph, size, stride, (6, 1, 6, 6)) == stride


def test_numbers_are_taken_as_they_are() -> None:
    assert strides_like(fx.Graph(), [4, 6], [6, 1], (2, 16)) == [2, 16]
