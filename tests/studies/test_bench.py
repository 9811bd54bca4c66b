"""`ssdtrain-fx bench`: what is compared with what, and what it says when they differ."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_cli import run_command
from typer.testing import CliRunner

from ssdtrain_fx.cli import app
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.studies import bench
from ssdtrain_fx.studies.measure import Run, Step, TimeRatio, WorkerError, median_ratio_interval, time_ratio

DURATION_MS = {"inductor": 100.0, "ssdtrain": 105.0, "checkpoint": 130.0}
PEAK_BYTES = {"inductor": 1000, "ssdtrain": 200, "checkpoint": 400}
STEPS = 4


class FakeWorker:
    """Takes the times above; the first step takes ten times as long, as one that compiles does."""

    opened: list[tuple[str, str]] = []  # noqa: RUF012 -- replaced for every test
    loss: Callable[[Run, int], float] = staticmethod(lambda run, index: 1.0 + index)

    def __init__(self, run: Run) -> None:
        self.run, self.steps_done = run, 0
        type(self).opened.append((run.measure, run.variant))

    def wait_ready(self) -> None:
        pass

    def close(self) -> None:
        pass

    def step(self) -> Step:
        index, variant = self.steps_done, self.run.variant
        self.steps_done += 1
        return Step(
            index=index,
            loss_hex=type(self).loss(self.run, index).hex(),
            gradients={"weight": f"digest {index}"},
            duration_ms=DURATION_MS[variant] * (10 if index == 0 else 1),
            start_bytes=7,
            peak_bytes=PEAK_BYTES[variant] * (10 if index == 0 else 1),
            samples=[],
            page_faults=1000 if index == 0 else 10,
            statistics=Statistics(bytes_written=64 if variant == "ssdtrain" else 0),
        )


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    fresh = type("FreshWorker", (FakeWorker,), {"opened": []})
    monkeypatch.setattr(bench, "Worker", fresh)
    return fresh


def run_bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--device", "cpu", "--steps", str(STEPS), *arguments])


def test_pairs_are_two_processes_at_a_time(worker: type[FakeWorker]) -> None:
    base, others = Run(variant="inductor"), [Run(variant="ssdtrain"), Run(variant="checkpoint")]
    pairs = bench.measure_in_pairs(base, others, steps=STEPS, on_step=lambda run, step: None)
    assert worker.opened == [
        ("memory", "inductor"),
        *[("time", "inductor"), ("time", "ssdtrain"), ("memory", "ssdtrain")],
        *[("time", "inductor"), ("time", "checkpoint"), ("memory", "checkpoint")],
    ]
    assert [bench.median_ratio(one.timed, its_base.timed) for its_base, one in pairs] == [1.05, 1.3]
    assert [one.peak_bytes / its_base.peak_bytes for its_base, one in pairs] == [0.2, 0.4]
    assert all(one.equals(its_base) for its_base, one in pairs)


def test_every_variant_is_timed_first_and_then_sampled_and_compared_with_inductor(worker: type[FakeWorker]) -> None:
    done = run_bench("--json", "-")
    assert done.exit_code == 0, done.output
    written = json.loads(done.stdout)
    variants = ["inductor", "ssdtrain", "checkpoint"]
    assert worker.opened == [(measure, variant) for measure in ("time", "memory") for variant in variants]
    results = {result["run"]["variant"]: result for result in written["results"]}
    assert list(results) == variants
    assert results["ssdtrain"]["step_time_ratio"] == pytest.approx(1.05)
    assert results["ssdtrain"]["peak_ratio"] == pytest.approx(0.2)
    assert results["ssdtrain"]["equal_to_inductor"] is True
    assert results["ssdtrain"]["statistics_last_step"]["bytes_written"] == 64
    assert results["checkpoint"]["step_ms"] == [1300.0, 130.0, 130.0, 130.0]
    assert results["checkpoint"]["page_faults"] == [1000, 10, 10, 10]
    assert set(written) == {"date", "machine", "python", "torch", "results"}


def test_how_sure_a_ratio_is_follows_from_the_order_of_the_pairs(worker: type[FakeWorker]) -> None:
    """Ten pairs: the median is below the second or above the ninth with a chance of 2 * 11 / 1024, below 5 %; of five
    pairs all are on one side with a chance of 2 / 32."""
    base, other = worker(Run(variant="inductor")), worker(Run(variant="ssdtrain"))
    plain, ours = ([one.step() for _ in range(11)] for one in (base, other))
    ratios = [9.0, 1.06, 1.01, 1.05, 1.02, 0.9, 1.04, 1.03, 1.07, 30.0, 1.0]
    ours = [dataclasses.replace(step, duration_ms=100.0 * ratio) for step, ratio in zip(ours, ratios, strict=True)]
    assert median_ratio_interval(ours, plain) == (1.0, 1.07)
    assert median_ratio_interval(ours[:6], plain[:6]) is None
    ratio = time_ratio(ours, plain)
    assert (ratio.median, ratio.interval, ratio.of_medians) == (pytest.approx(1.035), (1.0, 1.07), pytest.approx(1.035))


@pytest.mark.parametrize(
    ("interval", "of_medians", "doubt"),
    [
        ((0.99, 1.05), 1.03, ""),
        (
            (0.95, 1.08),
            1.01,
            "too noisy to tell the change in step time: pair by pair it is -5.0% to +8.0% (95% interval)",
        ),
        ((0.98, 1.01), 1.23, "pair by pair it is -2.0% to +1.0% (95% interval), by the medians +23.0%"),
        (None, 1.0, "Too few pairs of steps"),
    ],
    ids=["clear", "wide", "contradictory", "few"],
)
def test_a_ratio_that_is_no_result_says_why(
    interval: tuple[float, float] | None, of_medians: float, doubt: str
) -> None:
    found = TimeRatio(median=1.0, interval=interval, of_medians=of_medians).doubt
    assert doubt in found and bool(doubt) == bool(found)


def test_a_noisy_machine_is_named_below_the_table_and_in_the_json(
    worker: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third step of one variant takes three times as long."""
    monkeypatch.setenv("COLUMNS", "200")

    def slow(self: FakeWorker) -> Step:
        step = FakeWorker.step(self)
        disturbed = self.run.variant == "ssdtrain" and step.index % 3 == 0
        return dataclasses.replace(step, duration_ms=step.duration_ms * (3 if disturbed else 1))

    monkeypatch.setattr(worker, "step", slow)
    done = run_bench("--steps", "9", "--json", "-")
    assert "ssdtrain: The machine was too noisy" in " ".join(done.stderr.split())
    assert "checkpoint: The machine" not in done.stderr
    plain, noisy, quiet = json.loads(done.stdout)["results"]
    assert noisy["step_time_doubt"].startswith("The machine was too noisy")
    assert (plain["step_time_doubt"], quiet["step_time_doubt"]) == ("", "")


