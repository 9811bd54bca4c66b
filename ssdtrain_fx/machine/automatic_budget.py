"""``memory_budget_bytes="auto"``: from the memory that is left to what one step may add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ssdtrain_fx.memory_limit import MemoryLimit
from ssdtrain_fx.passes.planning.step_budget import StepBudget
from ssdtrain_fx.units import format_bytes

OPTIMIZER_TENSORS = 2
"""Tensors that the optimizer is expected to keep for each parameter that is trained, of the size of the parameter.
That is what Adam keeps. The optimizer is not known when a step is compiled, and makes its state after the first step.
Gradients are not reserved for: backward returns them, so they are part of the peak of the plan."""
RESERVED_SHARE = 0.1
"""Share of what is left that stays free: for what Python, the compiler and other processes still take. A guess."""
ROUNDED_TO_BYTES = 64 << 20
"""Budgets are multiples of this size. Equal containers then find each other's graphs in a compile cache, although the
memory in use differs a little each time."""


def automatic_budget(limit: MemoryLimit, *, trained_bytes: int) -> StepBudget:
    """What a step may add to the memory in use. It is 0 if nothing is left.

    Args:
        trained_bytes: the size of the parameters that an optimizer will update.
    """
    reserved_bytes = round(limit.left_bytes * RESERVED_SHARE) + OPTIMIZER_TENSORS * trained_bytes
    size_bytes = max(0, limit.left_bytes - reserved_bytes) // ROUNDED_TO_BYTES * ROUNDED_TO_BYTES
    reserved = f"{format_bytes(reserved_bytes)} of it are reserved for the optimizer and others"
    return StepBudget(size_bytes=size_bytes, limit=f"{limit}; {reserved}")


def trained_parameter_bytes(example_inputs: Sequence[Any]) -> int:
    """The size of the parameters among the inputs of a graph that need a gradient. Shared ones count once."""
    trained = {
        id(value): value for value in example_inputs if isinstance(value, torch.nn.Parameter) and value.requires_grad
    }
    return sum(value.numel() * value.element_size() for value in trained.values())
