"""The programs in ``benchmarks/`` run and write their results. The tests do not judge the figures."""

import dataclasses
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from steps import FAST_DISK

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.hardware import Channel
from ssdtrain_fx.runtime import ops
from ssdtrain_fx.runtime.lanes.aio.kernel import AioUnavailableError, KernelAio
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.vector_math import settle_vector_math

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.setattr(ops, "_engines", ops._engines)  # a program replaces it

    def load(name: str) -> ModuleType:
        specification = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        monkeypatch.setitem(sys.modules, specification.name, module)  # dataclasses look up their module
        specification.loader.exec_module(module)
        return module

    return load


def test_transfers(load: Callable[[str], ModuleType], ssd_dir: str, tmp_path: Path) -> None:
    path = tmp_path / "io.json"
    assert load("io").main(["--ssd-dir", ssd_dir, "--size-mib", "64", "--rounds", "1", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    engines = {"threads"} | ({"fio"} if shutil.which("fio") else set())
    try:
        KernelAio().close()
        engines.add("aio")
    except AioUnavailableError:
        pass
    assert {row["way"].split(",")[0].split(" ")[0] for row in written["results"]} == engines
    assert {row["direction"] for row in written["results"]} == {"write", "read"}
    assert all(row["gb_per_s"] > 0 and row["cpu_s_per_gb"] >= 0 for row in written["results"])
    assert [row["throughput_ratio"] for row in written["results"] if row["way"] == written["base"]] == [1.0, 1.0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["io.json"]


def test_ops(load: Callable[[str], ModuleType], ssd_dir: str, tmp_path: Path, one_thread: None) -> None:
    path = tmp_path / "ops.json"
    assert load("ops").main(["--ssd-dir", ssd_dir, "--count", "3", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [row["size_mib"] for row in written["results"]] == [1, 2, 8]
    assert written["wake_us"] > 0
    for row in written["results"]:
        assert all(row[f"{name}_us"] > 0 for name in ("offload", "release", "reload", "wait", "total"))
        assert 0 <= row["kernel_us"] < row["total_us"]


@pytest.mark.slow
def test_ops_in_training_steps(
    load: Callable[[str], ModuleType], ssd_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("offload", "release", "reload", "wait"):
        monkeypatch.setattr(ops, name, getattr(ops, name))
    path = tmp_path / "ops.json"
    # A vocabulary that no other test uses: code loaded by another test would call the functions that are not timed.
    size = ["--layers", "1", "--hidden", "128", "--batch", "8", "--sequence", "256", "--vocab", "311"]
    arguments = ["--model", "gpt2", *size, "--max-slowdown", "100", "--steps", "2"]
    assert load("ops").main(["--ssd-dir", ssd_dir, *arguments, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["results"]
    assert row["tensors"] >= 1
    assert all(row[f"{name}_us"] > 0 for name in ("offload", "release", "reload", "wait"))
    assert 0 <= row["kernel_us"] < row["total_us"]
    assert 0 < row["step_share"] < 1


@pytest.mark.slow
def test_same_bits(tmp_path: Path) -> None:
    """In a process of its own: it forks, which a process whose threads have computed must not do."""
    size = ["--layers", "1", "--hidden", "64", "--batch", "2", "--sequence", "64", "--vocab", "64"]
    arguments = ["--model", "gpt2", "--processes", "1", "--steps", "2", *size, "--calm", "--ssd-dir", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "same_bits.py"), *arguments, "--json", str(tmp_path / "bits.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "bits.json").read_text())
    (row,) = written["results"]
    assert (row["processes"], row["steps"], row["deviations"], written["deviations"]) == (1, 2, 0, [])
    assert row["offloads"] > 0


class Scripted:
    """Stands for a fresh process: answers with given bits and tensors."""

    def __init__(self, steps: list[dict[str, str]], tensors: dict[str, list[float]]) -> None:
        self.steps, self.tensors = iter(steps), tensors

    def __enter__(self) -> "Scripted":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def request(self, index: int) -> None:
        pass

    def bits(self) -> tuple[dict[str, str], int]:
        return next(self.steps), 3

    def tensor(self, name: str) -> np.ndarray:
        return np.array(self.tensors[name], dtype=np.float32)


def test_same_bits_describes_and_saves_the_first_deviation(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second process of a round computes another gradient in its second step; later steps are not made."""
    same_bits = load("same_bits")
    good = [{"loss": "0x1p+0", "gradient w": "a"}, {"loss": "0x1p+0", "gradient w": "b"}]
    scripts = iter(
        [
            Scripted(good, {"gradient w": [1.0, 2.0, 4.0]}),
            Scripted([good[0], {"loss": "0x1p+0", "gradient w": "c"}], {"gradient w": [1.0, 2.5, 4.0]}),
        ]
    )
    monkeypatch.setattr(same_bits, "FreshProcess", lambda run: next(scripts))
    path = tmp_path / "deviation.npz"
    deviation, offloads = same_bits.train_round(same_bits.Run(model="gpt2"), 7, 5, list(good), path)
    assert offloads == 6
    assert deviation == same_bits.Deviation(
        model="gpt2",
        process=7,
        variant="ssdtrain",
        step=1,
        tensor="gradient w",
        elements=1,
        size=3,
        relative=0.25,
        path=str(path),
    )
    assert np.load(path)["ssdtrain"].tolist() == [1.0, 2.5, 4.0]


def test_same_bits_finds_two_processes_that_agree_but_not_with_earlier_ones(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    same_bits = load("same_bits")
    monkeypatch.setattr(same_bits, "FreshProcess", lambda run: Scripted([{"loss": "0x1p+0"}], {}))
    deviation, _ = same_bits.train_round(same_bits.Run(), 1, 1, [{"loss": "0x1.8p+0"}], None)
    assert (deviation.tensor, deviation.variant, deviation.elements) == ("loss", "inductor and ssdtrain", 0)


def test_first_sqrt_shows_the_cause(load: Callable[[str], ModuleType]) -> None:
    """On a processor with AVX-512: the intermediate number stands for code of low accuracy."""
    first_sqrt = load("first_sqrt")
    settle_vector_math()
    number = first_sqrt.code_number()
    if number is None or torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("needs torch's MKL and a processor with AVX-512")
    before = number.value
    cause_by_function = {cause.function: cause for cause in first_sqrt.show_cause(number, *first_sqrt.AVX512_NUMBERS)}
    assert number.value == before
    assert 1e-5 < cause_by_function["sqrt"].relative < 1e-3
    assert cause_by_function.keys() == set(first_sqrt.FUNCTIONS)


def test_rivals_at_equal_peak_and_at_equal_time(load: Callable[[str], ModuleType]) -> None:
    rivals = load("rivals")

    def point(peak_ratio: float, time_ratio: float) -> object:
        return rivals.Point(
            variant="ssdtrain",
            setting="",
            peak_bytes=1,
            peak_ratio=peak_ratio,
            growth_bytes=1,
            growth_ratio=1.0,
            rest_bytes=0,
            page_faults=0,
            time_ratio=time_ratio,
            equal_bits=True,
        )

    ours = [small, fast] = [point(0.2, 1.1), point(0.5, 1.02)]
    assert rivals.fastest_within(ours, 0.6) is fast
    assert rivals.fastest_within(ours, 0.3) is small
    assert rivals.fastest_within(ours, 0.1) is None
    assert rivals.smallest_within(ours, 1.2) is small
    assert rivals.smallest_within(ours, 1.05) is fast
    assert rivals.smallest_within(ours, 1.0) is None


@pytest.mark.slow
def test_gpu_on_a_cpu(load: Callable[[str], ModuleType], ssd_dir: str, tmp_path: Path) -> None:
    """Two processes compile at the same time. The profile is a fast disk, so nothing is measured."""
    hardware = tmp_path / "hardware.json"
    hardware.write_text(FAST_DISK.to_json())
    size = ["--layers", "1", "--hidden", "64", "--batch", "2", "--sequence", "64", "--vocab", "256"]
    arguments = ["--device", "cpu", "--model", "gpt2", *size, "--steps", "2", "--jobs", "2", "--dtype", "float32"]
    paths = ["--hardware", str(hardware), "--ssd-dir", ssd_dir, "--results", str(tmp_path)]
    assert load("gpu").main([*arguments, *paths, "--variants", "ssdtrain"]) == 0
    (rows,) = json.loads((tmp_path / "gpu.json").read_text())["models"].values()
    assert [(row["variant"], row["error"]) for row in rows] == [("inductor", None), ("ssdtrain", None)]
    assert rows[1]["equal_gradients"] and rows[1]["equal_losses"]
    assert rows[1]["step_time_ratio"] > 0
    page = (tmp_path / "gpu.html").read_text()
    assert "data:image/png;base64," in page and "://" not in page


def test_stalls_of_a_plan_at_other_speeds_of_computing(load: Callable[[str], ModuleType]) -> None:
    """At the planned speed they equal the planned stalls. The longer a step computes, the less it waits."""
    slow = Channel(bytes_per_s=2e7)
    hardware = dataclasses.replace(FAST_DISK, write=slow, read=slow)
    model, make_batch = zoo.build("gpt2", layers=2, hidden=128, batch=8, sequence=64, vocab=512)
    config = OffloadConfig(policy="all", min_tensor_bytes=0, hardware=hardware)
    (graph,) = ssdtrain_fx.explain(model, *make_batch(torch.Generator().manual_seed(0)), config=config).graphs
    at = [load("slow_disk").stall_at(graph, times) for times in (1.0, 2.0, 1e6)]
    assert at[0] == pytest.approx(graph.plan.stall_s)
    assert at[0] > at[1] > at[2]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("gpt2", 2), ("gpt2", 4), ("bert", 4), ("t5", 6), ("llama", 4)])
def test_allocated_peaks_under_inductor_are_within_a_tenth_of_predicted(
    load: Callable[[str], ModuleType], name: str, layers: int
) -> None:
    """Tests bytes, not seconds: with ``policy="all"`` nothing is kept to save time. The peak is memory of torch."""
    torch.manual_seed(0)
    model, make_batch = zoo.build(name, layers=layers, hidden=128, batch=8, sequence=64, vocab=512)
    batch = make_batch(torch.Generator().manual_seed(0))
    config = OffloadConfig(policy="all", min_tensor_bytes=0, hardware=FAST_DISK)
    (graph,) = ssdtrain_fx.explain(model, *batch, config=config).graphs
    allocated_bytes, kept = load("peaks").allocated_peak_bytes(model, batch, config)
    assert kept == 0
    assert graph.plan.peak_after_bytes < 0.5 * graph.plan.peak_before_bytes
    assert allocated_bytes == pytest.approx(graph.plan.peak_after_bytes, rel=0.1)


def test_the_page_on_projections_has_the_tables_of_the_stored_results(load: Callable[[str], ModuleType]) -> None:
    projection = load("projection")
    results = json.loads((BENCHMARKS / "stored" / "projection.json").read_text())
    page = (BENCHMARKS.parent / "docs" / "howto" / "projections.md").read_text()
    tables = projection.tables(results)
    assert len(tables) == 3
    assert [name for name, rows in tables.items() if projection.markdown(rows) not in page] == []


@pytest.mark.slow
def test_the_stored_projections_are_those_of_this_code(load: Callable[[str], ModuleType]) -> None:
    projection = load("projection")
    results = json.loads((BENCHMARKS / "stored" / "projection.json").read_text())
    found = projection.nine_cases(results["max_slowdown"], cases=projection.CASES[2:])
    for row, stored in zip(found, results["nine_cases"][6:], strict=True):
        assert row.keys() == stored.keys()
        for name, value in row.items():
            assert value == (pytest.approx(stored[name], rel=0.01) if isinstance(value, float) else stored[name]), name
