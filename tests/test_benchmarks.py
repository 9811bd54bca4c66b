"""The programs in ``benchmarks/`` run and write their results. The tests do not judge the figures."""

import dataclasses
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from steps import FAST_DISK

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.hardware import Channel
from ssdtrain_fx.runtime import ops
from ssdtrain_fx.runtime.lanes.aio import AioUnavailableError, KernelAio
from ssdtrain_fx.studies import zoo

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


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gpt2", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt2", 4), ("bert", 4), ("t5", 6), ("llama", 4))),
    ],
)
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