def test_without_a_terminal_each_step_is_a_line_that_names_the_next(worker: type[FakeWorker]) -> None:
    lines = run_bench("--variant", "ssdtrain").output.splitlines()
    assert lines[0].startswith("Step time is measured first.")
    assert lines[0].endswith("Next: step time, inductor, step 1 of 4, which compiles: about a minute.")
    assert lines[1].startswith("[1/14] step time, inductor, step 1 of 4: 1,000 ms, loss 1.000000. Next: ")
    assert lines[1].endswith("Next: step time, ssdtrain, step 1 of 4, about 0 s.")
    assert lines[8].startswith("[8/14] step time, ssdtrain, step 4 of 4: 105 ms")
    assert lines[9].startswith("Memory is measured now")
    assert lines[9].endswith("Next: memory, inductor, step 1 of 3, at most about 0 s.")
    assert lines[15] == "[14/14] memory, ssdtrain, step 3 of 3: 105 ms, loss 3.000000, peak 200 B."


def test_the_steps_are_made_in_the_planned_order(worker: type[FakeWorker]) -> None:
    runs = [Run(variant=variant) for variant in ("inductor", "ssdtrain", "checkpoint")]
    made: list[tuple[Run, int]] = []
    bench.measure(runs, steps=STEPS, on_step=lambda run, step: made.append((run, step.index)))
    assert made == [(turn.run, turn.index) for turn in bench.plan(runs, STEPS)]
    assert len(made) == bench.count_steps(runs, STEPS)


