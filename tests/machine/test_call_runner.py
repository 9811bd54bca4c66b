"""Calls really run on this CPU; the clock and the GPU are stand-ins."""

from __future__ import annotations

import contextlib
import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ssdtrain_fx.machine import call_runner
from ssdtrain_fx.machine.call_runner import make_arguments, run_calls
from ssdtrain_fx.machine.clocks import DeviceClock
from ssdtrain_fx.passes.analysis.node_calls import Call, TensorLayout, describe_call
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.node_facts import find_own_kernels
from ssdtrain_fx.testing import TOYS, capture_toy

aten = torch.ops.aten
CPU = torch.device("cpu")


def layout(*shape: int, dtype: torch.dtype = torch.float32, stride: tuple[int, ...] | None = None) -> TensorLayout:
    return TensorLayout(dtype, CPU, shape, torch.empty(shape).stride() if stride is None else stride)


def call(target: Any, *args: Any, device: torch.device = CPU) -> Call:
    return Call(target, args, {}, device)


MM = call(aten.mm.default, layout(4, 5), layout(5, 6))
DROPOUT = call(aten.native_dropout.default, layout(64), 0.5, True)


class FakeClock:
    """Runs the call, and returns the next of ``seconds``, which repeat."""

    def __init__(self, *seconds: float) -> None:
        self.seconds_told = seconds
        self.runs = 0
        self.look: Callable[[], object] = lambda: None

    def seconds(self, call: Callable[[], object]) -> float:
        call()
        self.look()
        self.runs += 1
        return self.seconds_told[(self.runs - 1) % len(self.seconds_told)]


# -- seconds -----------------------------------------------------------------------------------------------------------


def test_the_median_of_a_round_and_the_shortest_round() -> None:
    """The clock starts over for the empty kernel, whose time is not checked."""
    clock = FakeClock(1e-6, 9e-3, 5e-6, 2e-6, 3e-6, 4e-6, 7e-6, 7e-6, 7e-6)
    assert run_calls([MM], lambda device: clock) == [3e-6]


def test_long_calls_are_in_one_round_only() -> None:
    short, long = FakeClock(1e-6), FakeClock(1.0)
    run_calls([MM], lambda device: short)
    run_calls([MM], lambda device: long)
    assert short.runs - long.runs == (call_runner.ROUNDS - 1) * call_runner.RUNS


def test_nothing_takes_no_time() -> None:
    assert run_calls([MM], lambda device: FakeClock(0.0)) == [call_runner.SHORTEST_S]


def test_a_busy_machine_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run_calls([MM], lambda device: FakeClock(1e-4))
        assert caplog.text == ""
        run_calls([MM], lambda device: FakeClock(5e-3))
    assert "An empty kernel takes 5.0 ms" in caplog.text


def test_what_cannot_be_run_is_told_and_the_next_one_runs() -> None:
    broken = call(aten.mm.default, layout(4, 5), layout(4, 5))
    reason, seconds = run_calls([broken, MM])
    assert isinstance(reason, str)
    assert reason.startswith("RuntimeError: ") and "\n" not in reason and len(reason) <= call_runner.MAX_REASON
    assert isinstance(seconds, float) and seconds > 0


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("fused", [True, False])
def test_every_own_kernel_of_every_toy_takes_time(name: str, fused: bool) -> None:
    joint = capture_toy(name).join()
    calls = [describe_call(node) for node in find_own_kernels(joint, find_alias_sets(joint.graph), fused=fused)]
    described = [one for one in calls if isinstance(one, Call)]
    assert described == calls
    assert all(isinstance(seconds, float) and seconds > 0 for seconds in run_calls(described))


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOYS)
def test_tensors_have_the_layouts_of_the_graph(name: str) -> None:
    joint = capture_toy(name).join()
    for node in find_own_kernels(joint, find_alias_sets(joint.graph), fused=False):
        described = describe_call(node)
        assert isinstance(described, Call)
        args, _ = make_arguments(described)
        for source, made in zip(node.args, args, strict=True):
            if isinstance(source, torch.fx.Node):
                value = source.meta["val"]
                assert (made.dtype, made.shape, made.stride()) == (value.dtype, value.shape, value.stride())
                assert not made.requires_grad


def test_an_expanded_tensor_takes_the_memory_of_one_row() -> None:
    (made,), _ = make_arguments(call(aten.sum.default, layout(1000, 4, stride=(0, 1))))
    assert made.shape == (1000, 4) and made.untyped_storage().nbytes() == 16
    assert made[0].unique().numel() == 4, "random numbers, not all equal"


