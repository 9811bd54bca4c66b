"""Reports that the tests share."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from layered import HARDWARE, Layered

from ssdtrain_fx import OffloadConfig, Report, explain


@pytest.fixture(scope="session")
def report() -> Report:
    config = OffloadConfig(inner="aot_eager", min_tensor_bytes=512, policy="all", hardware=HARDWARE)
    return explain(Layered(), torch.randn(64, 32), config=config)


@pytest.fixture(scope="session")
def tiered_report() -> Report:
    """Like :func:`report`, but for a GPU whose staging memory can hold two storages, each in a piece of 2 MiB."""
    gpu = dataclasses.replace(HARDWARE, device="toy GPU", copies_block_compute=False, staging_bytes=5 << 20)
    config = OffloadConfig(inner="aot_eager", min_tensor_bytes=512, policy="all", hardware=gpu)
    return explain(Layered(), torch.randn(64, 32), config=config)
