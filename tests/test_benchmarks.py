"""The programs in ``benchmarks/`` run and write their results. The tests do not judge the figures."""

import dataclasses
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import memory_limit
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_limit import Contender, Course, Store, Trial, find_largest, guess_size
from result_tables import markdown
from steps import FAST_DISK

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.hardware import Channel
from ssdtrain_fx.machine.profile_store import profile_directory
from ssdtrain_fx.runtime import ops
from ssdtrain_fx.runtime.lanes.aio.kernel import AioUnavailableError, KernelAio
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.studies.limited_process import NotEnforced, find_kind
from ssdtrain_fx.studies.measure import Run, Step, WorkerError
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


def test_a_constant_is_changed_wherever_it_is_used(load: Callable[[str], ModuleType]) -> None:
    """Default arguments keep the value that a constant had when their function was defined."""
    from ssdtrain_fx.passes.analysis import find_recomputations
    from ssdtrain_fx.passes.planning import place_transfers, use_host_tier

    constants = load("constants")
    by_name = {constant.name: constant for constant in constants.CONSTANTS}
    with constants.changed(by_name["SSD_SPEEDUPS"], (3.0,)), constants.changed(by_name["MAX_OPS"], 77):
        assert place_transfers.SSD_SPEEDUPS == use_host_tier.SSD_SPEEDUPS == (3.0,)
        assert place_transfers.choose_lowest_peak.__kwdefaults__["ssd_speedups"] == (3.0,)
        assert find_recomputations.judge_recomputations.__kwdefaults__["max_ops"] == find_recomputations.MAX_OPS == 77
    assert place_transfers.SSD_SPEEDUPS is use_host_tier.SSD_SPEEDUPS
    assert place_transfers.choose_lowest_peak.__kwdefaults__["ssd_speedups"] is place_transfers.SSD_SPEEDUPS
    assert find_recomputations.judge_recomputations.__kwdefaults__["max_ops"] == find_recomputations.MAX_OPS == 8


@pytest.mark.parametrize("number", range(20))
def test_no_function_keeps_the_value_of_a_constant(load: Callable[[str], ModuleType], number: int) -> None:
    constants = load("constants")
    assert len(constants.CONSTANTS) == 20
    constant = constants.CONSTANTS[number]
    functions = [
        one
        for name, module in sys.modules.items()
        if name.startswith("ssdtrain_fx.")
        for one in vars(module).values()
        if isinstance(one, types.FunctionType)
    ]
    value = constant.value
    with constants.changed(constant, constant.others[0]):
        for function in functions:
            assert (function.__kwdefaults__ or {}).get(constant.name.lower()) is not value
            if constant.name.lower() in function.__code__.co_varnames[: function.__code__.co_argcount]:
                assert not function.__defaults__, "changed() looks at keyword arguments only"


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


@given(
    true=st.integers(0, 90), guess=st.integers(0, 120), unit=st.sampled_from((1, 32)), most=st.sampled_from((40, 256))
)
def test_the_largest_size_is_found_from_any_guess(true: int, guess: int, unit: int, most: int) -> None:
    """To one unit, or to a sixteenth, with few trials: each takes minutes."""
    tried: list[int] = []

    def trains(size: int) -> bool:
        tried.append(size)
        return size <= true * unit

    found = find_largest(trains, guess=guess * unit, unit=unit, most=most * unit)
    largest = min(true, most) * unit
    assert found <= largest < found + max(unit, found / 16 + 1)
    assert found == 0 or found in tried
    assert len(tried) == len(set(tried)) <= 13
    assert all(size % unit == 0 and unit <= size <= most * unit for size in tried)


def test_the_guess_is_where_a_line_through_two_peaks_reaches_the_limit() -> None:
    assert guess_size(2, 120, 8, 180, 250) == 15
    assert guess_size(2, 120, 8, 180, 50) == 2  # too small a limit: the search says so
    assert guess_size(2, 120, 8, 120, 250) == 8  # nothing grows


def make_step(index: int, *, duration_ms: float) -> Step:
    return Step(
        index=index,
        loss_hex=(1.0).hex(),
        gradients={},
        duration_ms=duration_ms,
        process_peak_bytes=64,
        peak_was_reset=True,
        samples=[],
        page_faults=0,
        statistics=Statistics(),
    )


