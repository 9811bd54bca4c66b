"""Train for a few steps, to compare compilers bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Step(NamedTuple):
    """Loss and gradients of one step."""

    loss: Tensor
    gradients: dict[str, Tensor]
    """Gradients by parameter name."""


def train(model: nn.Module, batches: Sequence[tuple[Any, ...]], backend: Any, **compile_options: Any) -> list[Step]:
    """Compile ``model`` and run forward and backward on every batch. Parameters and buffers keep their values.

    Use different data in every step: with equal data, a backend that reloads the activations of the previous step would
    go undetected. All code that Dynamo has compiled so far is dropped.

    Args:
        batches: the arguments of ``model``, one tuple per step.
        backend: passed to ``torch.compile``, as are ``compile_options``.
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
    """Copy all gradients, by parameter name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
