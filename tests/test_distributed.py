"""Training in two CPU processes with gloo: the gradients equal those without offloading, to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

TRAINING = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import ssdtrain_fx
from ssdtrain_fx.testing import toy_hardware

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

def gradients(backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Blocks()
    if sys.argv[1] == "ddp":
        step = torch.compile(nn.parallel.DistributedDataParallel(model), backend=backend)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for idx, block in enumerate(model.blocks):
            model.blocks[idx] = torch.compile(block, backend=backend)
            fully_shard(model.blocks[idx], mesh=mesh)
        step = fully_shard(model, mesh=mesh)
    step(torch.randn(32, 64) + dist.get_rank()).backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in found]

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[3]), world_size=2)
hardware = toy_hardware(1e9, kernel_s=1e-3)
config = ssdtrain_fx.OffloadConfig(inner="aot_eager", policy="all", min_tensor_bytes=0, hardware=hardware, ssd_dir=".")
expected, found = gradients("aot_eager"), gradients(ssdtrain_fx.backend(config))
assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
assert any(gradient.any() for gradient in found)
statistics = ssdtrain_fx.statistics()
assert statistics.offloads > 0 and statistics.reloads >= statistics.offloads, statistics
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_gradients_are_equal(parallelism: str, tmp_path: Path) -> None:
    """Each rank has its own data. FSDP shards blocks that are compiled one by one."""
    command = [sys.executable, "-c", TRAINING, parallelism, str(tmp_path / "rendezvous")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
