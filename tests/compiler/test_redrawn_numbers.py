"""Torch's memory budget recomputes dropout with another mask. It is torch's error, and this backend says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx._torch_private import functorch_config_patch
from ssdtrain_fx.compiler.redrawn_numbers import warn_of_redrawn_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
WARNING = "backward draws random numbers again that forward has drawn (test_redrawn_numbers.py:"


def drop(x: Tensor, *scales: Tensor) -> Tensor:
    """Of the last result ``y = mask * sin(x) * scale``, the gradient of ``scale`` times ``scale`` is ``y`` itself."""
    for scale in scales:
        x = F.dropout(torch.sin(x) * scale, 0.5)
    return x


def error(function: Callable[..., Tensor], backend: Any, budget: float) -> float:
    """How much backward has another mask than forward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    scales = [torch.rand(64, 64).add(1).requires_grad_() for _ in range(4)]
    with functorch_config_patch(activation_memory_budget=budget):
        y = torch.compile(function, backend=backend)(torch.rand(64, 64) + 0.5, *scales)
        y.sum().backward()
    gradient = scales[-1].grad
    assert gradient is not None
    return (gradient * scales[-1] - y).abs().max().item()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("budget", [1.0, 0.1])
def test_a_mask_that_backward_draws_anew_is_told(inner: Any, budget: float, caplog: pytest.LogCaptureFixture) -> None:
    backend = ssdtrain_fx.backend(OffloadConfig(inner=inner, policy="all", min_tensor_bytes=0))
    is_wrong = error(drop, inner, budget) > 0.1
    assert is_wrong == (budget < 1)
    assert (error(drop, backend, budget) > 0.1) == is_wrong
    assert sum(WARNING in message for message in caplog.messages) == is_wrong


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_mask_of_a_checkpoint_is_kept(inner: Any, caplog: pytest.LogCaptureFixture) -> None:
    def function(x: Tensor, *scales: Tensor) -> Tensor:
        result: Any = checkpoint(drop, x, *scales, use_reentrant=False)
        return result

    backend = ssdtrain_fx.backend(OffloadConfig(inner=inner, policy="all", min_tensor_bytes=0))
    assert error(function, backend, 1.0) < 1e-5
    assert not any("draws random numbers" in message for message in caplog.messages)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_draws_only_with_dropout(dropout: float, caplog: pytest.LogCaptureFixture) -> None:
    def attend(x: Tensor) -> Tensor:
        for _ in range(4):
            x = F.scaled_dot_product_attention(torch.sin(x), x, x, dropout_p=dropout)
        return x

    torch._dynamo.reset()
    backend = ssdtrain_fx.backend(OffloadConfig(inner="aot_eager", policy="all", min_tensor_bytes=0))
    with functorch_config_patch(activation_memory_budget=0.0):
        torch.compile(attend, backend=backend)(torch.rand(2, 2, 16, 16, requires_grad=True)).sum().backward()
    assert any(WARNING in message for message in caplog.messages) == (dropout > 0)


@pytest.mark.parametrize(("op", "is_told"), [("aten.rand", True), ("rngprims.philox_rand", False)])
def test_what_gets_its_seed_as_an_argument_draws_the_same_again(op: str, is_told: bool) -> None:
    """As with ``functionalize_rng_ops``, which torch has for GPUs only."""
    namespace, name = op.split(".")

    def half() -> fx.GraphModule:
        graph = fx.Graph()
        graph.output(graph.call_function(getattr(getattr(torch.ops, namespace), name).default, ([4],)))
        return fx.GraphModule({}, graph)

    assert warn_of_redrawn_numbers(half(), half()) is is_told
