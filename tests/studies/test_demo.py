"""The demo: in what order it trains, and what it says when the two runs differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from test_cli import ROOT, TINY
from typer.testing import CliRunner

from ssdtrain_fx.cli import app
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.studies import comparison, demo, measure
from ssdtrain_fx.studies.comparison import Difference, Distance
from ssdtrain_fx.studies.measure import Run, Step

CHANGE = """
import json, sys
from ssdtrain_fx.studies import measure, trainer

class Trainer(trainer.Trainer):
    _changed = 0

    def step(self, index, *, sampled):
        self._changed = 7 if index == FIRST and self._run.variant == "ssdtrain" else 0
        return super().step(index, sampled=sampled)

    def gradients(self):
        gradients = super().gradients()
        for name in list(gradients)[:self._changed]:
            gradients[name] = gradients[name].clone()
            gradients[name].view(-1)[0] += 0.25
        return gradients

trainer.Trainer = Trainer
trainer.serve(measure.Run(**json.loads(sys.argv[1])))
"""
"""A worker that adds 0.25 to an element of the gradients of `ssdtrain`: of seven parameters in the step FIRST."""


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 3], ids=["measured", "sampled"])
def test_the_first_difference_is_named_with_step_parameters_and_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: int
) -> None:
    """In the second of three steps, or in the sampled step after them."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(measure.Worker, "program", ("-c", CHANGE.replace("FIRST", str(first))))
    path = tmp_path / "demo.json"
    done = CliRunner().invoke(app, ["demo", *TINY, "--json", str(path), "--png", str(tmp_path / "memory.png")])
    assert done.exit_code == 1, done.output
    lines = done.output[done.output.index("The runs do not agree to the bit.") :].splitlines()
    assert lines[1].startswith(f"First difference of ssdtrain: step {first + 1}. The losses are both ")
    assert lines[2] == "The gradients of 7 of 28 parameters differ. Largest differences, absolute and relative:"
    assert all(line.startswith("  model.transformer.") and ": 0.25, " in line for line in lines[3:8])
    assert lines[8] == "  and 2 more"
    (row,) = [line for line in done.output.splitlines() if "all gradients, SHA-256" in line]
    _, _, plain, offloaded, verdict, _ = (cell.strip() for cell in row.split("│"))
    assert plain != offloaded
    assert verdict == "DIFFERENT"
    written = json.loads(path.read_text())
    assert (written["equal"], written["gradients_equal"], written["losses_equal"]) == (False, False, [True] * 3)
    assert (written["difference"]["step"], len(written["difference"]["gradients"])) == (first, 7)


class HeldGradients:
    """What a worker answers after a step."""

    def __init__(self, **gradients: float) -> None:
        self.run = Run(variant="ssdtrain")
        self._gradients = {name: torch.tensor([1.0, value]) for name, value in gradients.items()}
        self.step = Step(
            index=1,
            loss_hex=(1.0).hex(),
            gradients={name: str(value) for name, value in gradients.items()},
            duration_ms=1.0,
            process_peak_bytes=0,
            peak_was_reset=True,
            samples=[],
            page_faults=0,
            statistics=Statistics(),
        )

    def gradients(self, names: list[str]) -> dict[str, torch.Tensor]:
        assert names, "the values are asked for only where digests differ"
        return {name: self._gradients[name] for name in names}


def find_difference(worker: HeldGradients, base: HeldGradients) -> Difference | None:
    return comparison.find_difference(cast(Any, worker), cast(Any, base), worker.step, base.step)


def test_the_largest_difference_of_gradients_comes_first() -> None:
    base = HeldGradients(a=1.0, b=1.0, c=1.0, d=1.0)
    difference = find_difference(HeldGradients(a=1.5, b=1.0, c=3.0, d=float("nan")), base)
    assert difference is not None
    assert (difference.step, difference.parameters, list(difference.gradients)) == (1, 4, ["d", "c", "a"])
    assert difference.gradients["c"] == Distance(absolute=2.0, relative=2 / 3)


def test_equal_digests_are_no_difference() -> None:
    assert find_difference(HeldGradients(a=1.0), HeldGradients(a=1.0)) is None


def test_losses_that_differ_are_shown_to_the_last_bit() -> None:
    difference = Difference(
        run=Run(variant="ssdtrain"),
        step=0,
        loss=1.0 + 2**-52,
        base_loss=1.0,
        parameters=2,
        gradients={"weight": Distance(absolute=1e-9, relative=0.5)},
    )
    assert str(difference).splitlines() == [
        "First difference of ssdtrain: step 1. The losses are 1.0 and 1.0000000000000002.",
        "The gradients of 1 of 2 parameters differ. Largest differences, absolute and relative:",
        "  weight: 1e-09, 0.5",
    ]


@pytest.mark.parametrize(
    ("found", "base", "absolute", "relative"),
    [
        ([1.0, 0.0, 4.0], [1.0, 0.0, 3.0], "1.0", "0.25"),
        ([1e-3, 1.0], [0.0, 1.0], "0.001", "1.0"),
        ([-0.0], [0.0], "0.0", "0.0"),
        ([float("nan"), 2.0], [1.0, 1.0], "nan", "nan"),
    ],
    ids=["largest", "from zero", "signs of zero", "not a number"],
)
def test_how_far_tensors_are_apart(found: list[float], base: list[float], absolute: str, relative: str) -> None:
    apart = comparison._distance(torch.tensor(found, dtype=torch.float64), torch.tensor(base, dtype=torch.float64))
    assert (str(apart.absolute), str(apart.relative)) == (absolute, relative)


def test_the_plan_is_the_order_of_the_steps() -> None:
    turns = demo.plan(Run(), steps=2, offloading="ssdtrain")
    assert [(turn.run.variant, turn.index, turn.sampled) for turn in turns] == [
        *[("inductor", 0, False), ("ssdtrain", 0, False), ("inductor", 1, False), ("ssdtrain", 1, False)],
        *[("inductor", 2, True), ("ssdtrain", 2, True)],
    ]


@pytest.mark.slow
def test_without_a_terminal_the_demo_says_at_once_what_it_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ssdtrain_fx", "demo", *TINY, "--png", str(tmp_path / "memory.png")]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first, second, third = (process.stdout.readline() for _ in range(3))
        assert process.poll() is None, "these lines are read while it trains"
        rest = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert first.startswith(
        "GPT-2, 2 layers, hidden 64, batch 2 x 64 bytes of text, cpu. It is trained with plain Inductor"
    )
    assert second.startswith("The processes take turns")
    assert third.startswith("[1/8] inductor, step 1 of 3: ")
    assert [line for line in rest if line.startswith("[8/8] ssdtrain, step for the course of memory: ")]
