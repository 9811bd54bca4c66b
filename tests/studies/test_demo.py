"""The demo: in what order it trains, and what it says when the two runs differ."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, cast

import pytest
import torch
from steps import FAST_DISK
from test_cli import ROOT, TINY
from typer.testing import CliRunner

from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.cli import app
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.studies import demo, measure
from ssdtrain_fx.studies.measure import Difference, Distance, Run, Step

CHANGE = """
import json, sys
from ssdtrain_fx.studies import measure

class Trainer(measure._Trainer):
    def step(self, index):
        planted = {"time": (2, 1), "memory": (1, 7)}[self._run.measure]
        self._changed = planted[1] if index == planted[0] and self._run.variant == "ssdtrain" else 0
        return super().step(index)

    def _gradients(self):
        gradients = super()._gradients()
        for name in list(gradients)[:self._changed]:
            gradients[name] = gradients[name].clone()
            gradients[name].view(-1)[0] += 0.25
        return gradients

measure._Trainer = Trainer
measure.serve(measure.Run(**json.loads(sys.argv[1])))
"""
"""A worker that adds 0.25 to an element of the gradients of `ssdtrain`: of one parameter in the last timed step, and of
seven parameters in the second step that is sampled for memory."""


@pytest.mark.slow
def test_the_first_differences_are_named_with_run_step_parameters_and_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(measure.Worker, "program", ("-c", CHANGE))
    path = tmp_path / "demo.json"
    done = CliRunner().invoke(app, ["demo", *TINY, "--json", str(path), "--png", str(tmp_path / "memory.png")])
    assert done.exit_code == 1, done.output
    lines = done.output[done.output.index("The runs do not agree to the bit.") :].splitlines()
    assert lines[1].startswith("First difference of ssdtrain in the timed run: step 3. The losses are both ")
    assert lines[2] == "The gradients of 1 of 28 parameters differ. Largest differences, absolute and relative:"
    assert lines[3].startswith("  model.transformer.wte.weight: 0.25, ")
    assert lines[4].startswith("First difference of ssdtrain in the run sampled for memory: step 2. The losses are ")
    assert lines[5] == "The gradients of 7 of 28 parameters differ. Largest differences, absolute and relative:"
    assert all(line.startswith("  model.transformer.") and ": 0.25, " in line for line in lines[6:11])
    assert lines[11] == "  and 2 more"
    (row,) = [line for line in done.output.splitlines() if "all gradients, SHA-256" in line]
    _, _, plain, offloaded, verdict, _ = (cell.strip() for cell in row.split("│"))
    assert plain != offloaded
    assert verdict == "DIFFERENT"
    written = json.loads(path.read_text())
    assert (written["equal"], written["gradients_equal"], written["losses_equal"]) == (False, False, [True] * 3)
    assert [(one["step"], len(one["gradients"])) for one in written["differences"]] == [(2, 1), (1, 7)]


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
            start_bytes=0,
            peak_bytes=0,
            samples=[],
            page_faults=0,
            statistics=Statistics(),
        )

    def gradients(self, names: list[str]) -> dict[str, torch.Tensor]:
        assert names, "the values are asked for only where digests differ"
        return {name: self._gradients[name] for name in names}


def find_difference(worker: HeldGradients, base: HeldGradients) -> Difference | None:
    return measure.find_difference(cast(Any, worker), cast(Any, base), worker.step, base.step)


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
        "First difference of ssdtrain in the timed run: step 1. The losses are 1.0 and 1.0000000000000002.",
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
    apart = measure._distance(torch.tensor(found, dtype=torch.float64), torch.tensor(base, dtype=torch.float64))
    assert (str(apart.absolute), str(apart.relative)) == (absolute, relative)


def test_both_processes_that_offload_plan_with_the_same_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine keeps no profile: each process would measure it again, and plan something else."""
    seen: list[tuple[str, Hardware]] = []

    class Worker:
        def __init__(self, run: Run) -> None:
            self.run = run
            if run.variant == "ssdtrain":
                seen.append((run.measure, OffloadConfig.from_options(run.options).load_hardware("cpu")))

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def step(self) -> Step:
            return HeldGradients(a=1.0).step

    measured = iter([FAST_DISK])
    monkeypatch.setattr(OffloadConfig, "_find_hardware", functools.partialmethod(find_hardware, measured))
    monkeypatch.setattr(demo, "Worker", Worker)
    run = demo.default_run("cpu")
    comparison = demo.compare(run, steps=2, offloading="ssdtrain", on_step=lambda run, step: None)
    assert seen == [("time", FAST_DISK), ("memory", FAST_DISK)]
    assert comparison.equal
    assert "hardware" not in comparison.run.options, "the file is gone by then"


def find_hardware(config: OffloadConfig, measured: Iterator[Hardware], device: str) -> Hardware:
    return next(measured) if config.hardware is None else Hardware.from_json(Path(str(config.hardware)).read_text())


def test_the_plan_is_the_order_of_the_steps() -> None:
    turns = demo.plan(Run(), steps=2, offloading="ssdtrain")
    assert [(turn.run.measure, turn.run.variant, turn.index) for turn in turns] == [
        *[("time", "inductor", 0), ("time", "ssdtrain", 0), ("time", "inductor", 1), ("time", "ssdtrain", 1)],
        *[("memory", variant, index) for index in range(3) for variant in ("inductor", "ssdtrain")],
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
    assert second.startswith("Step time is measured first.")
    assert third.startswith("[1/12] step time, inductor, step 1 of 3: ")
    assert [line for line in rest if line.startswith("[12/12] memory, ssdtrain, step 3 of 3: ")]
