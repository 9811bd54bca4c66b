"""One report for many tests: six equal layers on a slow disk, so that everything but the last moves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from ssdtrain_fx import OffloadConfig, Report, explain
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


@pytest.fixture(scope="session")
def report() -> Report:
    config = OffloadConfig(inner="aot_eager", min_tensor_bytes=512, policy="all", hardware=HARDWARE)
    return explain(Layered(), torch.randn(64, 32), config=config)


@pytest.fixture(scope="session")
def tiered_report() -> Report:
    """As :func:`report`, on a GPU whose staging has room for two storages that stay, in pieces of 2 MiB each."""
    gpu = dataclasses.replace(HARDWARE, device="toy GPU", copies_block_compute=False, staging_bytes=5 << 20)
    config = OffloadConfig(inner="aot_eager", min_tensor_bytes=512, policy="all", hardware=gpu)
    return explain(Layered(), torch.randn(64, 32), config=config)