class LinearCourse(Course):
    """A machine on which a process holds 100 bytes, and so many more per sample as its heap says."""

    def __init__(self) -> None:
        super().__init__(Run(batch=2, sequence=16), "batch", "RLIMIT_DATA", 300, "/nowhere")
        self.tried: list[tuple[int, str]] = []

    def compiled(self, contender: Contender, size: int) -> Any:
        return types.SimpleNamespace(process_peak_bytes=100 + 20 * size)

    def try_heap(self, contender: Contender, size: int, heap: str) -> Trial:
        self.tried.append((size, heap))
        per_sample = {"glibc": 20, "glibc, tuned": 10}.get(heap, 40)
        error = "" if 100 + per_sample * size <= self.limit_bytes else "killed"
        step_ms = 5.0 if heap == "glibc" else 9.0
        steps = [] if error else [make_step(index, duration_ms=step_ms) for index in range(10)]
        return Trial(heap=heap, steps=steps, cgroup_peak_bytes=None, error=error)


def test_the_largest_size_is_that_of_the_best_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """``glibc`` is the fastest while it survives. At the largest size, only the tuned one does."""
    monkeypatch.setattr(memory_limit, "library_bytes", lambda: 0)
    course = LinearCourse()
    found = course.search(Contender(name="inductor", variant="inductor"), most=256)
    assert (found.size, found.heap, found.surviving_heaps) == (20, "glibc, tuned", ["glibc, tuned"])
    assert found.failures["21"] == "glibc, tuned: killed; glibc: killed; jemalloc: killed"[: len(found.failures["21"])]
    assert "11" not in found.failures  # it trains with another heap than the first one
    assert not found.is_most
    course.limit_bytes = 119  # not even one sample, with any heap but the tuned one
    assert course.search(Contender(name="eager", variant="eager"), most=256).size == 1
    course.limit_bytes = 109
    nothing = course.search(Contender(name="eager", variant="eager"), most=256)
    assert (nothing.size, nothing.heap, nothing.peak_bytes) == (0, "", 0)


