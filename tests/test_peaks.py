"""What Inductor holds at any time is what the plan counts."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from steps import FAST_DISK, generated_code, small_model
from torch import Tensor, nn

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.hardware import Channel
from ssdtrain_fx.passes.rewrites.store_sums import WAITS_FOR_KERNELS

pytestmark = pytest.mark.usefixtures("one_thread")

EVERYTHING = OffloadConfig(policy="all", min_tensor_bytes=0, hardware=FAST_DISK)


class PostNormLayers(nn.Module):
    """Two distant kernels in the backward of each layer read the gradient of the previous layer's result:

    g          # gradient of narrow's result
    gb = sum(g)                                 # gradient of narrow's bias
    ...        # the backward of narrow, relu, wide: four products
    sum(g + mm)                                 # gradient of the bias of the norm before
    """

    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for wide, narrow, norm in zip(self.wide, self.narrow, self.norms, strict=True):
            x = norm(x + narrow(torch.relu(wide(x))))
        return x.square().mean()


class GatedLayers(nn.Module):
    """In backward, products run between the gradients of ``gate`` and ``up``, but the same ones before both."""

    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.gate = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for gate, up, down in zip(self.gate, self.up, self.down, strict=True):
            x = x + down(torch.nn.functional.silu(gate(x)) * up(x))
        return x.square().mean()


def generated_backward(model: nn.Module, *inputs: Tensor, compiler: OffloadConfig | str = EVERYTHING) -> str:
    inputs = inputs or (torch.randn(8, 64, 32),)
    _, backward = generated_code(model, *inputs, compiler=compiler)
    return backward[backward.index("def call(") :]


def test_kernels_that_only_read_the_same_are_not_brought_together_over_products() -> None:
    backward = generated_backward(PostNormLayers())
    calls = re.findall(r"^ +(extern_kernels\.mm|cpp_fused\w*)\((?:reinterpret_tensor\()?(\w+)", backward, re.MULTILINE)
    # The gradient of narrow's weight is computed from g: 32 rows, one for every feature of the result.
    gradients = re.findall(r"mm\(reinterpret_tensor\((\w+), \(32, 512\)", backward)
    assert len(gradients) == 2
    for gradient in gradients:
        at = [idx for idx, (_, first) in enumerate(calls) if first == gradient]
        products = [idx for idx in at if calls[idx][0] == "extern_kernels.mm"]
        sums = [idx for idx in at if re.fullmatch(r"cpp_fused_sum_view_\d+", calls[idx][0])]
        assert len(products) == 2 and sums == [max(products) + 1], calls


def test_kernels_that_the_plan_counts_as_one_are_fused_where_products_stand_between_them() -> None:
    """Both gradients read ``gate``, ``up`` and the gradient of their product, and take the memory of two of them."""
    backward = generated_backward(GatedLayers())
    assert len(re.findall(r"^ +cpp_fused\w*mul_silu_silu_backward\w*\(", backward, re.MULTILINE)) == 2, backward


class ReluLayers(nn.Module):
    """In backward, the gradient of ``relu``'s argument is written in place of the gradient of its result.

    The next reload follows it. It is ordered after the product that computed the gradient of the result, which is the
    last kernel that is not fused.
    """

    def __init__(self, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x.square().mean()


def test_ops_that_stand_behind_a_product_leave_its_result_to_be_overwritten() -> None:
    """They depend on it for their order only; they do not read it."""

    def overwrites(compiler: OffloadConfig | str) -> list[bool]:
        backward = generated_backward(ReluLayers(), compiler=compiler)
        kernels = re.findall(r"^ +cpp_fused\w*threshold_backward\w*\(([^)]*)\)", backward, re.MULTILINE)
        return [len(arguments.split(", ")) == 2 for arguments in kernels]

    assert overwrites(EVERYTHING) == overwrites("inductor") == [True] * 3


class SharedBias(nn.Module):
    """Attention scores get a bias that all examples share, as in T5."""

    def __init__(self, width: int = 32, length: int = 64) -> None:
        super().__init__()
        self.query, self.key = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) + self.bias
        return (scores.softmax(-1) @ x).square().mean()


def test_the_gradient_of_a_shared_bias_computes_the_gradient_of_the_scores_once_more() -> None:
    """It is a sum over the batch. It reads the softmax and its gradient (8 x 64 x 64), not the gradient of the scores.

    The plan counts both until then.
    """
    model, x = SharedBias(), torch.randn(8, 64, 32, requires_grad=True)
    backward = generated_backward(model, x, compiler="inductor")
    kernels = re.findall(r"^ +cpp_fused(\w*)\(([^)]*)\)", backward, re.MULTILINE)
    sums = [arguments.split(", ") for name, arguments in kernels if "sum" in name and "softmax_backward" in name]
    assert sums and all(len(arguments) >= 4 for arguments in sums), kernels


class ReadByAllLayers(nn.Module):
    """All layers read one tensor, as the result of T5's encoder. Its gradient is a sum with a term from each layer."""

    def __init__(self, layers: int = 4, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(WAITS_FOR_KERNELS // 2 + 2))
            for _ in range(layers)
        )

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        read = read.sin()
        for first, *others in self.layers:
            for linear in others:
                x = x + torch.relu(linear(x))
            x = x + torch.relu(first(read))
        return x.square().mean()


def test_a_sum_over_layers_is_stored_where_it_stands() -> None:
    """Plain Inductor adds all four gradients in one kernel at the end, so they are live until then."""
    model = ReadByAllLayers()

    def terms_of_the_last_kernel(compiler: OffloadConfig | str) -> int:
        x, read = (torch.randn(8, 64, 32, requires_grad=True) for _ in range(2))
        backward = generated_backward(model, x, read, compiler=compiler)
        (arguments,) = re.findall(r"^ +cpp_fused\w*_cos_\w*\(([^)]*)\)", backward, re.MULTILINE)
        return sum(argument.startswith("buf") for argument in arguments.split(", "))

    assert terms_of_the_last_kernel("inductor") == 4
    assert terms_of_the_last_kernel(EVERYTHING) == 2


NOTHING_FITS = Channel(bytes_per_s=1.0)


def test_backward_is_compiled_as_planned_where_it_only_makes_things_again() -> None:
    """The recomputed result of a norm reads what the backward of the norm reads.

    Inductor would fuse both into one kernel before the product that needs the result of the norm. Then it would read
    all rows once more for the sums over them.
    """
    model, batches = small_model("gpt2")
    disk = dataclasses.replace(FAST_DISK, write=NOTHING_FITS, read=NOTHING_FITS)
    config = OffloadConfig(min_tensor_bytes=0, hardware=disk, max_slowdown=0.5)
    (graph,) = ssdtrain_fx.explain(model, *batches[0], config=config).graphs
    assert graph.plan.recomputed and not graph.plan.offloaded

    def norm_kernels(compiler: OffloadConfig | str) -> list[str]:
        backward = generated_backward(model, *batches[0], compiler=compiler)
        return re.findall(r"^ +cpp_fused\w*native_layer_norm_backward\w*\(", backward, re.MULTILINE)

    assert len(norm_kernels(config)) == len(norm_kernels("inductor")) == 5
