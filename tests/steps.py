"""Train for a few steps and compare runs bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ssdtrain_fx import Statistics, statistics, zoo
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.runtime import ops

NUM_STEPS = 3

FAST_DISK = Hardware(
    device="cpu",
    flops_per_s={"float32": 1e12, "bfloat16": 1e12},
    memory_bytes_per_s=1e12,
    elements_per_s={"float32": 1e12, "bfloat16": 1e12},
    kernel_s=1e-3,
    write=Channel(bytes_per_s=1e9),
    read=Channel(bytes_per_s=1e9),
    share_when_both=0.5,
    copy_out=Channel(bytes_per_s=1e15),
    copy_in=Channel(bytes_per_s=1e15),
    copies_block_compute=False,
    offload_s=0.0,
    reload_s=0.0,
    staging_bytes=0,
)
"""A machine on which moving costs nothing but a little time on the disk: 1 MB goes either way while a kernel runs."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Loss and gradients of one step."""

    loss: Tensor
    gradients: dict[str, Tensor]


class Autocast(nn.Module):
    """A model under bfloat16 autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*inputs)


def small_model(name: str, *, dropout: float = 0.0, layers: int = 2) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """A model of the zoo and other data for each step: a backend that returns stale activations must not pass."""
    torch.manual_seed(0)
    model, make_batch = zoo.build(name, layers=layers, hidden=64, sequence=32, vocab=128, batch=2, dropout=dropout)
    generator = torch.Generator().manual_seed(1)
    return model, [make_batch(generator) for _ in range(NUM_STEPS)]


def train(model: nn.Module, batches: Sequence[tuple[Any, ...]], backend: Any, **compile_options: Any) -> list[Step]:
    """Forward and backward on every batch; the parameters stay as they are."""
    torch._dynamo.reset()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    compiled = torch.compile(model, backend=backend, **compile_options)
    steps: list[Step] = []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        model.zero_grad(set_to_none=True)
        loss = compiled(*batch)
        loss.backward()
        steps.append(Step(loss.detach().clone(), gradients_of(model)))
    model.load_state_dict(state)
    return steps


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(found: Sequence[Step], expected: Sequence[Step]) -> None:
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one.loss, other.loss), f"loss of step {number}: {one.loss} instead of {other.loss}"
        assert_same_gradients(one.gradients, other.gradients, f"step {number}")


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], where: str = "") -> None:
    assert found.keys() == expected.keys()
    assert found, "no gradients at all"
    for name, gradient in expected.items():
        difference = (found[name] - gradient).abs().max()
        assert torch.equal(found[name], gradient), f"gradient of {name} {where}: off by up to {difference}"


def settled_statistics() -> Statistics:
    """The statistics once nothing is in flight: a slot is in use for as long as a transfer of it runs."""
    for engine in tuple(ops._engines._by_config.values()):  # pyright: ignore[reportPrivateUsage]
        engine.wait_until_idle()
    return statistics()


def counted(function: Callable[[], Any]) -> Statistics:
    """Run ``function`` and return what the engines did meanwhile."""
    before = statistics()
    function()
    return statistics().since(before)
