"""Train for a few steps, to compare one compiler with another bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Step(NamedTuple):
    """Loss and gradients of one step."""

    loss: Tensor
    gradients: dict[str, Tensor]
    """By the name of the parameter."""


def train(model: nn.Module, batches: Sequence[tuple[Any, ...]], backend: Any, **compile_options: Any) -> list[Step]:
    """Forward and backward of a freshly compiled ``model`` on every batch; parameters and buffers stay as they are.

    Give every step other data: with the same data a backend that returns the activations of the step before passes.
    All code that Dynamo has compiled so far is dropped.

    Args:
        batches: the arguments of ``model``, one tuple per step.
        backend: as for ``torch.compile``; ``compile_options`` too.
    """
    torch.compiler.reset()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    compiled = torch.compile(model, backend=backend, **compile_options)
    steps: list[Step] = []
    with torch.random.fork_rng(devices=[]):
        for seed, batch in enumerate(batches):
            torch.manual_seed(seed)
            model.zero_grad(set_to_none=True)
            loss = compiled(*batch)
            loss.backward()
            steps.append(Step(loss.detach().clone(), gradients_of(model)))
    model.load_state_dict(state)
    return steps


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients, by the name of the parameter."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
