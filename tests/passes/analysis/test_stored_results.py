"""What Inductor stores: by hand on tiny graphs, and compared with what Inductor itself lowers a graph to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from test_node_costs import trace
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.graph import GraphLowering

from ssdtrain_fx._torch_private import REALIZE_TO_STRIDES
from ssdtrain_fx.passes.analysis.fused_kernels import NodeFacts
from ssdtrain_fx.passes.analysis.stored_results import find_stored_results
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.graph.op_kinds import FUSIBLE, op_of


def stored(joint: ScheduledJointGraph) -> dict[str, tuple[str, set[str]]]:
    """By name of each stored result: the node that needs it first, and what it is computed from."""
    alias_sets = find_alias_sets(joint.graph)
    nodes = list(joint.graph.nodes)
    return {
        nodes[one.made_at].name: (
            nodes[one.stored_at].name,
            {alias_sets.storages[idx].allocator.name for idx in one.reads},
        )
        for one in find_stored_results(NodeFacts(joint, alias_sets).facts)
    }


def residual(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    p = x @ w
    s = p + r
    t = s - s.mean(1, keepdim=True)
    return s * (t @ w)


def test_a_pointwise_result_is_computed_again_by_each_reader() -> None:
    inputs = {"mm", "r_1"}
    assert stored(trace(residual, (4, 4), (4, 4), (4, 4))) == {
        "mean": ("mean", inputs),
        "sub": ("mm_1", {*inputs, "mean"}),
        "mul": ("backward_starts", {*inputs, "mm_1"}),  # which is where forward ends
    }


def test_a_view_stores_nothing() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x * 2).view(2, 2, 4).view(4, 4) @ w

    assert stored(trace(function, (4, 4), (4, 4))) == {"mul": ("mm", {"x_1"})}


def test_several_readers_store_what_one_of_them_needs_in_memory() -> None:
    """With one input, the value is stored where it is needed."""

    def of_two(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = x + y
        return s.sin(), s @ w

    def of_one(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = x + 1
        return s.sin(), s @ w

    shapes = (4, 4), (4, 4), (4, 4)
    assert stored(trace(of_two, *shapes))["add"] == ("add", {"x_1", "y_1"})
    assert stored(trace(of_one, *shapes))["add"] == ("mm", {"x_1"})


def test_what_is_returned_and_read_is_stored_at_once() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = x + 1
        return s, s.view(2, 2, 4).view(4, 4) @ w

    assert stored(trace(function, (4, 4), (4, 4)))["add"] == ("add", {"x_1"})


def test_what_is_marked_is_stored_at_once() -> None:
    joint = trace(lambda x, w: (x * 2).view(2, 2, 4).view(4, 4) @ w, (4, 4), (4, 4))
    (node,) = [node for node in joint.graph.nodes if node.name == "mul"]
    node.meta[REALIZE_TO_STRIDES] = True
    assert stored(joint) == {"mul": ("mul", {"x_1"})}


def many_inputs(count: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        s = inputs[0]
        for one in inputs[1:count]:
            s = s + one
        return s.sin(), s.cos()

    return function


def sum_of_many(count: int) -> Callable[..., Tensor]:
    def function(*inputs: Tensor) -> Tensor:
        s = inputs[0]
        for one in inputs[1:count]:
            s = s + one
        return s.sin()

    return function


def expensive(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    s = x.exp() * y
    return s.sin(), s.cos()


def shared_view(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    s = (x.exp() * y).view(-1)
    return s.sin(), s.cos()


def many_ops(count: int) -> Callable[..., Tensor]:
    def function(x: Tensor, y: Tensor) -> Tensor:
        s = x + y
        for _ in range(count):
            s = s + y
        return s

    return function


def one_input(x: Tensor) -> Tensor:
    for _ in range(250):
        x = x.sin()
    return x


def softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def gated(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    gate, up = x @ v, x @ w
    s = gate.sigmoid()
    return (gate * s * up) @ v, (up * s * (1 + gate * (1 - s))) @ w, (gate * s).sum(0)


SQUARE = (8, 8)
CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "residual": (residual, 3),
    "gated": (gated, 3),
    "softmax": (softmax, 1),
    "expensive": (expensive, 2),
    "shared view": (shared_view, 2),
    "4 inputs": (many_inputs(4), 5),
    "5 inputs": (many_inputs(5), 5),
    "12 inputs": (sum_of_many(12), 12),
    "13 inputs": (sum_of_many(13), 13),
    "40 ops": (many_ops(40), 2),
    "60 ops": (many_ops(60), 2),
    "120 ops": (many_ops(120), 2),
    "250 ops of one input": (one_input, 1),
}


class _LoweredError(Exception):
    pass


def _is_computed(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and op_of(node.target).kind in FUSIBLE


def lowered(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Counter[str]:
    """The ops whose results Inductor stores when it lowers ``function``. No code is generated."""
    found: Counter[str] = Counter()

    def keep(graph: GraphLowering) -> None:
        positions = {node: position for position, node in enumerate(graph.graph.nodes)}
        for buffer in graph.buffers:
            if isinstance(buffer, ir.ComputedBuffer):  # its origins are all that is computed in it
                made = [node for node in buffer.origins if node in positions and _is_computed(node)]
                found[str(max(made, key=positions.__getitem__).target)] += 1
        raise _LoweredError

    torch._dynamo.reset()
    with (
        mock.patch.object(GraphLowering, "codegen", keep),
        inductor_config.patch({"fx_graph_cache": False}),
        pytest.raises(Exception, match="_LoweredError"),
    ):
        torch.compile(function, fullgraph=True)(*inputs)
    return found


LIMITS_OF_2_13 = ("12 inputs", "13 inputs", "60 ops", "120 ops")


@pytest.mark.parametrize("name", CASES)
def test_inductor_stores_the_same(name: str) -> None:
    """The oracle: the buffers of Inductor's lowering, before it fuses them."""
    if name in LIMITS_OF_2_13 and not torch.__version__.startswith("2.13."):
        pytest.skip("the limits of inputs and ops are those of torch 2.13")
    function, count = CASES[name]
    expected = lowered(function, [torch.randn(SQUARE) for _ in range(count)])
    joint = trace(function, *[SQUARE] * count)
    targets = {node.name: str(node.target) for node in joint.graph.nodes}
    assert Counter(targets[result] for result in stored(joint)) == expected
