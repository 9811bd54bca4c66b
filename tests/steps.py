"""Steps and machines for tests: small models of the zoo, a step of four layers, and statistics of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.utils import run_and_get_code

from ssdtrain_fx import OffloadConfig, Statistics, backend, statistics
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.runtime import ops
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.testing import CapturedStep, assert_same_bits, capture_step, gradients_of, toy_hardware

NUM_STEPS = 3

FAST_DISK = toy_hardware(disk_bytes_per_s=1e9, kernel_s=1e-3)
"""A machine on which offloading costs only a little disk time: 1 MB is transferred each way while a kernel runs."""


class Autocast(nn.Module):
    """A model under bfloat16 autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*inputs)


EMPTY_GRAPH = fx.GraphModule({}, fx.Graph())


def machine(disk_bytes_per_s: float) -> Hardware:
    """A machine on which each kernel takes a microsecond, and only the disk is slow."""
    rates = {"float32": 1e15}
    return toy_hardware(
        disk_bytes_per_s, flops_per_s=rates, memory_bytes_per_s=1e15, elements_per_s=rates, kernel_s=1e-6
    )


def four_layers() -> CapturedStep:
    """A step that saves the pre-activations mm, mm_1, .. [512, 16] and their squares mul, mul_1, .. of every layer."""

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            h = x @ weight
            x = h * h
        return x.sum()

    weights = (torch.randn(16, 16, requires_grad=True) for _ in range(4))
    return capture_step(function, torch.randn(512, 16, requires_grad=True), *weights)


def small_model(name: str, *, dropout: float = 0.0, layers: int = 2) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """A model of the zoo and different data for each step, so that a backend that returns stale activations fails."""
    torch.manual_seed(0)
    model, make_batch = zoo.build(name, layers=layers, hidden=64, sequence=32, vocab=128, batch=2, dropout=dropout)
    generator = torch.Generator().manual_seed(1)
    return model, [make_batch(generator) for _ in range(NUM_STEPS)]


def settled_statistics() -> Statistics:
    """The statistics once nothing is in flight, because a slot is in use while a transfer of it runs."""
    for engine in tuple(ops._engines._by_config.values()):  # pyright: ignore[reportPrivateUsage]
        engine.wait_until_idle()
    return statistics()


def compare_gradients(model: nn.Module, inner: Any, offloading: OffloadConfig, train: Callable[[Any], object]) -> None:
    """Call ``train(compiler)`` with ``inner`` and with offloading. The gradients that ``model`` accumulates must be
    equal, and nothing may be left on the disk."""
    gradients: list[dict[str, Tensor]] = []
    for compiler in (inner, backend(offloading)):
        torch._dynamo.reset()
        model.zero_grad(set_to_none=True)
        moved = counted(lambda compiler=compiler: train(compiler))
        gradients.append(gradients_of(model))
        assert (moved.offloads > 0) == (compiler != inner)
    assert_same_bits(gradients[1], gradients[0])
    assert settled_statistics().slots_in_use == 0


def counted(function: Callable[[], Any]) -> Statistics:
    """Run ``function`` and return the engines' statistics of that run."""
    before = statistics()
    function()
    return statistics().since(before)


def generated_code(model: nn.Module, *inputs: Tensor, compiler: OffloadConfig | str) -> tuple[str, str]:
    """The Python that Inductor generates for forward and backward. The step runs, but its C++ kernels do nothing."""
    if isinstance(compiler, OffloadConfig):
        compiler = backend(compiler)
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        without_kernels(),
    ):
        _, (forward, backward) = run_and_get_code(lambda: torch.compile(model, backend=compiler)(*inputs).backward())
    return forward, backward


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """The C++ compiler takes most of the time of a compilation, and only the Python is wanted."""

    def do_nothing(self: AsyncCompile, argument_types: list[str], source: str) -> Callable[..., None]:
        return lambda *arguments: None

    PyCodeCache.cache_clear()
    try:
        with patch.object(AsyncCompile, "cpp_pybinding", do_nothing):
            yield
    finally:
        PyCodeCache.cache_clear()  # it holds modules whose kernels do nothing
