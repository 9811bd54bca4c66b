"""Train linear layers of torchao, whose weights are quantized, under plain Inductor and under ssdtrain, to the bit.

    python tests/trainers/torchao_training.py float8 int8 frozen_int8

float8 arithmetic is emulated: a CPU has none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from small_training import EVERYTHING, Trained, compare
from torch import Tensor, nn

import ssdtrain_fx

WIDTH = 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def float8() -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(Net(), config=Float8LinearConfig(emulate=True))


def int8() -> nn.Module:
    """Weights that are trained as int8."""
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    net = Net()
    quantize_(net, int8_weight_only_quantized_training())
    return net


def frozen_int8() -> nn.Module:
    """Weights that stay as they are, as below adapters. The biases are trained."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    net = Net()
    quantize_(net, Int8WeightOnlyConfig())
    return net


KINDS: dict[str, Callable[[], nn.Module]] = {kind.__name__: kind for kind in (float8, int8, frozen_int8)}


def train(kind: str, backend: str) -> Trained:
    """The gradients that two steps leave; torchao has optimizers of its own."""
    net = KINDS[kind]()
    if backend == "ssdtrain":
        ssdtrain_fx.enable(**EVERYTHING)
    compiled = torch.compile(net, backend=backend)
    losses: list[float] = []
    for seed in range(2):
        loss = compiled(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed)))
        loss.backward()
        losses.append(loss.item())
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    assert gradients
    return Trained(losses, gradients)


def main() -> None:
    torch._inductor.config.cpp.simdlen = 1  # kernels without vector instructions, which compile in half the time
    for kind in sys.argv[1:]:
        moved = compare(lambda backend, kind=kind: train(kind, backend))
        sys.stdout.write(f"{kind}: equal, {moved.offloads} tensors moved\n")


if __name__ == "__main__":
    main()
