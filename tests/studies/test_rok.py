"""The recompute-offload-keep curve: invariants of predicted points, and the command that writes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import FAST_DISK
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import ssdtrain_fx
from ssdtrain_fx import ConfigError, OffloadConfig, RokCurve, RokOutcome, RokPoint, explain, rok
from ssdtrain_fx.cli import app
from ssdtrain_fx.hardware import Channel
from ssdtrain_fx.studies.measure import Run
from ssdtrain_fx.studies.rok_curve import Strategy, of_strategy
from ssdtrain_fx.studies.rok_measurement import measure_rok, run_of

WIDTH = 64
SLOWDOWNS = (0.0, 0.1, 0.5, 2.0)
SLOW_DISK = dataclasses.replace(FAST_DISK, write=Channel(bytes_per_s=2e7), read=Channel(bytes_per_s=2e7))
"""So slow that every transfer is exposed."""
CONFIG = OffloadConfig(min_tensor_bytes=512, hardware=SLOW_DISK)


class Layer(nn.Module):
    """Saves several activations that can all be recomputed from one input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Deep(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x.square().sum()


def make(batch: int) -> tuple[nn.Module, tuple[Tensor]]:
    return Deep(), (torch.randn(batch, WIDTH),)


def make_recomputing(batch: int) -> tuple[nn.Module, tuple[Tensor]]:
    return Deep(recompute=True), (torch.randn(batch, WIDTH),)


def curve_of(**changes: Any) -> RokCurve:
    settings: dict[str, Any] = {"batch_sizes": [512], "max_slowdowns": SLOWDOWNS, "config": CONFIG, **changes}
    return rok(make, **settings)


def peaks(points: list[RokPoint]) -> list[int]:
    return [point.predicted.peak_bytes for point in points]


def times(points: list[RokPoint]) -> list[float]:
    return [point.predicted.step_s for point in points]


def test_every_strategy_trades_as_it_must() -> None:
    curve = curve_of(batch_sizes=[512, 1024], make_recomputing_model=make_recomputing)
    assert curve.skipped == ()
    for batch in (512, 1024):
        points = [point for point in curve.points if point.batch == batch]
        (keep,), (recompute,) = of_strategy(points, "keep"), of_strategy(points, "recompute")
        offload, mixed = of_strategy(points, "offload"), of_strategy(points, "mixed")
        assert recompute.predicted.peak_bytes < 0.7 * keep.predicted.peak_bytes
        assert recompute.predicted.step_s > keep.predicted.step_s
        for planned in (offload, mixed):
            assert [point.max_slowdown for point in planned] == list(SLOWDOWNS)
            assert peaks(planned) == sorted(peaks(planned), reverse=True), "with more time, the peak is not higher"
            assert peaks(planned)[-1] < peaks(planned)[0] <= keep.predicted.peak_bytes
            for point in planned:
                assert point.max_slowdown is not None
                assert point.predicted.step_s <= (1 + point.max_slowdown) * keep.predicted.step_s * (1 + 1e-9)
        assert all(m <= o for m, o in zip(peaks(mixed), peaks(offload), strict=True)), (
            "with one more choice, the peak is not higher"
        )
    keeps = of_strategy(curve.points, "keep")
    assert peaks(keeps)[0] < peaks(keeps)[1]


def test_a_larger_budget_never_costs_more_time() -> None:
    (keep,) = of_strategy(curve_of(max_slowdowns=()).points, "keep")
    highest = keep.predicted.peak_bytes
    budgets = [highest // 2, highest * 3 // 4, highest * 5 // 4]  # a step takes more than its peak
    curve = curve_of(max_slowdowns=(), memory_budgets_bytes=budgets)
    for points in (of_strategy(curve.points, "offload"), of_strategy(curve.points, "mixed")):
        assert [point.memory_budget_bytes for point in points] == budgets
        assert all(peak <= budget for peak, budget in zip(peaks(points), budgets, strict=True))
        assert times(points) == sorted(times(points), reverse=True)
        assert times(points)[-1] == keep.predicted.step_s < times(points)[0]


def test_it_predicts_what_explain_says() -> None:
    """``rok`` plans for a copy of the traced graphs; ``explain`` plans during the trace."""
    model, inputs = make(512)
    (graph,) = explain(model, *inputs, config=dataclasses.replace(CONFIG, max_slowdown=0.5)).graphs
    keep, _, mixed = curve_of(max_slowdowns=[0.5]).points
    assert graph.plan.offloaded
    assert keep.predicted == RokOutcome(peak_bytes=graph.plan.peak_before_bytes, step_s=graph.plan.step_s)
    assert mixed.predicted == RokOutcome(
        peak_bytes=graph.plan.peak_after_bytes, step_s=graph.plan.step_s + graph.plan.exposed_s
    )


def test_what_cannot_be_made_is_named() -> None:
    curve = curve_of(max_slowdowns=(), memory_budgets_bytes=[1])
    assert [point.strategy for point in curve.points] == ["keep"]
    *budgets, recompute = curve.skipped
    for strategy, reason in zip(("offload", "mixed"), budgets, strict=True):
        assert reason.startswith(f"{strategy}, batch 512: memory_budget_bytes is 1, but the predicted activation peak")
    assert recompute == "recompute: make_recomputing_model was not given (--recomputing on the command line)"


@pytest.mark.parametrize(("breaks", "found"), [(True, 2), (False, 0)])
def test_a_model_must_be_one_training_graph(breaks: bool, found: int) -> None:
    def broken(x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos().sum()

    x = torch.randn(8, requires_grad=breaks)
    with pytest.raises(ConfigError, match=f"The model compiles to {found} training graphs at batch size 1"):
        rok(lambda batch: (broken, (x,)), batch_sizes=[1], config=CONFIG)


outcomes = st.builds(RokOutcome, peak_bytes=st.integers(1, 5), step_s=st.sampled_from([0.5, 1.0, 2.0, 4.0]))
rok_points = st.builds(
    RokPoint,
    strategy=st.sampled_from(["keep", "recompute", "offload", "mixed"]),
    batch=st.integers(1, 4),
    max_slowdown=st.none() | st.floats(0, 1),
    memory_budget_bytes=st.none() | st.integers(1, 1 << 40),
    predicted=outcomes,
    measured=st.none() | outcomes,
)


@given(st.lists(rok_points, max_size=8))
def test_nothing_beats_the_front_and_the_front_beats_the_rest(points: list[RokPoint]) -> None:
    front = RokCurve(points=tuple(points)).pareto_front()

    def beats(one: RokPoint, other: RokPoint) -> bool:
        """At least as good in both respects, and better in one."""
        a = (one.outcome.peak_bytes, -one.samples_per_s)
        b = (other.outcome.peak_bytes, -other.samples_per_s)
        return a[0] <= b[0] and a[1] <= b[1] and a != b

    wanted = {
        (point.outcome.peak_bytes, point.samples_per_s)
        for point in points
        if not any(beats(other, point) for other in points)
    }
    assert {(point.outcome.peak_bytes, point.samples_per_s) for point in front} == wanted
    assert len(front) == len(wanted), "equal points appear once"


@given(st.lists(rok_points, max_size=3), st.lists(st.text(), max_size=2))
def test_json_round_trip(points: list[RokPoint], skipped: list[str]) -> None:
    curve = RokCurve(points=tuple(points), skipped=tuple(skipped))
    assert RokCurve.from_json(curve.to_json()) == curve


@pytest.mark.parametrize(
    ("strategy", "limit", "variant", "options"),
    [
        ("keep", {}, "inductor", {}),
        ("recompute", {}, "checkpoint", {}),
        ("offload", {"max_slowdown": 0.3}, "ssdtrain", {"max_slowdown": 0.3, "recompute": False}),
        ("mixed", {"memory_budget_bytes": 7}, "ssdtrain", {"memory_budget_bytes": 7, "recompute": True}),
    ],
)
def test_a_point_is_measured_as_it_was_planned(
    strategy: Strategy, limit: dict[str, Any], variant: str, options: dict[str, Any]
) -> None:
    point = RokPoint(strategy=strategy, batch=6, **limit, predicted=RokOutcome(peak_bytes=1, step_s=1.0))
    run = run_of(point, Run(model="bert", layers=3, options={"io": "posix"}))
    assert run == Run(model="bert", layers=3, batch=6, variant=variant, options={"io": "posix", **options})


TOY_MODULE = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

def make(batch, recompute=False):
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    def loss(x):
        for layer in (first, second):
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return x.tanh().sum()
    return loss, (torch.randn(batch, 8),)

def make_recomputing(batch):
    return make(batch, recompute=True)
"""


def test_the_command_writes_a_picture_and_all_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_for_rok.py").write_text(TOY_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    picture, points, profile = tmp_path / "rok.png", tmp_path / "rok.json", tmp_path / "profile.json"
    profile.write_text(SLOW_DISK.to_json())
    arguments = ["toy_for_rok:make", "--recomputing", "toy_for_rok:make_recomputing", "--batch", "64", "--batch", "32"]
    arguments += ["--min-tensor-bytes", "16", "--max-slowdown", "0.5", "--budget", "1", "--hardware", str(profile)]
    done = CliRunner().invoke(app, ["rok", *arguments, "--png", str(picture), "--json", str(points)])
    assert done.exit_code == 0, done.output
    assert "Skipped: offload, batch 32: memory_budget_bytes is 1" in done.output
    curve = RokCurve.from_json(points.read_text())
    assert [(point.batch, point.strategy) for point in curve.points] == [
        (batch, strategy) for batch in (64, 32) for strategy in ("keep", "offload", "mixed", "recompute")
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt3"], "Unknown model 'gpt3'"),
        (["gpt2", "--hidden", "100"], "hidden is 100"),
        (["nowhere:make"], "No module named 'nowhere'"),
        (["toy:make", "--measure"], "only works for gpt2, "),
        (["gpt2", "--recomputing", "toy:make"], "--recomputing is only for a MODEL given as module:callable"),
        (["gpt2", "--png", "/nowhere/at/all.png"], "The directory of /nowhere/at/all.png does not exist"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["rok", *arguments])
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.slow
def test_points_are_measured(ssd_dir: str) -> None:
    outcome = RokOutcome(peak_bytes=1, step_s=1.0)
    points = [
        RokPoint(strategy="keep", batch=2, predicted=outcome),
        RokPoint(strategy="offload", batch=2, max_slowdown=10.0, predicted=outcome),
        RokPoint(strategy="recompute", batch=2, predicted=outcome),
    ]
    run = Run(layers=2, hidden=64, sequence=64, options={"ssd_dir": ssd_dir, "min_tensor_bytes": 1024})
    progress: list[tuple[str, int, int]] = []
    curve = measure_rok(
        RokCurve(points=tuple(points)), run, steps=2, on_progress=lambda *report: progress.append(report)
    )
    assert [dataclasses.replace(point, measured=None) for point in curve.points] == points
    for point in curve.points:
        assert point.measured is not None and point.outcome is point.measured
        assert point.measured.peak_bytes > 0 and point.measured.step_s > 0
    assert progress[-1][1:] == (9, 9)


def test_it_is_part_of_the_package() -> None:
    assert ssdtrain_fx.rok is rok
