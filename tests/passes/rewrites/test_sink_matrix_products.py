"""Matrix products are placed where Inductor runs them."""

from __future__ import annotations

import pytest
import torch
import torch.utils._pytree as pytree
from graphs import Program, capture_program, matrix, names, random_programs
from hypothesis import given, settings
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from ssdtrain_fx.passes.rewrites.sink_matrix_products import sink_matrix_products
from ssdtrain_fx.testing import CapturedStep, capture_step, run


def tied(x: Tensor, w: Tensor) -> Tensor:
    """``w`` is used at both ends, so its gradient is a sum of terms from both ends of backward."""
    h = (x @ w).sin().cos().exp()
    return (h @ w).sin().sum()


def order(step: CapturedStep) -> list[str]:
    joint = step.join()
    sink_matrix_products(joint)
    joint.graph.lint()
    return names(joint.graph.nodes)


def test_the_product_stands_right_before_its_sum() -> None:
    step = capture_step(tied, matrix(4, 8), matrix(8, 8))
    before = names(step.join().graph.nodes)
    after = order(step)
    (total,) = [node for node in step.join().graph.nodes if node.name.startswith("add")]
    products = [argument.name for argument in total.args]
    assert max(before.index(total.name) - before.index(name) for name in products) > 2, "made far apart"
    assert after[after.index(total.name) - 1] == products[1]
    assert sorted(after) == sorted(before)


@pytest.mark.usefixtures("one_thread")
def test_inductor_does_make_it_a_part_of_the_sum() -> None:
    """The pass assumes this of Inductor: one product of the gradient becomes an addmm, and runs last."""
    x, w = matrix(16, 32), matrix(32, 32)
    compiled = torch.compile(tied)
    _, codes = run_and_get_code(lambda: compiled(x, w).backward())
    backward = codes[-1]
    kernels = [
        line.strip().split("(")[0] for line in backward.splitlines() if "extern_kernels." in line and "(" in line
    ]
    assert [kernel for kernel in kernels if kernel.endswith("addmm")]
    assert backward.rindex("extern_kernels.addmm(") > backward.rindex("extern_kernels.mm(")


@pytest.mark.parametrize("scaled", [lambda a, b: torch.add(a, b, alpha=2), lambda a, b: a - b])
def test_other_sums_stay(scaled: object) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        assert callable(scaled)
        product = x @ w
        return scaled(x.sin().cos(), product).sum()

    step = capture_step(function, matrix(8, 8), matrix(8, 8))
    assert order(step) == names(step.join().graph.nodes)


def test_a_product_that_others_read_stays() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        return (product.sin() + (x.cos() + product)).sum()

    step = capture_step(function, matrix(8, 8), matrix(8, 8))
    before, after = names(step.join().graph.nodes), order(step)
    assert after.index("mm") == before.index("mm")


def test_a_bias_of_another_type_stays() -> None:
    def function(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        product = x @ w
        return ((bias.sin().cos()) + product).sum()

    step = capture_step(function, matrix(8, 8), matrix(8, 8), matrix(8, 8).double())
    assert order(step)[: order(step).index("add")] == names(step.join().graph.nodes)[: order(step).index("add")]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(program=random_programs())
def test_random_graphs_compute_the_same(program: Program) -> None:
    step = capture_program(program)
    before, after = step.join(), step.join()
    sink_matrix_products(after)
    after.graph.lint()
    found, expected = (pytree.tree_leaves(run(joint.gm, step.joint_args(joint))) for joint in (after, before))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
