"""Models that a function of the user makes, for `explain`, `rok` and `bench`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ssdtrain_fx.studies import zoo
from ssdtrain_fx.studies.own_models import OwnModelError, load_model_function

SOURCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64, dtype=torch.float64) for _ in range(6)])
        self.layers[0].requires_grad_(False)
        self.unused = nn.Linear(1, 1)

    def forward(self, x, power):
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x) ** power)
        torch._dynamo.graph_break()
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x) ** power)
        return x.sum()

def make():
    return Model(), (torch.randn(256, 64, dtype=torch.float64), 2)

def make_output():
    return nn.Linear(2, 2), (torch.ones(3, 2),)

def make_function():
    return (lambda x: x), (torch.ones(3, 2),)

def make_alone():
    return nn.Linear(2, 2)

def make_sized(batch):
    return nn.Linear(2, 2), (torch.ones(batch, 2),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models_of_a_user.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "models_of_a_user", raising=False)
    return tmp_path


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ssdtrain_fx", "bench", "--device", "cpu", "--steps", "2", *arguments]
    environment = {**os.environ, "COLUMNS": "200", "SSDTRAIN_DIR": "."}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_it_keeps_its_types_and_may_have_frozen_parameters_and_graph_breaks(folder: Path) -> None:
    options = ("--option", "policy=all", "--option", "min_tensor_bytes=4096")
    done = bench("--model", "models_of_a_user:make", *options, "--json", "results.json")
    assert done.returncode == 0, done.stdout + done.stderr
    plain, ours = json.loads((folder / "results.json").read_text())["results"]
    assert ours["equal_to_inductor"]
    assert plain["losses_hex"] == ours["losses_hex"]
    assert ours["gradient_bytes"] == 5 * (64 * 64 + 64) * 8  # of eight-byte numbers
    assert ours["statistics_last_step"]["bytes_written"] >= 4 * 256 * 64 * 8


def test_what_returns_no_loss_is_named(folder: Path) -> None:
    done = bench("--model", "models_of_a_user:make_output")
    assert done.returncode == 3
    assert "models_of_a_user:make_output returned a tensor of shape (3, 2); expected its loss" in done.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("make_sized", "models_of_a_user:make_sized cannot be called with 0 arguments"),
        ("make_alone", "models_of_a_user:make_alone returned Linear; expected a model and a tuple of its inputs"),
        ("make_function", "models_of_a_user:make_function returned a function as model; expected a torch.nn.Module"),
        ("nothing", "has no attribute 'nothing'"),
    ],
)
def test_what_a_function_must_be_is_said(folder: Path, name: str, message: str) -> None:
    with pytest.raises(OwnModelError, match=message.replace("(", r"\(")):
        zoo.build(f"models_of_a_user:{name}")


def test_a_function_may_take_arguments_where_they_are_given(folder: Path) -> None:
    model, inputs = load_model_function("models_of_a_user:make_sized")(5)
    assert isinstance(model, nn.Module)
    assert [value.shape for value in inputs] == [torch.Size((5, 2))]
    assert "" not in sys.path[:1]
