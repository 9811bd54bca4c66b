"""When a storage may leave and must be back, if fused kernels read it elsewhere than their nodes stand."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ssdtrain_fx.passes.analysis.analyse import analyse
from ssdtrain_fx.passes.analysis.pose_problem import pose_problem
from ssdtrain_fx.passes.planning.transfer_problem import Movable
from ssdtrain_fx.testing import capture_step, toy_hardware


class Step(torch.autograd.Function):
    """Saves a product that one kernel reads in forward, and what only backward reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        p = x @ w
        late = (p * 2).view(2, 2, 4).view(4, 4)  # the kernel runs at the last product
        q = x @ w.t()
        only_backward = x * 3
        ctx.save_for_backward(p, only_backward, w)
        return late @ q

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        p, only_backward, w = ctx.saved_tensors
        first = g * 5 + only_backward
        one = first.view(2, 2, 4).view(4, 4) @ w
        second = g * p  # one kernel with `first`, which the product above needs
        return one, second.view(2, 2, 4).view(4, 4) @ w


def movables(*, fused: bool) -> tuple[dict[str, Movable], dict[str, int]]:
    """The movables by name, and the position of each node."""
    step = capture_step(Step.apply, *(torch.randn(4, 4, requires_grad=True) for _ in range(2)))
    analysis = analyse(step.join(), min_tensor_bytes=0, hardware=toy_hardware(1024), fused=fused)
    problem = pose_problem(analysis, hardware=toy_hardware(1024))
    storages = analysis.alias_sets.storages
    positions = {node.name: at for node, at in analysis.joint.positions().items()}
    return {storages[one.idx].allocator.name: one for one in problem.movables}, positions


def test_what_a_kernel_reads_later_leaves_later() -> None:
    plain, positions = movables(fused=False)
    assert plain["mm"].earliest_release == positions["mul"] + 1
    fused, positions = movables(fused=True)
    assert fused["mm"].earliest_release == positions["mm_2"] + 1


def test_what_a_kernel_reads_earlier_is_back_earlier() -> None:
    plain, positions = movables(fused=False)
    assert plain["mm"].wait == positions["mul_3"]
    fused, positions = movables(fused=True)
    assert fused["mm"].wait == positions["mm_3"] < positions["mul_3"]


def test_an_offload_stores_what_would_be_stored_later() -> None:
    """Without an offload, Inductor would store it at the end of forward."""
    fused, positions = movables(fused=True)
    assert fused["mul_1"].live_start == fused["mul_1"].offload == positions["mul_1"] + 1
    assert all(
        one.live_start <= one.offload <= one.earliest_release <= one.wait <= one.live_end for one in fused.values()
    )


def test_a_copy_for_a_convolution_takes_memory_that_cannot_move() -> None:
    image, weight = torch.randn(1, 2, 8, 8), torch.randn(4, 2, 3, 3, requires_grad=True)
    step = capture_step(lambda x, w: torch.conv2d(x, w).relu(), image, weight)
    analysis = analyse(step.join(), min_tensor_bytes=0, hardware=toy_hardware(1024), fused=True)
    (with_copies, without) = (
        pose_problem(one, hardware=toy_hardware(1024)).fixed_live_bytes
        for one in (analysis, dataclasses.replace(analysis, layout_copies=()))
    )
    copies_bytes = 4 * (image.numel() + weight.numel())
    assert {more - less for more, less in zip(with_copies, without, strict=True)} == {0, copies_bytes}
