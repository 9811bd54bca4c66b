"""What the plan says about memory between forward and backward is what Inductor's code really holds, byte for byte.

The oracle asks the autograd node of a compiled step what it has saved. It does not see a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from steps import machine, without_kernels
from torch import Tensor, nn
from torch.nn import functional as F

from ssdtrain_fx import OffloadConfig, _torch_private
from ssdtrain_fx.compiler.inductor import compile_with_inductor
from ssdtrain_fx.passes.pipeline import OffloadedStep
from ssdtrain_fx.passes.planning.plan import Keep, Offload, Plan, Recompute

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64


class ClassToken(nn.Module):
    """A vision transformer in small: only the first token of each picture reaches the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.patches, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.mlp, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(x.shape[0], 1, WIDTH), self.patches(x)], dim=1)
        tokens = tokens + self.mlp(self.norm(tokens))
        return self.head(tokens[:, 0]).logsumexp(-1).sum()


class Unbind(nn.Module):
    """A recurrent network: the projection of all inputs is one product, and each step takes its part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.recur = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[0], WIDTH)
        for step in self.project(x).unbind(1)[:8]:
            hidden = torch.tanh(step * self.recur(hidden))
        return hidden.sum()


class Chunks(nn.Module):
    """Attention over the three parts of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        return self.out(y.transpose(1, 2).flatten(-2)).square().sum()


class Experts(nn.Module):
    """Each expert gets a slice of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.relu(self.first(x)).flatten(0, 1)
        parts = tokens.chunk(4)
        return torch.cat([torch.tanh(expert(part)) for expert, part in zip(self.experts, parts, strict=True)]).sum()


class FirstRows(nn.Module):
    """Backward reads the first 16 rows of a large product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).flatten(0, 1)
        return self.second(hidden[:16]).sum() + hidden.sum()


class FirstColumns(nn.Module):
    """The same with a dense view in transposed order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).flatten(0, 1)
        return (self.second @ hidden[:16].t()).sum() + hidden.sum()


class AllOfThem(nn.Module):
    """All in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            (ClassToken(), Unbind(), Chunks(), Experts(), FirstRows(), FirstColumns()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).sum()


PLANS: dict[str, dict[str, Any]] = {
    "all moves": {"policy": "all"},
    "all stays": {"hardware": machine(1.0), "recompute": False, "max_slowdown": 0.0},
    "some is made again": {"hardware": machine(1.0), "max_slowdown": 5.0},
}


KINDS = {"all moves": Offload, "all stays": Keep, "some is made again": Recompute}


def held_and_planned(model: nn.Module, x: Tensor, config: OffloadConfig) -> tuple[list[int], Plan]:
    """The sizes of the storages that a step holds between forward and backward, without inputs and tokens; the plan."""
    steps: list[OffloadedStep] = []

    def backend(gm: Any, example_inputs: Sequence[Any]) -> Any:
        return compile_with_inductor(gm, example_inputs, config, observe=steps.append)

    torch.compiler.reset()
    with _torch_private.functorch_config_patch(enable_autograd_cache=False), without_kernels():
        loss = torch.compile(model, backend=backend)(x)
        (step,) = steps
        node: Any = loss.grad_fn
        saved = [*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ())]
        inputs = {tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters())}
        sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
        held = sorted(size for pointer, size in sizes.items() if pointer not in inputs)
        del saved
        loss.backward()
    tokens = [8] * len(step.plan.offloaded)
    assert held[: len(tokens)] == tokens
    return held[len(tokens) :], step.plan


@pytest.mark.parametrize("plan_for", PLANS)
def test_planned_bytes_are_held_bytes(plan_for: str) -> None:
    torch.manual_seed(0)
    config = OffloadConfig(min_tensor_bytes=0, **PLANS[plan_for])
    held, plan = held_and_planned(AllOfThem(), torch.randn(8, 64, WIDTH), config)
    decisions = {type(one.decision) for one in plan.storages if not one.is_input}
    assert KINDS[plan_for] in decisions
    assert held == sorted(
        one.size_bytes for one in plan.storages if isinstance(one.decision, Keep) and not one.is_input
    )
