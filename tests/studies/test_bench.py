"""`ssdtrain-fx bench`: what is compared with what, and what it says when they differ."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest
import torch
from test_cli import run_command
from typer.testing import CliRunner

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.cli import app
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.studies import bench, measure, zoo
from ssdtrain_fx.studies.comparison import TimeRatio, time_ratio
from ssdtrain_fx.studies.measure import Measurement, Rest, Run, Step, WorkerError, counted, plan_turns, take_turns

DURATION_MS = {"inductor": 100.0, "ssdtrain": 105.0, "checkpoint": 130.0}
PEAK_BYTES = {"inductor": 1000, "ssdtrain": 600, "checkpoint": 700}
REST = Rest(process_bytes=500, parameter_bytes=100, optimizer_bytes=200, gradient_bytes=100)
STEPS = 4


class FakeWorker:
    """Takes the times above; the first step takes ten times as long, as one that compiles does.

    The sampled step takes a hundred times as long, and needs a hundred times the memory.
    """

    opened: list[str] = []  # noqa: RUF012 -- replaced for every test
    loss: Callable[[Run, int], float] = staticmethod(lambda run, index: 1.0 + index)
    kept_bytes: Callable[[int], int] = staticmethod(lambda index: 0)
    """What ssdtrain keeps in memory to save time in a step."""

    def __init__(self, run: Run, *, cache_directory: str | None = None) -> None:
        if cache_directory is not None:
            assert not any(Path(cache_directory).iterdir()), "every process compiles"
            Path(cache_directory, "compiled").touch()
        self.run, self.steps_done = run, 0
        type(self).opened.append(run.variant)

    def wait_ready(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def rest(self) -> Rest:
        return REST

    def first_step(self, gate: str) -> Step:
        assert Path(gate).exists()
        return self.step(sampled=False)

    def step(self, *, sampled: bool = False) -> Step:
        index, variant = self.steps_done, self.run.variant
        self.steps_done += 1
        scale = 10 if index == 0 else 100 if sampled else 1
        return Step(
            index=index,
            loss_hex=type(self).loss(self.run, index).hex(),
            gradients={"weight": f"digest {index}"},
            duration_ms=DURATION_MS[variant] * scale,
            process_peak_bytes=PEAK_BYTES[variant] * scale,
            peak_was_reset=True,
            samples=[(0.0, 1), (1.0, 2)] if sampled else [],
            page_faults=10 * scale,
            statistics=Statistics(bytes_written=64, kept_for_time_bytes=type(self).kept_bytes(index))
            if variant == "ssdtrain"
            else Statistics(),
        )


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    fresh = type("FreshWorker", (FakeWorker,), {"opened": []})
    monkeypatch.setattr(measure, "Worker", fresh)
    return fresh


def run_bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--device", "cpu", "--steps", str(STEPS), *arguments])


def test_pairs_are_two_processes_at_a_time(worker: type[FakeWorker]) -> None:
    base, others = Run(variant="inductor"), [Run(variant="ssdtrain"), Run(variant="checkpoint")]
    pairs = bench.measure_in_pairs(base, others, steps=STEPS, on_step=lambda run, step: None)
    assert worker.opened == ["inductor", "ssdtrain", "inductor", "checkpoint"]
    assert [time_ratio(one.steps, its_base.steps).median for its_base, one in pairs] == [1.05, 1.3]
    assert [one.process_peak_bytes / its_base.process_peak_bytes for its_base, one in pairs] == [0.6, 0.7]
    assert [one.growth_bytes / its_base.growth_bytes for its_base, one in pairs] == [0.2, 0.4]
    assert all(one.equals(its_base) for its_base, one in pairs)


def test_every_variant_has_one_process_and_is_compared_with_inductor(worker: type[FakeWorker]) -> None:
    done = run_bench("--json", "-")
    assert done.exit_code == 0, done.output
    written = json.loads(done.stdout)
    variants = ["inductor", "ssdtrain", "checkpoint"]
    assert worker.opened == variants
    results = {result["run"]["variant"]: result for result in written["results"]}
    assert list(results) == variants
    assert results["ssdtrain"]["step_time_ratio"] == pytest.approx(1.05)
    assert (results["ssdtrain"]["process_peak_bytes"], results["ssdtrain"]["process_peak_ratio"]) == (600, 0.6)
    assert (results["ssdtrain"]["growth_bytes"], results["ssdtrain"]["growth_ratio"]) == (100, 0.2)
    assert {name: size for name, size in results["ssdtrain"].items() if name.startswith("rest_")} == {
        "rest_bytes": 500,
        "rest_parameter_bytes": 100,
        "rest_optimizer_bytes": 200,
        "rest_other_bytes": 200,
    }
    assert results["ssdtrain"]["equal_to_inductor"] is True
    assert results["ssdtrain"]["statistics_last_step"]["bytes_written"] == 64
    assert results["checkpoint"]["step_ms"] == [1300.0, 130.0, 130.0, 130.0]
    assert results["checkpoint"]["page_faults"] == [100, 10, 10, 10]
    assert results["checkpoint"]["median_page_faults"] == 10
    assert results["checkpoint"]["memory_course_ms_bytes"] == [[0.0, 1], [1.0, 2]]
    assert set(written) == {"date", "machine", "python", "torch", "results"}


def test_what_a_slow_disk_left_in_memory_is_shown_for_every_step_that_counts(worker: type[FakeWorker]) -> None:
    """The peak may be that of an early step, and the last step may keep nothing."""
    kept_bytes = [7 << 20, 298 << 20, 96 << 20, 0, 900 << 20]
    worker.kept_bytes = kept_bytes.__getitem__
    done = run_bench("--json", "-")
    results = {result["run"]["variant"]: result for result in json.loads(done.stdout)["results"]}
    assert results["ssdtrain"]["step_kept_for_time_bytes"] == kept_bytes[:STEPS]
    assert results["inductor"]["step_kept_for_time_bytes"] == [0] * STEPS
    text = " ".join(done.stderr.split())
    assert re.search(r"kept to save time, at most │ 0 B │ 298.00 MiB │ 0 B │", text), text
    assert "ssdtrain: the disk seemed slower than planned, so up to 298.00 MiB stayed in memory (steps: 2, 3)." in text
    assert "inductor: the disk" not in text


def test_how_sure_a_ratio_is_follows_from_the_order_of_the_pairs(worker: type[FakeWorker]) -> None:
    """Ten pairs: the median is below the second or above the ninth with a chance of 2 * 11 / 1024, below 5 %; of five
    pairs all are on one side with a chance of 2 / 32. The first two of more than four steps do not count."""
    base, other = worker(Run(variant="inductor")), worker(Run(variant="ssdtrain"))
    plain, ours = ([one.step() for _ in range(12)] for one in (base, other))
    ratios = [9.0, 5.0, 1.06, 1.01, 1.05, 1.02, 0.9, 1.04, 1.03, 1.07, 30.0, 1.0]
    ours = [dataclasses.replace(step, duration_ms=100.0 * ratio) for step, ratio in zip(ours, ratios, strict=True)]
    assert time_ratio(ours[:7], plain[:7]).interval is None
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

    def slow(self: FakeWorker, *, sampled: bool) -> Step:
        step = FakeWorker.step(self, sampled=sampled)
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
    assert lines[0].startswith("The processes take turns")
    assert lines[0].endswith("Next: inductor, step 1 of 4, which compiles: about a minute.")
    assert lines[1].startswith("[1/10] inductor, step 1 of 4: 1,000 ms, peak 9.77 KiB, loss 1.000000. Next: ")
    assert lines[1].endswith("Next: ssdtrain, step 1 of 4, about 0 s.")
    assert lines[8].startswith("[8/10] ssdtrain, step 4 of 4: 105 ms, peak 600 B")
    assert lines[8].endswith("Next: inductor, step for the course of memory, about 0 s.")
    assert lines[10].startswith("[10/10] ssdtrain, step for the course of memory: ")


def test_the_steps_are_made_in_the_planned_order(worker: type[FakeWorker]) -> None:
    runs = [Run(variant=variant) for variant in ("inductor", "ssdtrain", "checkpoint")]
    made: list[tuple[Run, int]] = []
    take_turns(runs, steps=STEPS, on_step=lambda run, step: made.append((run, step.index)))
    assert made == [(turn.run, turn.index) for turn in plan_turns(runs, STEPS)]
    assert [run.variant for run, _ in made] == [run.variant for run in runs] * (STEPS + 1)


@pytest.mark.parametrize(("steps", "first"), [(2, 1), (4, 1), (5, 2), (50, 2)])
def test_the_steps_that_compile_and_warm_up_do_not_count(worker: type[FakeWorker], steps: int, first: int) -> None:
    (measured,) = take_turns([Run(variant="inductor")], steps=steps)
    assert [step.index for step in counted(measured.steps)] == list(range(first, steps))


def test_a_peak_that_cannot_be_reset_is_said_to_be_since_the_process_began(worker: type[FakeWorker]) -> None:
    (measured,) = take_turns([Run(variant="inductor")], steps=STEPS)

    def caption(one: Measurement) -> str:
        return str(bench.render_table([one]).caption)

    text = "peaks are since the process began"
    steps = [dataclasses.replace(step, peak_was_reset=False) for step in measured.steps]
    assert text not in caption(measured)
    assert text in caption(dataclasses.replace(measured, steps=steps))


def test_one_differing_bit_in_the_sampled_step_is_a_difference(worker: type[FakeWorker]) -> None:
    worker.loss = staticmethod(lambda run, index: 1.0 + 2**-52 * (run.variant == "ssdtrain" and index == STEPS))
    assert run_bench("--variant", "ssdtrain").exit_code == 1


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
    assert worker.opened == ["inductor", "checkpoint"]


def test_the_course_of_memory_is_drawn(worker: type[FakeWorker], tmp_path: Path) -> None:
    done = run_bench("--png", str(tmp_path / "memory.png"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "memory.png" in done.output


def load_benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look up their module
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/families.py"""
    return load_benchmark("families", monkeypatch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu.py"""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    return load_benchmark("gpu", monkeypatch)


OUT_OF_MEMORY = "The worker exited with 1. It wrote:\nTraceback\ntorch.OutOfMemoryError: CUDA out of memory.\nand more"


def fail_at(variant: str, index: int) -> Callable[..., Step]:
    def step(self: FakeWorker, *, sampled: bool = False) -> Step:
        if (self.run.variant, self.steps_done) == (variant, index):
            raise WorkerError(OUT_OF_MEMORY)
        return FakeWorker.step(self, sampled=sampled)

    return step


@pytest.mark.parametrize(("index", "jobs"), [(0, "1"), (0, "8"), (2, "8"), (STEPS, "1")])
@pytest.mark.parametrize("failing", ["checkpoint", "inductor", "ssdtrain"])
def test_on_a_gpu_a_variant_that_fails_is_named_and_the_others_go_on(
    worker: type[FakeWorker],
    gpu: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    failing: str,
    index: int,
    jobs: str,
) -> None:
    monkeypatch.setattr(worker, "step", fail_at(failing, index))
    chosen = ["--variants", "checkpoint", "ssdtrain", "--steps", str(STEPS), "--jobs", jobs, "--hardware", "unused"]
    code = gpu.main(["--device", "cpu", "--model", "gpt2", "bert", *chosen, "--results", str(tmp_path)])
    assert code == (1 if failing == "ssdtrain" else 0)
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert list(written["models"]) == ["gpt2", "bert"]
    for rows in written["models"].values():
        errors = {row["variant"]: row["error"] for row in rows}
        assert list(errors) == ["inductor", "checkpoint", "ssdtrain"]
        assert {name: error for name, error in errors.items() if error} == {
            failing: "torch.OutOfMemoryError: CUDA out of memory."
        }
        ratios = [row["step_time_ratio"] for row in rows if row["variant"] == "ssdtrain" and "step_time_ratio" in row]
        assert ratios == ([pytest.approx(1.05)] if failing == "checkpoint" else [])
    page = (tmp_path / "gpu.html").read_text()
    assert f"{failing} failed: torch.OutOfMemoryError: CUDA out of memory." in page
    assert ("data:image/png;base64," in page) == (failing != "inductor")


def test_on_a_gpu_the_time_limit_ends_the_rounds_and_starts_no_further_models(
    worker: type[FakeWorker], gpu: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    now_s = iter(range(1000))
    monkeypatch.setattr(gpu.time, "monotonic", lambda: float(next(now_s)))
    arguments = ["--device", "cpu", "--model", "gpt2", "bert", "--variants", "ssdtrain", "--hardware", "unused"]
    assert gpu.main([*arguments, "--steps", "9", "--jobs", "1", "--limit-s", "3", "--results", str(tmp_path)]) == 0
    assert "bert was not measured: --limit-s." in capsys.readouterr().out
    (rows,) = json.loads((tmp_path / "gpu.json").read_text())["models"].values()
    assert [len(row["step_ms"]) for row in rows] == [3, 3]


def test_models_compile_together_as_far_as_jobs_allow(gpu: ModuleType) -> None:
    models = ["gpt2", "bert", "llama", "t5"]
    assert gpu.waves_of(models, 7, 16) == [["gpt2", "bert"], ["llama", "t5"]]
    assert gpu.waves_of(models, 7, 2) == [["gpt2"], ["bert"], ["llama"], ["t5"]]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--option", "max_slowdwn=1"],
        ["--option", "max_slowdown"],
        ["--json", "/nowhere/at/all.json"],
        ["--model", "gpt3"],
    ],
)
def test_what_families_cannot_use_is_named_before_anything_runs(
    worker: type[FakeWorker], families: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        families.main(arguments)
    assert arguments[1].partition("=")[0] in capsys.readouterr().err
    assert worker.opened == []


@pytest.mark.parametrize(("change", "exit_code"), [(0.0, 0), (2**-52, 1)])
def test_a_family_is_measured_and_explained(
    worker: type[FakeWorker],
    families: ModuleType,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    change: float,
    exit_code: int,
) -> None:
    worker.loss = staticmethod(lambda run, index: 1.0 + change * (run.variant == "ssdtrain"))
    size = ["--layers", "1", "--hidden", "64", "--batch", "2", "--sequence", "32", "--vocab", "64"]
    written = tmp_path / "families.json"
    options = ["--option", "min_tensor_bytes=0", "--option", "policy=all"]
    arguments = ["--model", "gpt2", "--steps", str(STEPS), *size, *options, "--json", str(written)]
    assert families.main(arguments) == exit_code
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "gpt2" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:6] == ["gpt2, 2 x 32", "1000 B, 500 B", "600 B, 100 B", "0.600", "0.200", "1.050 (-)"]
    assert cells[-1] == ("different" if exit_code else "equal")
    (result,) = json.loads(written.read_text())
    assert result["planned_peak_bytes"] >= result["floor_bytes"] > 0
    module, make_batch = zoo.build("gpt2", layers=1, hidden=64, batch=2, sequence=32, vocab=64)
    config = OffloadConfig(max_slowdown=0.05, min_tensor_bytes=0, policy="all")
    plan = ssdtrain_fx.explain(module, *make_batch(torch.Generator()), config=config).plan
    assert plan.exposed_s > 0
    assert result["planned_time_ratio"] == pytest.approx(1 + plan.exposed_s / 0.1)
    assert result["planned_compute_ratio"] == pytest.approx(plan.step_s / 0.1)
    assert families.main(["--markdown", str(written)]) == 0
    planned, compute = result["planned_time_ratio"], result["planned_compute_ratio"]
    name = "`gpt2`, other bits" if exit_code else "`gpt2`"
    row = f"| {name} | 0.20 | 64 B | {planned:.3f} | 1.050 (-) | {compute:.2f} |"
    assert row in capsys.readouterr().out
    assert cells[6:8] == [f"{result['planned_time_ratio']:.3f}", f"{result['planned_compute_ratio']:.2f}"]


@pytest.mark.parametrize(
    ("error", "models", "message"),
    [
        (WorkerError("no space left"), ["bert", "gpt2"], "bert: no space left"),
        (KeyboardInterrupt(), ["gpt2", "bert", "vit"], "bert: interrupted"),
    ],
)
def test_what_is_measured_of_families_is_written_whatever_becomes_of_others(
    worker: type[FakeWorker],
    families: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: BaseException,
    models: list[str],
    message: str,
) -> None:
    """Those that follow a failure are measured too; an interrupt ends the program."""
    step = worker.step

    def fail(self: FakeWorker, *, sampled: bool = False) -> Step:
        if self.run.model == "bert":
            raise error
        return step(self, sampled=sampled)

    monkeypatch.setattr(worker, "step", fail)
    written = tmp_path / "families.json"
    size = ["--layers", "1", "--hidden", "64", "--batch", "2", "--sequence", "32", "--vocab", "64"]
    chosen = [argument for model in models for argument in ("--model", model)]
    assert families.main([*chosen, "--steps", str(STEPS), *size, "--json", str(written)]) == 3
    assert [entry["results"][0]["run"]["model"] for entry in json.loads(written.read_text())] == ["gpt2"]
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("variant", "exit_code"), [("ssdtrain", 1), ("checkpoint", 0)])
def test_one_differing_bit_is_an_error_for_ssdtrain_only(
    worker: type[FakeWorker], variant: str, exit_code: int
) -> None:
    worker.loss = staticmethod(lambda run, index: 1.0 + 2**-52 * (run.variant == variant and index == 2))
    done = run_bench()
    assert done.exit_code == exit_code
    assert "different" in done.output
    assert ("does not agree" in done.output) == (exit_code == 1)


@pytest.mark.parametrize(("arguments", "environment"), [(["--option", "chunk_loss=auto"], ""), ([], "auto")])
def test_bits_that_chunks_of_the_loss_change_are_no_error(
    worker: type[FakeWorker], monkeypatch: pytest.MonkeyPatch, arguments: list[str], environment: str
) -> None:
    if environment:
        monkeypatch.setenv("SSDTRAIN_OPTIONS", json.dumps({"chunk_loss": environment}))
    worker.loss = staticmethod(lambda run, index: 1.0 + 2**-52 * (run.variant == "ssdtrain"))
    done = run_bench(*arguments)
    assert done.exit_code == 0
    assert "different" in done.output
    assert "With chunk_loss, sums over tokens are formed chunk by chunk" in done.output


def test_an_own_model_that_cannot_be_imported_is_a_wrong_option() -> None:
    done = run_bench("--model", "no_such_module:make")
    assert done.exit_code == 2
    assert "Invalid value for --model: No module named 'no_such_module'" in " ".join(done.output.split())


def test_a_worker_that_fails_is_shown_with_exit_code_3(
    worker: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FakeWorker, *, sampled: bool) -> Step:
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
        (("--model", "no_such_module:make"), "No module named 'no_such_module'"),
        (("--model", "ssdtrain_fx.studies.zoo:no_such_function"), "has no attribute 'no_such_function'"),
        (("--steps", "1"), "Invalid value for '--steps'"),
        (("--option", "policy"), "has no '='; expected NAME=VALUE"),
        (("--option", "polizy=all"), "polizy"),
        (("--ssd-dir", "/nowhere/at/all"), "does not exist"),
        (("--json", "/nowhere/at/all.json"), "The directory of /nowhere/at/all.json does not exist"),
        (("--png", "/nowhere/at/all.png"), "The directory of /nowhere/at/all.png does not exist"),
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


def test_of_an_own_model_only_inductor_and_ssdtrain_run_by_default(
    worker: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = run_bench("--model", "other_families:vae")
    assert done.exit_code == 0, done.output
    assert set(worker.opened) == {"inductor", "ssdtrain"}
    assert "other_families:vae, cpu" in done.output


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
