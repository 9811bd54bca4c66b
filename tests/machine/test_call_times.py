"""Times are measured once and then known: in the process, in the file, and in processes that measure concurrently."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from steps import EMPTY_GRAPH, FAST_DISK, small_model
from torch import Tensor, nn
from typer.testing import CliRunner

from ssdtrain_fx import ConfigError, OffloadConfig, Report, backend, explain
from ssdtrain_fx.cli import app
from ssdtrain_fx.machine import call_times
from ssdtrain_fx.machine.call_times import CallTimes, load_call_times
from ssdtrain_fx.machine.keyed_file import TimesKey, times_key
from ssdtrain_fx.passes.analysis.node_calls import Call, Seconds, TensorLayout
from ssdtrain_fx.passes.graph.graph_json import to_json
from ssdtrain_fx.report.pass_runner import run_pass
from ssdtrain_fx.studies.rok_curve import rok
from ssdtrain_fx.testing import capture_toy

aten = torch.ops.aten
CPU = torch.device("cpu")
KEY = TimesKey(
    device="cpu", processor="x", cores=2, threads=2, torch_version="2", libraries="none", settings="defaults"
)


def product(size: int) -> Call:
    layout = TensorLayout(torch.float32, CPU, (size, size), (size, 1))
    return Call(aten.mm.default, (layout, layout), {}, CPU)


class FakeRunner:
    """Returns ``first``, ``first + 1``, ...; calls of size 13 cannot run."""

    def __init__(self, first: float) -> None:
        self.next = first
        self.asked: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self, calls: Sequence[Call]) -> list[Seconds]:
        self.meanwhile()
        self.asked += [call.key for call in calls]
        seconds: list[Seconds] = []
        for call in calls:
            seconds.append("unlucky" if call.args[0].shape == (13, 13) else self.next)
            self.next += 1
        return seconds


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that stores the times of this test."""
    path = tmp_path / "profiles"
    monkeypatch.setenv("SSDTRAIN_PROFILE_DIR", str(path))
    return path


def stored_in(directory: Path) -> Path:
    (path,) = directory.glob("node-times-*.json")
    return path


# -- what is known -----------------------------------------------------------------------------------------------------


def test_equal_calls_are_measured_once_in_a_process_and_never_again_in_others() -> None:
    run = FakeRunner(1.0)
    times = CallTimes(KEY, run)
    small, large = product(2), product(3)
    expected = {small.key: 1.0, large.key: 2.0}
    assert times.of([small, large, product(2)]) == expected
    assert times.of([large, small]) == expected
    assert run.asked == [small.key, large.key]
    other = FakeRunner(100.0)
    assert CallTimes(KEY, other).of([small, large]) == expected
    assert other.asked == []


def test_only_what_is_missing_is_measured() -> None:
    CallTimes(KEY, FakeRunner(1.0)).of([product(2)])
    run = FakeRunner(5.0)
    assert CallTimes(KEY, run).of([product(2), product(4)]) == {product(2).key: 1.0, product(4).key: 5.0}
    assert run.asked == [product(4).key]


def test_that_a_call_cannot_be_run_is_known_too() -> None:
    assert CallTimes(KEY, FakeRunner(1.0)).of([product(13)]) == {product(13).key: "unlucky"}
    run = FakeRunner(1.0)
    assert CallTimes(KEY, run).of([product(13)]) == {product(13).key: "unlucky"}
    assert run.asked == []


def test_processes_that_measure_at_the_same_time_go_on_with_what_was_stored_first() -> None:
    slow_run = FakeRunner(1.0)
    slow, quick = CallTimes(KEY, slow_run), CallTimes(KEY, FakeRunner(50.0))
    slow_run.meanwhile = lambda: quick.of([product(2), product(5)])
    assert slow.of([product(2), product(3)]) == {product(2).key: 50.0, product(3).key: 2.0}
    assert quick.of([product(3)]) == {product(3).key: 2.0}, "known from the file, although it was loaded before"
    assert slow.generation == quick.generation


@pytest.mark.parametrize(
    "changed", ["device", "processor", "cores", "threads", "torch_version", "libraries", "settings"]
)
def test_another_machine_or_torch_or_setting_has_a_separate_file(changed: str, directory: Path) -> None:
    CallTimes(KEY, FakeRunner(1.0)).of([product(2)])
    fields = {name: getattr(KEY, name) for name in KEY.__dataclass_fields__}
    other = TimesKey(**{**fields, changed: 3 if changed in ("cores", "threads") else "other"})
    assert CallTimes(other, FakeRunner(9.0)).of([product(2)]) == {product(2).key: 9.0}
    assert len(list(directory.glob("node-times-*.json"))) == 2


def test_the_key_knows_settings_by_which_kernels_are_chosen() -> None:
    plain = times_key("cpu")
    assert plain == times_key("cpu") and plain.torch_version == torch.__version__
    torch.use_deterministic_algorithms(True)
    try:
        assert times_key("cpu") != plain
    finally:
        torch.use_deterministic_algorithms(False)
    assert load_call_times("cpu") is load_call_times("cpu")


