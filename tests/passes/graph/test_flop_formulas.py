"""FLOPs of ops that torch's flop counter lacks or has wrong, against those of the parts that they consist of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import flop_counter as _flop_counter

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, join
from ssdtrain_fx.passes.graph.node_facts import find_own_kernels
from ssdtrain_fx.passes.graph.op_kinds import Kind, op_of
from ssdtrain_fx.passes.pipeline import OffloadedStep, offload_saved_tensors
from ssdtrain_fx.testing import toy_hardware

aten: Any = torch.ops.aten
flop_counter = cast(Any, _flop_counter)  # untyped


def count(function: Callable[..., Any], *shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
    """FLOPs of the only op in ``function`` that has any."""
    with FakeTensorMode():
        gm = make_fx(function)(*(torch.empty(*shape, dtype=dtype) for shape in shapes))
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    [flops] = [flops for node in calls if (flops := op_of(node.target).count_flops(node))]
    return flops


@given(data=st.data(), transposed=st.booleans(), groups=st.sampled_from((1, 2, 3, 8)), dims=st.sampled_from((1, 2, 3)))
@settings(max_examples=40, deadline=None)
def test_gradients_of_a_grouped_convolution_are_those_of_its_groups(
    data: st.DataObject, transposed: bool, groups: int, dims: int
) -> None:
    """Each group is a convolution by itself, with one group: there, torch counts the gradients right."""
    batch, of_input, of_output = (data.draw(st.integers(1, 3)) for _ in range(3))
    stride = data.draw(st.integers(1, 2))
    mask = data.draw(st.sampled_from(((True, True, False), (True, False, False), (False, True, True))))
    filter_shape, places = (2,) * dims, (5,) * dims

    def gradients(x: Tensor, weight: Tensor, groups: int) -> Any:
        options = ([stride] * dims, [0] * dims, [1] * dims, transposed, [0] * dims, groups)
        out = aten.convolution(x, weight, None, *options)
        return aten.convolution_backward(torch.ones_like(out), x, weight, [out.shape[1]], *options, mask)

    def shapes(groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        channels = (groups * of_input, of_output) if transposed else (groups * of_output, of_input)
        return (batch, groups * of_input, *places), (*channels, *filter_shape)

    def ours(groups: int) -> int:
        with FakeTensorMode():
            gm = make_fx(lambda x, w: gradients(x, w, groups))(*(torch.empty(shape) for shape in shapes(groups)))
        [node] = [node for node in gm.graph.nodes if node.target is aten.convolution_backward.default]
        return op_of(node.target).count_flops(node)

    with FakeTensorMode(), flop_counter.FlopCounterMode(display=False) as counter:
        gradients(*(torch.empty(shape) for shape in shapes(1)), 1)
    by_torch = counter.get_flop_counts()["Global"][aten.convolution_backward]
    assert ours(1) == by_torch
    assert ours(groups) == groups * by_torch


@pytest.mark.parametrize(
    ("one", "other", "parts"),
    [
        ((12, 4), (3, 4, 5), [(2, 4, 5), (3, 4, 5), (7, 4, 5)]),  # groups of rows: experts
        ((3, 4, 5), (5, 12), [(4, 5, 2), (4, 5, 3), (4, 5, 7)]),  # groups of columns
        ((4, 12), (12, 5), [(4, 2, 5), (4, 3, 5), (4, 7, 5)]),  # groups of what is summed: gradients of experts
        ((3, 4, 5), (3, 5, 6), [(4, 5, 6)] * 3),
    ],
)
def test_a_grouped_product_is_the_products_of_its_groups(
    one: tuple[int, ...], other: tuple[int, ...], parts: list[tuple[int, int, int]]
) -> None:
    """Groups end at offsets 2, 5 and 12. By the formula alone: each layout has kernels for some devices only."""
    expected = sum(flop_counter.mm_flop((m, k), (k, n)) for m, k, n in parts)
    for op in (aten._grouped_mm.default, aten._scaled_grouped_mm.default):
        found = op_of(op)
        assert found.kind is Kind.KERNEL
        assert found.flop_formula is not None
        assert found.flop_formula(one, other, out_val=None) == expected


def test_the_experts_of_transformers_count_what_they_multiply() -> None:
    """12 tokens of 4 elements, sorted by expert, and 3 experts that make 5 elements. torch counts in the loop over
    experts, which compiled code does not show."""
    moe: Any = pytest.importorskip("transformers.integrations.moe")
    ops: Any = torch.ops.transformers
    x, experts, gradient = torch.zeros(12, 4), torch.zeros(3, 4, 5), torch.zeros(12, 5)
    ends = torch.tensor([2, 5, 12], dtype=torch.int32)

    def in_the_loop(function: Callable[..., Any], *args: Tensor) -> int:
        with flop_counter.FlopCounterMode(display=False) as counter:
            function(*args)
        return counter.get_total_flops()

    def forward(x: Tensor, experts: Tensor) -> Tensor:
        return ops.grouped_mm_fallback(x, experts, torch.empty(3, dtype=torch.int32))

    def backward(x: Tensor, experts: Tensor, gradient: Tensor) -> Any:
        return ops.grouped_mm_fallback_backward(x, experts, torch.empty(3, dtype=torch.int32), gradient)

    assert count(forward, x.shape, experts.shape) == in_the_loop(moe._grouped_mm_fallback, x, experts, ends)
    found = count(backward, x.shape, experts.shape, gradient.shape)
    assert found == in_the_loop(moe._grouped_mm_fallback_bwd, x, experts, ends, gradient)


def test_the_formula_that_a_user_registers_counts() -> None:
    """Without one, an op counts as moving bytes only, even if it has the name of an op of torch."""
    with torch.library._scoped_library("flop_formulas_of_users", "DEF") as library:
        library.define("cube(Tensor x) -> Tensor")
        library.define("_grouped_mm(Tensor x) -> Tensor")
        library.impl("cube", torch.empty_like, "Meta")
        ops: Any = torch.ops.flop_formulas_of_users

        @flop_counter.register_flop_formula(ops.cube)
        def cube(shape: Sequence[int], **_: Any) -> int:
            return shape[0] ** 3

        try:
            assert count(lambda x: ops.cube(x), (5,)) == 125
            assert op_of(ops._grouped_mm.default).flop_formula is None
        finally:
            del flop_counter.flop_registry[ops.cube]


def flip(x: Tensor) -> Tensor:
    return x.flip(-1)


def pool(x: Tensor) -> Tensor:
    return torch.nn.functional.max_pool2d(x, 3, 2)


def average(x: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(x, 2)


@pytest.mark.parametrize(
    ("function", "op"), [(flip, "rev"), (pool, "pool_offsets_to_indices"), (average, "avg_pool2d_backward")]
)
def test_what_inductor_generates_is_no_kernel_of_its_own(function: Callable[[Tensor], Tensor], op: str) -> None:
    """Its time is not measured, and it may be fused."""
    steps: list[ScheduledJointGraph] = []

    def keep(*halves: Any, **kwargs: Any) -> OffloadedStep:
        steps.append(join(*halves, num_forward_outputs=kwargs["num_forward_outputs"]))
        return offload_saved_tensors(*halves, **kwargs)

    x = torch.randn(1, 2, 8, 8, requires_grad=True)
    with mock.patch("ssdtrain_fx.compiler.inductor.offload_saved_tensors", keep):
        ssdtrain_fx.explain(lambda x: function(x * 2).sin(), x, config=OffloadConfig(hardware=toy_hardware()))
    [joint] = steps
    assert any(op in node.name for node in joint.graph.nodes)
    assert not find_own_kernels(joint, find_alias_sets(joint.graph), fused=True)
