"""A model of six equal layers, and hardware for plans that offload its saved storages.

This is not in ``conftest.py``, because there are several files of that name and Dynamo looks up modules by name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssdtrain_fx.hardware import Channel, Hardware

HARDWARE = Hardware(
    device="a machine for tests",
    flops_per_s={"float32": 1e9},
    memory_bytes_per_s=1e9,
    elements_per_s={"float32": 1e9},
    kernel_s=1e-6,
    write=Channel(bytes_per_s=2e8),
    read=Channel(bytes_per_s=2e8),
    share_when_both=0.5,
    copy_out=Channel(bytes_per_s=1e10),
    copy_in=Channel(bytes_per_s=1e10),
    copies_block_compute=True,
    offload_s=1e-6,
    reload_s=1e-6,
    staging_bytes=1 << 14,
)


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()