def test_a_device_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        OffloadConfig(costs="measured").load_call_times("cuda")
    assert OffloadConfig().load_call_times("cuda") is None


# -- files -------------------------------------------------------------------------------------------------------------


def spoil(path: Path, how: str) -> None:
    content: dict[str, Any] = json.loads(path.read_text())
    key = product(2).key
    if how == "cut off":
        path.write_text(path.read_text()[:-20])
        return
    if how == "no text":
        path.write_bytes(b"\xff\xfe\x00")
        return
    if how == "a list":
        path.write_text("[]")
        return
    changes: dict[str, dict[str, Any]] = {
        "another format": {"format": 99},
        "another key": {"key": {**content["key"], "threads": 77}},
        "no generation": {"generation": None},
        "a negative time": {"times": {key: -1.0}},
        "a time that is true": {"times": {key: True}},
        "no times": {"times": None},
    }
    path.write_text(json.dumps({**content, **changes[how]}))


@pytest.mark.parametrize(
    "how",
    [
        "cut off",
        "no text",
        "a list",
        "another format",
        "another key",
        "no generation",
        "a negative time",
        "a time that is true",
        "no times",
    ],
)
def test_a_broken_file_is_replaced_by_another_generation(
    how: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = CallTimes(KEY, FakeRunner(1.0))
    first.of([product(2)])
    spoil(stored_in(directory), how)
    with caplog.at_level(logging.WARNING):
        again = CallTimes(KEY, FakeRunner(8.0))
        assert again.of([product(2)]) == {product(2).key: 8.0}
    assert "cannot be used" in caplog.text
    assert again.generation != first.generation
    assert CallTimes(KEY, FakeRunner(0.0)).of([product(2)]) == {product(2).key: 8.0}
    assert first.of([product(2), product(4)]) == {product(2).key: 1.0, product(4).key: 2.0}, "it keeps its times"
    assert CallTimes(KEY, FakeRunner(3.0)).of([product(4)]) == {product(4).key: 3.0}, "not written to the new file"


def test_a_file_that_is_gone_is_written_again(directory: Path) -> None:
    times = CallTimes(KEY, FakeRunner(1.0))
    times.of([product(2)])
    stored_in(directory).unlink()
    times.of([product(3)])
    again = CallTimes(KEY, FakeRunner(9.0))
    assert again.generation == times.generation
    assert again.of([product(2), product(3)]) == {product(2).key: 1.0, product(3).key: 2.0}


def test_without_a_place_to_store_them_each_process_has_a_separate_generation(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.write_text("a file in place of the directory")
    with caplog.at_level(logging.WARNING):
        one, other = CallTimes(KEY, FakeRunner(1.0)), CallTimes(KEY, FakeRunner(7.0))
        assert one.of([product(2)]) == one.of([product(2)]) == {product(2).key: 1.0}
    assert one.generation != other.generation
    assert "cannot be stored" in caplog.text


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = CallTimes(KEY, FakeRunner(1.0))
    before = stored_in(directory).read_bytes()

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    assert times.of([product(2)]) == {product(2).key: 1.0}
    assert "No space left" in caplog.text
    assert stored_in(directory).read_bytes() == before
    assert {path.suffix for path in directory.iterdir()} == {".json", ".lock"}


def test_nobody_else_may_read_the_file(directory: Path) -> None:
    CallTimes(KEY, FakeRunner(1.0))
    assert stored_in(directory).stat().st_mode & 0o077 == 0


# -- in a compilation --------------------------------------------------------------------------------------------------


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def explained(**options: Any) -> Report:
    config = OffloadConfig(**{"min_tensor_bytes": 512, "hardware": FAST_DISK, "costs": "measured", **options})
    return explain(Tower(), torch.randn(64, 32), config=config)


def test_products_are_measured_and_what_inductor_fuses_is_not(directory: Path) -> None:
    """Four layers have four products in forward. In backward, the first layer has one product, the others have two."""
    (graph,) = explained().graphs
    assert graph.costs.measured == 4 + 4 + 3
    assert graph.costs.unmeasured == ()
    assert graph.costs.measured + graph.costs.roofline == sum(seconds > 0 for seconds in graph.problem.node_s)
    stored = json.loads(stored_in(directory).read_text())["times"]
    assert {key.split(" ")[0] for key in stored} <= {"aten.addmm.default", "aten.mm.default"}
    assert all(isinstance(seconds, float) and seconds > 0 for seconds in stored.values())
    assert set(stored.values()) <= set(graph.problem.node_s)
    assert str(graph.costs) in str(explained())


def test_node_by_node_everything_is_measured() -> None:
    (graph,) = explained(inner="aot_eager").graphs
    assert graph.costs.roofline == 0
    assert graph.costs.measured == sum(seconds > 0 for seconds in graph.problem.node_s) > 11


def test_plans_follow_what_was_measured(directory: Path) -> None:
    """If each product is reported to take an hour, the step takes eleven hours."""
    explained()
    path = stored_in(directory)
    content = json.loads(path.read_text())
    content["times"] = dict.fromkeys(content["times"], 3600.0)
    path.write_text(json.dumps(content))
    call_times._loaded.clear()
    assert explained().plan.step_s == pytest.approx(11 * 3600.0, rel=0.01)
    assert explained(costs="roofline").plan.step_s < 1.0


PLAN = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
import torch
from test_call_times import explained
from ssdtrain_fx.machine import call_runner
if sys.argv[2] == "knows":
    def refuse(*args):
        raise AssertionError("measured again")
    call_runner.time_call = refuse
torch.manual_seed(0)
print(explained(inner=sys.argv[3], max_slowdown=0.2).plan.to_json())
"""


@pytest.mark.parametrize("inner", [pytest.param("inductor", marks=pytest.mark.slow), "aot_eager"])
def test_processes_with_the_same_file_make_the_same_plan(inner: str, directory: Path) -> None:
    """The process that measures and one that reads its times agree byte for byte, whatever their hash seeds."""
    plans: list[str] = []
    files: list[bytes] = []
    for role, seed in (("measures", "1"), ("knows", "2")):
        done = subprocess.run(
            [sys.executable, "-c", PLAN, str(Path(__file__).parent), role, inner],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        plans.append(done.stdout)
        files.append(stored_in(directory).read_bytes())
    assert len(set(plans)) == 1 and '"offload"' in plans[0]
    assert len(set(files)) == 1


def uuid_of(**options: Any) -> str:
    from ssdtrain_fx.compiler.inductor import OffloadPartitioner

    return OffloadPartitioner(OffloadConfig(hardware=FAST_DISK, **options), EMPTY_GRAPH, [torch.ones(1)]).uuid()


def test_compile_caches_tell_costs_and_generations_apart(directory: Path) -> None:
    by_roofline, measured = uuid_of(), uuid_of(costs="measured")
    assert by_roofline != measured
    assert uuid_of(costs="measured") == measured
    explained()
    assert uuid_of(costs="measured") == measured, "another graph was measured; known times do not change"
    call_times._loaded.clear()
    assert uuid_of(costs="measured") == measured, "as in another process"
    call_times._loaded.clear()
    stored_in(directory).unlink()
    assert uuid_of(costs="measured") != measured, "new measurements differ from those that the plans used"
    assert uuid_of() == by_roofline


def test_compile_caches_tell_numbers_of_threads_apart() -> None:
    """Attention on a CPU needs memory for each of them."""
    with mock.patch("torch.get_num_threads", side_effect=[1, 1, 2]):
        one, again, two = uuid_of(), uuid_of(), uuid_of()
    assert one == again != two


def test_settings_of_inductor_can_still_be_copied() -> None:
    """Inductor deep-copies them, including our partitioner, and locks cannot be copied."""
    model, batches = small_model("encoder")
    torch.compile(model, backend=backend(OffloadConfig(costs="measured", hardware=FAST_DISK)))(*batches[0]).backward()


def test_a_curve_is_made_from_measured_times_too() -> None:
    def make(batch: int) -> tuple[nn.Module, tuple[Tensor]]:
        return Tower(), (torch.randn(batch, 32),)

    config = OffloadConfig(hardware=FAST_DISK, min_tensor_bytes=512, costs="measured")
    curve = rok(make, batch_sizes=[64], max_slowdowns=[0.1], config=config)
    (keep,) = [point for point in curve.points if point.strategy == "keep"]
    assert keep.predicted.step_s == pytest.approx(explained().plan.step_s)


# -- on the command line -----------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    path.write_text(FAST_DISK.to_json())
    return str(path)


def test_explain_says_which_costs_were_used(profile: str) -> None:
    size = ("--layers", "1", "--hidden", "64", "--batch", "2", "--sequence", "32", "--vocab", "64")
    done = invoke("explain", "encoder", *size, "--hardware", profile, "--option", "costs=measured")
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("seconds per node: ")]
    assert not line.startswith("seconds per node: 0 measured")
    wrong = invoke("explain", "encoder", *size, "--option", "costs=guessed")
    assert wrong.exit_code == 2
    assert "one of 'roofline', 'measured'" in wrong.output


def test_a_single_pass_says_it_of_every_node(profile: str, tmp_path: Path) -> None:
    graph = tmp_path / "graph.json"
    joint = capture_toy("mlp").join()
    graph.write_text(to_json(joint))
    done = invoke("pass", "node_costs", str(graph), "--option", f"hardware={profile}", "--option", "costs=measured")
    assert done.exit_code == 0, done.output
    result = run_pass("node_costs", joint, OffloadConfig(hardware=FAST_DISK, costs="measured"))
    assert result.summary in done.output
    sources = {row["target"]: row["source"] for row in result.rows}
    assert sources["aten.addmm.default"] == "measured"
    assert sources["aten.gelu_backward.default"] == "roofline"