def test_what_trains_only_once_is_not_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the edge, a few pages decide. What counts has trained a second time."""
    monkeypatch.setattr(memory_limit, "library_bytes", lambda: 0)

    class FickleCourse(LinearCourse):
        def try_heap(self, contender: Contender, size: int, heap: str) -> Trial:
            again = (size, heap) in self.tried
            trial = super().try_heap(contender, size, heap)
            return dataclasses.replace(trial, error="killed", steps=[]) if size == 20 and again else trial

    found = FickleCourse().search(Contender(name="inductor", variant="inductor"), most=256)
    assert (found.size, found.heap) == (19, "glibc, tuned")


def test_of_the_heaps_that_survive_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "library_bytes", lambda: 0)
    found = LinearCourse().search(Contender(name="inductor", variant="inductor"), most=6)
    assert (found.size, found.heap) == (6, "glibc")
    assert found.surviving_heaps[:2] == ["glibc", "glibc, tuned"]


def test_results_of_a_search_are_taken_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    found = LinearCourse().search(Contender(name="inductor", variant="inductor"), most=6)
    assert found.is_most
    store = Store(path, "gpt2", {"grow": "batch"}, {"date": "then"})
    store.add("inductor", found)
    store.add_times({"inductor": {"error": "killed"}})
    Store(path, "bert", {"grow": "batch"}, {}).add("inductor", dataclasses.replace(found, size=3, is_most=False))
    again = Store(path, "gpt2", {"grow": "batch"}, {"date": "now"})
    assert again.found == {"inductor": found}
    again.add("eager", found)
    assert again.entry["facts"] == {"date": "then"}
    assert again.entry["times"] == {"inductor": {"error": "killed"}}
    rows = memory_limit.tables(json.loads(path.read_text()))
    assert [rows[name][1][1] for name in ("gpt2", "bert")] == ["at least 6", "3"]
    with pytest.raises(ValueError, match="results of another run of this: grow is 'batch' there, and 'sequence' now"):
        Store(path, "gpt2", {"grow": "sequence"}, {})


class FakeWorker:
    """Makes steps of the time that its variant takes. ``eager`` gets no memory in its third step."""

    def __init__(self, run: Run, **_: object) -> None:
        self.run, self.made = run, 0

    def __enter__(self) -> "FakeWorker":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def kill(self) -> None:
        pass

    def step(self) -> Step:
        self.made += 1
        if self.run.variant == "eager" and self.made == 3:
            raise WorkerError("The worker was killed by signal 9. It wrote: nothing")
        return make_step(self.made - 1, duration_ms=100.0 if self.run.variant == "inductor" else 50.0 * self.run.batch)


def test_contenders_are_timed_together_as_far_as_memory_permits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_limit, "Worker", FakeWorker)
    course = Course(Run(batch=2, sequence=16), "batch", "RLIMIT_DATA", 1 << 20, str(tmp_path))
    store = Store(None, "", {"grow": "batch"}, {})
    contenders = memory_limit.make_contenders((0.05,), str(tmp_path), "")[:3]
    assert [one.name for one in contenders] == ["inductor", "eager", "eager, checkpoints"]
    found = LinearCourse().search(contenders[0], most=6)
    store.found = {one.name: dataclasses.replace(found, size=3 * (index + 1)) for index, one in enumerate(contenders)}
    for memory_bytes in (2 << 20, 9 << 20):  # room for two workers, and for all
        store.times = {}
        memory_limit.time_all(course, contenders, store, rounds=9, memory_bytes=memory_bytes)
        assert store.times["inductor"]["throughput_ratio"] == 1.0
        assert store.times["eager, checkpoints"]["throughput_ratio"] == pytest.approx(9 / 3 * 100 / (50 * 9))
        assert store.times["eager"] == {"error": "The worker was killed by signal 9"}
    store.found = {"eager": store.found["eager"]}
    store.times = {}
    memory_limit.time_all(course, contenders, store, rounds=9, memory_bytes=9 << 20)
    assert store.times == {}


def test_without_plain_inductor_there_is_no_ratio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_limit, "Worker", FakeWorker)
    course = Course(Run(batch=2, sequence=16), "batch", "RLIMIT_DATA", 1 << 20, str(tmp_path))
    base, other = Contender(name="one", variant="eager"), Contender(name="other", variant="checkpoint")
    found = LinearCourse().search(base, most=6)
    timed = course.time([base, other], {"one": found, "other": found}, rounds=9)
    assert timed["other"] == {"error": "one failed: The worker was killed by signal 9"}


def test_what_is_no_lack_of_memory_ends_the_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A full disk must not look like a limit that is too low."""

    class Broken(FakeWorker):
        def step(self) -> Step:
            if self.made == 2:
                raise WorkerError("The worker exited with 1. It wrote: OSError: No space left on device")
            return super().step()

    monkeypatch.setattr(memory_limit, "Worker", Broken)
    course = Course(Run(batch=2, sequence=16), "batch", "RLIMIT_DATA", 1 << 20, str(tmp_path))
    with pytest.raises(WorkerError, match="No space left"):
        course.search(Contender(name="inductor", variant="inductor"), most=6)
    base, *others = memory_limit.make_contenders((0.05,), str(tmp_path), "")[:2]
    store = Store(None, "", {"grow": "batch"}, {})
    store.found = {base.name: LinearCourse().search(base, most=6)}
    memory_limit.search_all(course, [base, *others], store, most=6)
    assert "No space left" in store.entry["left_out"]["eager"]


def test_a_step_that_waits_for_swap_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Swapping(FakeWorker):
        def __init__(self, run: Run, prefix: Sequence[str] = (), **rest: object) -> None:
            super().__init__(run, **rest)
            self.slow = memory_limit.PATIENCE + 1 if prefix else 1

        def step(self) -> Step:
            step = super().step()
            return dataclasses.replace(step, duration_ms=self.slow * step.duration_ms)

    monkeypatch.setattr(memory_limit, "Worker", Swapping)
    course = Course(Run(batch=2, sequence=16), "batch", "RLIMIT_DATA", 1 << 20, str(tmp_path))
    trial = course.try_heap(Contender(name="inductor", variant="inductor"), 4, "glibc")
    assert (trial.error, len(trial.steps)) == ("too slow", memory_limit.STEPS)
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert [timer for timer in timers if "pytest" not in timer.name] == []


def test_throughput_is_relative_to_plain_inductor_at_its_own_size() -> None:
    steps = [make_step(index, duration_ms=300.0) for index in range(12)]
    base_steps = [make_step(index, duration_ms=100.0) for index in range(12)]
    timed = LinearCourse()._throughput(6, steps, 3, base_steps)
    assert timed["throughput_ratio"] == pytest.approx(6 / 3 / 3)
    assert timed["tokens_per_s"] == pytest.approx(6 * 16 / 0.3)
    low, high = timed["throughput_ratio_interval"]
    assert low == pytest.approx(high) == pytest.approx(2 / 3)


