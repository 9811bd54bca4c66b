"""A training loop with Accelerate, for each way in which it gets to a backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import BATCH, EVERYTHING, Text, Trained, compare, make_model, parameters_of

import ssdtrain_fx

pytestmark = [
    pytest.mark.usefixtures("accelerate", "one_thread", "plain_kernels"),
    pytest.mark.filterwarnings("ignore"),
]


def fresh_accelerator(**settings: Any) -> Any:
    """Accelerate shares its state over all accelerators of a process. This one starts anew."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **settings)


def by_name(backend: str, model: Any) -> tuple[Any, Any]:
    ssdtrain_fx.enable(**EVERYTHING)
    return fresh_accelerator(dynamo_backend=backend), model


def by_plugin(backend: str, model: Any) -> tuple[Any, Any]:
    from accelerate.utils import TorchDynamoPlugin

    ssdtrain_fx.enable()
    options = EVERYTHING if backend == "ssdtrain" else None
    plugin = TorchDynamoPlugin(backend=backend, options=options)
    return fresh_accelerator(dynamo_plugin=plugin), model


def compiled_before(backend: str, model: Any) -> tuple[Any, Any]:
    options = EVERYTHING if backend == "ssdtrain" else None
    return fresh_accelerator(), torch.compile(model, backend=backend, options=options)


def regional(backend: str, model: Any) -> tuple[Any, Any]:
    from accelerate.utils import TorchDynamoPlugin

    ssdtrain_fx.enable(**EVERYTHING)
    plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=True)
    return fresh_accelerator(dynamo_plugin=plugin), model


@pytest.mark.parametrize(
    "set_up", [by_name, by_plugin, compiled_before, pytest.param(regional, marks=pytest.mark.slow)]
)
def test_a_training_loop(set_up: Any) -> None:
    def train(backend: str) -> Trained:
        accelerator, model = set_up(backend, make_model())
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        loader = torch.utils.data.DataLoader(Text(8), batch_size=BATCH)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses: list[float] = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return Trained(losses, parameters_of(accelerator.unwrap_model(model, keep_torch_compile=False)))

    compare(train)


SCRIPT = """
import accelerate
import torch
import ssdtrain_fx


def train(prepare, backward):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    compiled, optimizer = prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        backward(compiled(torch.randn(64, 32)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


expected = train(lambda model, optimizer: (torch.compile(model), optimizer), torch.Tensor.backward)
ssdtrain_fx.enable(policy="all", min_tensor_bytes=0)
accelerator = accelerate.Accelerator(dynamo_backend="ssdtrain")
found = train(accelerator.prepare, accelerator.backward)
assert all(map(torch.equal, found, expected))
assert ssdtrain_fx.statistics().bytes_written > 0
"""


def test_accelerate_launch(tmp_path: Path) -> None:
    """With the bits of plain Inductor. The launcher has a list of names of its own, so the script names the backend."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "train.py"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