def test_large_tensors_are_filled_to_the_end() -> None:
    count = 3 * call_runner._RANDOM_BYTES // 8 + 5
    (made,), _ = make_arguments(call(aten.sum.default, layout(count, dtype=torch.float64)))
    assert ((made >= 0) & (made < 1)).all()
    assert (made[-5:] != 0).any()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_every_dtype_and_shape_can_be_made(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    (made,), _ = make_arguments(call(aten.clone.default, layout(*shape, dtype=dtype)))
    assert made.dtype == dtype and made.shape == shape


INDICES = layout(50, dtype=torch.int64)


@pytest.mark.parametrize(
    ("indexing", "at", "bound"),
    [
        (call(aten.embedding.default, layout(7, 3), INDICES), 1, 7),
        (call(aten.embedding_dense_backward.default, layout(50, 3), INDICES, 7, -1, False), 1, 7),
        (call(aten.gather.default, layout(50, 9), 1, layout(50, 9, dtype=torch.int64)), 2, 9),
        (call(aten.index_select.default, layout(4, 6), -1, INDICES), 2, 6),
        (call(aten.scatter_add.default, layout(8), 0, INDICES, layout(50)), 2, 8),
    ],
)
def test_indices_are_in_range_and_all_over_it(indexing: Call, at: int, bound: int) -> None:
    args, _ = make_arguments(indexing)
    assert set(args[at].flatten().tolist()) == set(range(bound))
    assert isinstance(run_calls([indexing])[0], float)


def test_indices_of_several_dimensions() -> None:
    indexing = call(aten.index.Tensor, layout(3, 4, 5), (INDICES, None, INDICES))
    args, _ = make_arguments(indexing)
    first, none, last = args[1]
    assert none is None
    assert (int(first.max()), int(last.max())) == (2, 4)
    assert isinstance(run_calls([indexing])[0], float)


# -- what the user notices ---------------------------------------------------------------------------------------------


def test_random_numbers_are_untouched_though_dropout_draws() -> None:
    before = torch.get_rng_state()
    assert isinstance(run_calls([DROPOUT])[0], float)
    assert torch.equal(torch.get_rng_state(), before)
    args, _ = make_arguments(DROPOUT)
    DROPOUT.target(*args)
    assert not torch.equal(torch.get_rng_state(), before), "else this test shows nothing"


def test_random_numbers_are_untouched_after_a_failure() -> None:
    class Breaking(FakeClock):
        def seconds(self, call: Callable[[], object]) -> float:
            call()
            raise RuntimeError("after it drew")

    before = torch.get_rng_state()
    clocks = iter([Breaking(), FakeClock(1e-6)])
    assert run_calls([DROPOUT], lambda device: next(clocks)) == ["RuntimeError: after it drew"]
    assert torch.equal(torch.get_rng_state(), before)


def test_no_mode_of_the_caller_is_in_force() -> None:
    clock = FakeClock(1e-6)
    seen: list[tuple[bool, ...]] = []
    clock.look = lambda: seen.append(
        (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), type(torch.empty(1)) is Tensor)
    )
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        run_calls([MM], lambda device: clock)
        assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    assert set(seen) == {(False, False, True)}


def test_settings_are_those_of_the_user_and_stay() -> None:
    clock = FakeClock(1e-6)
    seen: list[tuple[bool, int]] = []
    clock.look = lambda: seen.append((torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()))
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(3)
    try:
        run_calls([MM], lambda device: clock)
        assert torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == 3
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert set(seen) == {(True, 3)}


COUNT_THREADS = """
import os
import torch
from ssdtrain_fx.machine.call_runner import run_calls
from ssdtrain_fx.passes.analysis.node_calls import Call, TensorLayout
square = TensorLayout(torch.float32, torch.device("cpu"), (160, 160), (160, 1))
seen = []

class Counting:
    def seconds(self, call):
        call()
        seen.append(len(os.listdir("/proc/self/task")))
        return 1e-6

torch.set_num_threads(os.cpu_count() + 3)
before = len(os.listdir("/proc/self/task"))
run_calls([Call(torch.ops.aten.mm.default, (square, square), {}, torch.device("cpu"))], lambda device: Counting())
print(seen[0] - before - os.cpu_count())
"""


def test_products_run_on_as_many_threads_as_the_user_has_set() -> None:
    """In a new thread they would use one per core: neither products nor filling small tensors ask torch."""
    done = subprocess.run([sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3


def test_memory_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the tensors of a call are allocated, those of all earlier calls are freed."""
    made: list[tuple[Call, weakref.ref[Tensor]]] = []
    alive: list[int] = []
    original = call_runner.make_arguments

    def make_and_count(one: Call) -> tuple[list[Any], dict[str, Any]]:
        gc.collect()
        alive.append(sum(reference() is not None for _, reference in made))
        args, kwargs = original(one)
        made.extend((one, weakref.ref(arg)) for arg in args if isinstance(arg, Tensor))
        return args, kwargs

    monkeypatch.setattr(call_runner, "make_arguments", make_and_count)
    run_calls([MM, DROPOUT, call(aten.sin.default, layout(9))])
    assert len(made) > 3
    assert set(alive) == {0}


# -- CUDA, by stand-ins ------------------------------------------------------------------------------------------------


class FakeEvent:
    """Events are 0.25 ms apart."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def elapsed_time(self, later: object) -> float:
        return 0.25


class FakeCuda:
    """Records the calls to a GPU; ``state`` stands for its random number generator."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.state = 17

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self.log)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Generator[None]:
        self.log.append(f"enter {device}")
        self.state += 1  # what runs on it draws random numbers
        try:
            yield
        finally:
            self.log.append("leave")

    def get_rng_state(self, device: torch.device) -> int:
        self.state += 1
        return self.state - 1

    def set_rng_state(self, state: int, device: torch.device) -> None:
        self.state = state
        self.log.append(f"restore {device}")

    def empty_cache(self) -> None:
        self.log.append("empty_cache")


@pytest.mark.parametrize("target", [aten.sin.default, aten.mm.default], ids=["runs", "fails"])
def test_on_a_gpu_events_tell_the_time_and_its_random_state_is_put_back(target: Any) -> None:
    cuda = FakeCuda()
    one = call(target, layout(4), device=torch.device("cuda:1"))
    (found,) = run_calls([one], lambda device: DeviceClock(cuda), cuda)
    assert cuda.log[0] == "enter cuda:1"
    assert cuda.log[-3:] == ["restore cuda:1", "leave", "empty_cache"]
    if target is aten.sin.default:
        assert found == 0.25e-3
        assert cuda.log[1:4] == ["record", "record", "synchronize"], "the warm-up run is not timed"
        assert cuda.log.count("synchronize") == call_runner.ROUNDS * call_runner.RUNS
        assert cuda.log.count("restore cuda:1") == call_runner.ROUNDS
    else:
        assert isinstance(found, str)
        assert cuda.log.count("restore cuda:1") == 1