def test_the_docs_have_the_tables_of_the_stored_limits() -> None:
    results = json.loads((BENCHMARKS / "stored" / "memory_limit.json").read_text())
    page, readme = (BENCHMARKS.parent / name for name in ("docs/benchmarks.md", "README.md"))
    tables = memory_limit.tables(results)
    assert tables
    assert [title for title, rows in tables.items() if markdown(rows) not in page.read_text()] == []
    text = " ".join(readme.read_text().split())
    assert [title for title, entry in results.items() if memory_limit.sentence(entry) not in text] == []


@pytest.mark.parametrize(("name", "others"), [("families", []), ("other_families", ["unet"])])
def test_the_docs_have_the_table_of_the_stored_families(
    load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], name: str, others: list[str]
) -> None:
    """All bits are equal, except where those of plain Inductor are wrong."""
    path = BENCHMARKS / "stored" / f"{name}.json"
    runs = [entry["results"][1] for entry in json.loads(path.read_text())]
    models = [run["run"]["model"].rpartition(":")[2] for run in runs if not run["equal_to_inductor"]]
    assert models == others
    assert load("families").main(["--markdown", str(path)]) == 0
    assert capsys.readouterr().out in (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text()


def test_the_docs_have_the_table_of_the_stored_predictions(
    load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    path = BENCHMARKS / "stored" / "predictions.json"
    assert load("predictions").main(["--markdown", str(path)]) == 0
    assert capsys.readouterr().out in (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text()


@pytest.mark.slow
def test_predictions(load: Callable[[str], ModuleType], ssd_dir: str, tmp_path: Path) -> None:
    """The second process plans with what the first one has measured, and nothing is left for others."""
    path, profiles = tmp_path / "predictions.json", set(profile_directory().glob("step-times-*"))
    size = ["--layers", "2", "--hidden", "64", "--batch", "2", "--sequence", "64", "--vocab", "128"]
    options = ["--option", f"ssd_dir={ssd_dir}", "--option", "policy=all", "--option", "min_tensor_bytes=0"]
    arguments = ["--model", "gpt2", *size, *options, "--steps", "10", "--json", str(path)]
    assert load("predictions").main(arguments) == 0
    (result,) = json.loads(path.read_text())
    assert result["first"]["roofline_ratio"] is None
    assert len(result["second"]["step_s"]) == 10
    assert set(profile_directory().glob("step-times-*")) == profiles


@pytest.mark.slow
def test_memory_limit(ssd_dir: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A limit in which plain Inductor and this backend make all steps, at one size."""
    if isinstance(kind := find_kind(), NotEnforced):
        pytest.skip(kind.reason)
    path = tmp_path / "limits.json"
    size = ["--layers", "1", "--hidden", "64", "--sequence", "32", "--vocab", "64", "--limit-mib", "1500"]
    arguments = ["--model", "gpt2", *size, "--most", "2", "--contender", "ssdtrain, +5 %", "--ssd-dir", ssd_dir]
    assert memory_limit.main([*arguments, "--rounds", "9", "--json", str(path)]) == 0
    (entry,) = json.loads(path.read_text()).values()
    assert {name: its["size"] for name, its in entry["found"].items()} == {"inductor": 2, "ssdtrain, +5 %": 2}
    assert entry["times"]["inductor"]["throughput_ratio"] == 1.0
    assert entry["times"]["ssdtrain, +5 %"]["throughput_ratio"] > 0
    assert memory_limit.main(["--markdown", str(path)]) == 0
    assert "| ssdtrain, +5 % | at least 2 | 1.0 |" in capfd.readouterr().out


def test_memory_limit_names_what_is_missing_or_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([], "--limit-mib must be the memory"),
        (["--limit-mib", "9", "--batch", "0"], "--batch is 0; expected at least 1"),
        (["--limit-mib", "9", "--grow", "sequence", "--most", "20"], "--most is 20; expected at least 32"),
        (["--limit-mib", "9", "--rounds", "3"], "--rounds is 3; expected 0, or at least 9"),
        (["--limit-mib", "9", "--contender", "jax"], "unknown contenders: jax. There are: inductor; eager"),
    ):
        with pytest.raises(SystemExit):
            memory_limit.main(arguments)
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["simulated_clock", "replayed_plans"])
def test_the_page_on_gpus_has_the_tables_of_the_stored_results(
    load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    program, path = load(name), BENCHMARKS / "stored" / f"{name}.json"
    assert [row["case"] for row in json.loads(path.read_text())["results"]] == [case.name for case in program.CASES]
    assert program.main(["--markdown", str(path)]) == 0
    assert capsys.readouterr().out in (BENCHMARKS.parent / "docs" / "howto" / "gpu.md").read_text()


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