def test_layers_compiled_one_by_one_are_compared_with_their_like(worker: type[FakeWorker]) -> None:
    """Other graphs, other bits: by layer, both variants agree with one another and not with the whole."""
    worker.loss = staticmethod(lambda run, index: 1.0 + index + 2**-40 * run.regional)
    done = run_bench("--regional", "--json", "-")
    assert done.exit_code == 0, done.output
    runs = [(result["run"]["variant"], result["run"]["regional"]) for result in json.loads(done.stdout)["results"]]
    assert runs == [
        ("inductor", False),
        ("ssdtrain", False),
        ("checkpoint", False),
        ("inductor", True),
        ("ssdtrain", True),
    ]
    assert all(result["equal_to_inductor"] for result in json.loads(done.stdout)["results"])
    assert "ssdtrain, by layer" in done.stderr
    worker.loss = staticmethod(lambda run, index: 1.0 + 2**-52 * (run.regional and run.variant == "ssdtrain"))
    assert run_bench("--regional").exit_code == 1


def test_a_variant_is_chosen_and_inductor_always_runs(worker: type[FakeWorker]) -> None:
    assert run_bench("--variant", "checkpoint").exit_code == 0
    assert {variant for _, variant in worker.opened} == {"inductor", "checkpoint"}


@pytest.mark.parametrize(("variant", "exit_code"), [("ssdtrain", 1), ("checkpoint", 0)])
def test_one_differing_bit_is_an_error_for_ssdtrain_only(
    worker: type[FakeWorker], variant: str, exit_code: int
) -> None:
    worker.loss = staticmethod(lambda run, index: 1.0 + 2**-52 * (run.variant == variant and index == 2))
    done = run_bench()
    assert done.exit_code == exit_code
    assert "different" in done.output
    assert ("does not agree" in done.output) == (exit_code == 1)


def test_a_worker_that_fails_is_shown_with_exit_code_3(
    worker: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FakeWorker) -> Step:
        raise WorkerError("The worker wrote: no space left")

    monkeypatch.setattr(worker, "step", fail)
    done = run_bench()
    assert done.exit_code == 3
    assert "no space left" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--variant", "budget"), "'budget' is not one of inductor"),
        (("--model", "gpt3"), "'gpt3' is not one of gpt2"),
        (("--steps", "1"), "Invalid value for '--steps'"),
        (("--option", "policy"), "has no '='; expected NAME=VALUE"),
        (("--option", "polizy=all"), "polizy"),
        (("--ssd-dir", "/nowhere/at/all"), "does not exist"),
        (("--json", "/nowhere/at/all.json"), "The directory of /nowhere/at/all.json does not exist"),
        (("--variant", "magic"), "'magic' is not one of"),
    ],
)
def test_a_wrong_option_is_named_and_nothing_runs(
    worker: type[FakeWorker], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = run_bench(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert worker.opened == []


@pytest.mark.slow
def test_a_real_run_is_equal_to_the_bit_and_moves_bytes(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    size = ("--layers", "2", "--hidden", "64", "--batch", "2", "--sequence", "64", "--vocab", "64")
    options = ("--option", "policy=all", "--option", "min_tensor_bytes=4096", "--ssd-dir", str(tmp_path))
    done = run_command(
        "bench", "--device", "cpu", "--steps", "2", "--variant", "ssdtrain", *size, *options, "--json", str(results)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plain, offloading = json.loads(results.read_text())["results"]
    assert plain["losses_hex"] == offloading["losses_hex"]
    assert plain["gradients_sha256"] == offloading["gradients_sha256"]
    assert offloading["statistics_last_step"]["offloads"] > 0
    assert plain["page_faults"][0] > 1000  # the first step compiles
