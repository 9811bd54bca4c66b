"""Two thousand steps with changing batches and random exceptions: nothing grows."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from steps import FAST_DISK, settled_statistics
from torch import Tensor, nn

from ssdtrain_fx import ActivationLostError, OffloadConfig, backend
from ssdtrain_fx.runtime import ops

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(1800)]

log = logging.getLogger(__name__)

STEPS = 2000
WARM_UP_STEPS = 200
BATCHES = [4, 7, 16, 32]


class UserError(Exception):
    """An exception raised by the caller's code."""


def resources(directory: Path) -> dict[str, int]:
    process = psutil.Process()
    return {
        "threads": threading.active_count(),
        "descriptors": process.num_fds(),
        "files": len(list(directory.iterdir())),
        "resident MiB": process.memory_info().rss >> 20,
        "file bytes": settled_statistics().file_bytes,
    }


def fail(*arguments: Any) -> None:
    raise UserError


@pytest.mark.parametrize("io", ["posix", "aio"])
def test_nothing_grows(tmp_path: Path, io: Any) -> None:
    generator = random.Random(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    weights = list(model.parameters())
    config = OffloadConfig(
        inner="aot_eager", policy="all", min_tensor_bytes=0, ssd_dir=tmp_path, io=io, checksum=True, hardware=FAST_DISK
    )
    compiled = torch.compile(model, backend=backend(config), dynamic=True)
    early: dict[str, int] = {}
    exceptions = 0
    for number in range(STEPS):
        x = torch.randn(generator.choice(BATCHES), 64)
        event = generator.choice(["none"] * 4 + ["hook", "dropped", "damage"])
        loss: Tensor = compiled(x).square().sum()
        if event == "damage":
            (engine,) = ops._engines._by_config.values()
            engine.wait_until_idle()
            os.ftruncate(engine._ledger.file.locate(0)[0], 0)
        handle = weights[0].register_hook(fail) if event == "hook" else None
        try:
            if event != "dropped":
                loss.backward()
        except (UserError, ActivationLostError):
            exceptions += 1
        else:
            assert event in ("none", "dropped")
        if handle is not None:
            handle.remove()
        del loss
        if event == "damage":  # then the file has the length that the engine expects
            ops.close()
        if event == "none":
            found = [weight.grad for weight in weights]
            model.zero_grad(set_to_none=True)
            model(x).square().sum().backward()
            assert all(torch.equal(one, weight.grad) for one, weight in zip(found, weights, strict=True))  # type: ignore[arg-type]
        model.zero_grad(set_to_none=True)
        if number == WARM_UP_STEPS:
            gc.collect()
            early = resources(tmp_path)
    gc.collect()
    late = resources(tmp_path)
    log.info("after %d steps %s, after %d steps %s, %d exceptions", WARM_UP_STEPS, early, STEPS, late, exceptions)
    assert exceptions > STEPS / 10
    assert settled_statistics().slots_in_use == 0
    for name in ("threads", "descriptors", "files"):
        assert late[name] <= early[name], name
    assert late["file bytes"] <= max(early["file bytes"], 256 << 20)
    assert late["resident MiB"] <= early["resident MiB"] + 64
