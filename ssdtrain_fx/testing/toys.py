"""Toy models, each with a feature that makes its graph hard to rewrite."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssdtrain_fx.testing.capture import CapturedStep, Partition, capture_step, min_cut


class MLP(nn.Module):
    """Two linear layers with GELU and dropout: saves a 0-1 mask, and has a pointwise tail that can be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.second(F.gelu(self.first(x))), 0.5).square().mean()


class Attention(nn.Module):
    """One fused projection: q, k and v are strided views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        return self.out(y.transpose(1, 2).flatten(-2)).relu().sum()


class Norms(nn.Module):
    """Layer norms: ops with several outputs; backward reads three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.linear = nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.second(torch.tanh(self.linear(self.first(x))))).square().sum()


class Convolutions(nn.Module):
    """Convolution, batch norm (which writes its running statistics) and pooling (which saves int64 positions)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.linear = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.convolution(x))), 2)
        return self.linear(y.flatten(1)).logsumexp(-1).sum()


class Deep(nn.Module):
    """Six layers on a large batch: most of the memory is activations, and the peak is at the end of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


TOYS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (MLP, (64, 16)),
    "attention": (Attention, (4, 16, 16)),
    "norms": (Norms, (48, 16)),
    "convolutions": (Convolutions, (8, 2, 8, 8)),
    "deep": (Deep, (64, 8)),
}
"""Module and input shape, by name."""


@functools.cache
def capture_toy(name: str, *, partition: Partition = min_cut, dynamic: bool = False) -> CapturedStep:
    """Capture a step of a toy model. The result is shared; ``CapturedStep.join`` copies, so tests stay independent."""
    make, shape = TOYS[name]
    torch.manual_seed(0)
    module = make()
    return capture_step(module, torch.randn(shape, requires_grad=True), partition=partition, dynamic=dynamic)
