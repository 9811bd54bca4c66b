"""What steps take is stored once it is known, unless it is nearly known already or was disturbed."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
from steps import EMPTY_GRAPH, FAST_DISK
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.compiler.calibration import Calibration
from ssdtrain_fx.machine import step_times
from ssdtrain_fx.machine.keyed_file import TimesKey
from ssdtrain_fx.machine.step_times import GraphWatcher, StepTimes
from ssdtrain_fx.report.report import Report
from ssdtrain_fx.runtime.step_clock import FIRST_COUNT, WARM_UP_COUNT, step_clock

KEY = TimesKey(
    device="cpu", processor="x", cores=2, threads=2, torch_version="2", libraries="none", settings="defaults"
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that stores the times of this test."""
    path = tmp_path / "profiles"
    monkeypatch.setenv("SSDTRAIN_PROFILE_DIR", str(path))
    return path


class Load:
    """What other programs do."""

    text = ""

    def describe(self) -> str:
        return self.text


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    load = Load()
    monkeypatch.setattr(step_times, "OtherLoad", lambda: load)
    return load


# -- the file ----------------------------------------------------------------------------------------------------------


def test_each_graph_has_a_ratio_that_other_processes_see() -> None:
    times = StepTimes(KEY)
    assert times.ratio("one") is None
    times.store("one", 1.5)
    times.store("two", 3.0)
    assert [StepTimes(KEY).ratio(graph) for graph in ("one", "two", "three")] == [1.5, 3.0, None]


@pytest.mark.parametrize(("ratio", "stored"), [(1.09, 1.0), (0.92, 1.0), (1.2, 1.2), (0.8, 0.8)])
def test_what_is_nearly_right_stays_so_that_plans_stay(ratio: float, stored: float) -> None:
    times = StepTimes(KEY)
    times.store("graph", 1.0)
    times.store("graph", ratio)
    assert times.ratio("graph") == stored


@pytest.mark.parametrize("ratio", ["1.5", 0.0, -1.0, float("nan"), float("inf"), None])
def test_a_file_with_a_wrong_ratio_is_replaced(
    ratio: object, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    times = StepTimes(KEY)
    times.store("graph", 2.0)
    (path,) = directory.glob("step-times-*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "ratios": {"graph": ratio}}))
    assert times.ratio("graph") is None
    assert f"The times in {path} cannot be used (it has a ratio that is not a positive number)" in caplog.text
    times.store("graph", 3.0)
    assert times.ratio("graph") == 3.0


def test_a_directory_that_cannot_be_written_is_logged(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory.write_text("a file")
    StepTimes(KEY).store("graph", 2.0)
    assert "Step times cannot be stored in" in caplog.text


def test_what_other_programs_disturb_is_not_stored(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    times = StepTimes(KEY)
    watcher = GraphWatcher(times, "graph")
    watcher.start()
    load.text = "Other programs use 1.5 of 2 processors"
    watcher.add(9.0)
    assert times.ratio("graph") is None
    assert f"the time of steps is not stored: {load.text}." in caplog.text
    load.text = ""
    watcher.add(3.0)
    assert times.ratio("graph") == 3.0


# -- a model -----------------------------------------------------------------------------------------------------------


def configure(tmp_path: Path, inner: str = "inductor", costs: str = "steps") -> OffloadConfig:
    return OffloadConfig(
        inner=inner,  # pyright: ignore[reportArgumentType]
        costs=costs,  # pyright: ignore[reportArgumentType]
        policy="all",
        min_tensor_bytes=0,
        hardware=FAST_DISK,
        ssd_dir=tmp_path,
    )


def layers() -> nn.Module:
    return nn.Sequential(*(module for _ in range(4) for module in (nn.Linear(64, 64), nn.Tanh())))


def explain(config: OffloadConfig) -> Report:
    torch._dynamo.reset()
    return ssdtrain_fx.explain(layers(), torch.ones(512, 64), config=config)


def train(config: OffloadConfig, steps: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layers(), backend=ssdtrain_fx.backend(config))
    for _ in range(steps):
        compiled(torch.ones(512, 64)).sum().backward()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_next_plan_counts_on_what_steps_took(inner: str, tmp_path: Path, directory: Path, load: Load) -> None:
    config = configure(tmp_path, inner)
    before = explain(config).graphs[0]
    assert before.costs.roofline_ratio is None
    assert before.plan.step_s == explain(configure(tmp_path, inner, "roofline")).plan.step_s
    train(config, WARM_UP_COUNT + FIRST_COUNT)
    after = explain(config).graphs[0]
    ratio = after.costs.roofline_ratio
    assert ratio is not None
    assert str(after.costs).endswith(f" by roofline, times {ratio:.2f} as in earlier steps")
    assert after.plan.step_s == pytest.approx(ratio * before.plan.step_s)
    (path,) = directory.glob("step-times-*.json")
    assert list(json.loads(path.read_text())["ratios"].values()) == [ratio]
    # Code for the new plan is measured against the roofline as well, not against what was measured before.
    train(config, 1)
    forward, backward = (half for half in step_clock._runs if half.graph in path.read_text())
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert forward.roofline_s == backward.roofline_s == pytest.approx(before.plan.step_s + before.plan.recompute_s)


def test_other_hardware_has_another_ratio(tmp_path: Path, load: Load) -> None:
    config = configure(tmp_path, "aot_eager")
    explain(config)
    train(config, WARM_UP_COUNT + FIRST_COUNT)
    assert explain(config).graphs[0].costs.roofline_ratio is not None
    other = dataclasses.replace(config, hardware=FAST_DISK.computing_slower(2.0))
    assert explain(other).graphs[0].costs.roofline_ratio is None


def test_steps_of_any_size_are_not_measured(tmp_path: Path, directory: Path, load: Load) -> None:
    torch._dynamo.reset()
    config, timed = configure(tmp_path, "aot_eager"), dict(step_clock._runs)
    compiled = torch.compile(layers(), backend=ssdtrain_fx.backend(config), dynamic=True)
    for size in range(256, 256 + WARM_UP_COUNT + FIRST_COUNT):
        compiled(torch.ones(size, 64)).sum().backward()
    assert step_clock._runs == timed
    assert not list(directory.glob("step-times-*"))


def test_on_another_device_the_roofline_counts(caplog: pytest.LogCaptureFixture) -> None:
    config = OffloadConfig(costs="steps", hardware=FAST_DISK)
    with FakeTensorMode():
        calibration = Calibration(config, EMPTY_GRAPH, [torch.empty(1, device="cuda")])
    assert "costs='steps' measures steps on a CPU only" in caplog.text
    assert calibration.hardware == config.load_hardware("cuda")
    assert calibration.roofline_ratio is None


@pytest.mark.parametrize("costs", ["roofline", "measured"])
def test_other_costs_measure_no_steps(costs: str, tmp_path: Path, directory: Path) -> None:
    timed = dict(step_clock._runs)
    train(configure(tmp_path, "aot_eager", costs), WARM_UP_COUNT + FIRST_COUNT)
    assert step_clock._runs == timed
    assert not list(directory.glob("step-times-*"))
