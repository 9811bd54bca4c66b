"""Compare bits where they are hard to keep: float32 and bfloat16 in one graph on a CPU. Exit code 1: some differ.

    python benchmarks/mixed_precision.py

The model reduces rows of ``float(bf16 product) * a`` and, after two float32 products, rows of ``h * a``. Plain Inductor
computes both reductions in one loop nest, because both read ``a``. One of them reads no 16-bit value, so the nest has
vectors of 16 elements (AVX-512). With offloading, the two reductions are not fused: the first one would then run later
than planned. On its own it reads 16-bit values in each of its bodies, so Inductor would give it vectors of 32 elements,
and add up a row in another order. docs/reports/last_bits.md says what is done against it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig


class Mixed(nn.Module):
    """Two reductions that share an input, one of them of a 16-bit product."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(width, width) / 16) for _ in range(3))

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        product = x.bfloat16() @ self.first.bfloat16()
        one = (product.float() * a).sum(-1)
        hidden = torch.tanh(a @ self.second) @ self.third
        other = (hidden * a).sum(-1)
        return (one * other).square().mean()


def train_step(backend: Any) -> dict[str, Tensor]:
    """Loss and gradients of one step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mixed()
    loss: Tensor = torch.compile(model, backend=backend, dynamic=False)(torch.randn(512, 256), torch.randn(512, 256))
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": loss.detach(), **gradients}


def main() -> int:
    torch.use_deterministic_algorithms(True)
    expected = train_step("inductor")
    found = train_step(ssdtrain_fx.backend(OffloadConfig(policy="all", min_tensor_bytes=0)))
    different = {name: float((found[name] - value).abs().max()) for name, value in expected.items()}
    different = {name: most for name, most in different.items() if most}
    print(f"different: {different or 'nothing'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
