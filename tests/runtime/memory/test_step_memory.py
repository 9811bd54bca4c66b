"""The memory of compiled steps: what comes from the arena, what it gives back, and when."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import FAST_DISK, counted
from torch import Tensor, nn

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx._torch_private import arena
from ssdtrain_fx._torch_private.arena import ArenaLibrary, ArenaState, ArenaUnavailableError
from ssdtrain_fx.runtime.memory import step_memory as module
from ssdtrain_fx.runtime.memory.step_memory import StepMemory, in_step_memory, step_memory

MIB = 1 << 20
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * MIB
ROOT = Path(ssdtrain_fx.__file__).parents[1]


@pytest.fixture
def library() -> ArenaLibrary:
    """The arena as users have it, empty."""
    gc.collect()
    assert step_memory.library is not None, "the machine of the tests has a compiler"
    step_memory.library.configure()
    step_memory.library.trim()
    step_memory.library.reset_peaks()
    return step_memory.library


def allocated_bytes() -> int:
    return ssdtrain_fx.memory_stats().allocated_bytes


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}"},
        capture_output=True,
        text=True,
        timeout=240,
    )


class Layers(nn.Module):
    """Layers whose activations have 512 KiB each, so that they come from the arena."""

    def __init__(self, layers: int = 4, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def compile_layers(inner: Any = "aot_eager", **options: Any) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    model = Layers()
    config = OffloadConfig(policy="all", min_tensor_bytes=0, hardware=FAST_DISK, inner=inner, **options)
    return model, torch.compile(model, backend=ssdtrain_fx.backend(config))


def data(seed: int = 0) -> Tensor:
    return torch.randn(1024, 128, generator=torch.Generator().manual_seed(seed))


# -- the arena against a model -----------------------------------------------------------------------------------------


class ModelArena:
    """Best fit over a list of free ranges, written as plainly as possible."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []
        self.end = 0
        self.end_peak = 0
        self.allocated_peak = 0
        self.live: dict[int, tuple[int, int]] = {}

    def allocate(self, number: int, byte_count: int) -> int:
        size = -(-byte_count // PAGE_BYTES) * PAGE_BYTES
        fitting = [(length, start) for start, length in self.free if length >= size]
        if fitting:
            length, start = min(fitting)
            self.free.remove((start, length))
            if length > size:
                self.free.append((start + size, length - size))
        else:
            start, self.end = self.end, self.end + size
        self.end_peak = max(self.end_peak, self.end)
        self.live[number] = (start, size)
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return start

    @property
    def allocated(self) -> int:
        return sum(size for _, size in self.live.values())

    def release(self, number: int) -> None:
        self.free.append(self.live.pop(number))
        merged: list[tuple[int, int]] = []
        for start, length in sorted(self.free):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        if merged and sum(merged[-1]) == self.end:
            self.end = merged.pop()[0]
        self.free = merged


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., Any]]:
    """A process whose arena only the test uses."""
    program = Path(__file__).with_name("arena_program.py")
    with subprocess.Popen(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def send(sequence: list[tuple[str, int]], runs: Sequence[list[tuple[str, int]]] = ()) -> Any:
            stdin.write(json.dumps([sequence, runs]) + "\n")
            stdin.flush()
            return json.loads(stdout.readline())

        yield send
        stdin.close()


SIZES = st.one_of(
    st.integers(arena.MIN_BYTES, 4 * arena.MIN_BYTES), st.sampled_from([MIB, MIB + 1, HUGE_PAGE_BYTES, 3 * MIB])
)


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[str, int]]:
    live: list[int] = []
    steps: list[tuple[str, int]] = []
    for _ in range(draw(st.integers(1, 60))):
        if live and draw(st.booleans()):
            number = draw(st.sampled_from(live))
            live.remove(number)
            steps.append(("release", number))
        else:
            live.append(len(steps))
            steps.append(("allocate", draw(SIZES)))
    return steps


@settings(max_examples=150)
@given(sequences())
def test_blocks_are_where_best_fit_puts_them(ask: Callable[..., Any], sequence: list[tuple[str, int]]) -> None:
    model = ModelArena()
    expected: list[int] = []
    for number, (name, value) in enumerate(sequence):
        if name == "allocate":
            expected.append(model.allocate(number, value))
        else:
            model.release(value)
    addresses, during, after = ask(sequence)
    assert addresses == expected
    state, empty = ArenaState(*during), ArenaState(*after)
    assert state.allocated_bytes == model.allocated and state.blocks == len(model.live)
    assert state.allocated_peak_bytes == model.allocated_peak
    assert state.end_peak_bytes == model.end_peak
    assert state.committed_bytes == -(-model.end_peak // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    assert empty.allocated_bytes == empty.blocks == 0


# -- what comes from the arena -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("library")
def test_tensors_come_from_the_arena_in_compiled_code_only() -> None:
    before = allocated_bytes()
    outside = torch.empty(MIB)
    with step_memory.inside():
        small = torch.empty(1024)
        large = torch.empty(MIB)
        in_thread: list[Tensor] = []
        thread = threading.Thread(target=lambda: in_thread.append(torch.empty(MIB)))
        thread.start()
        thread.join()
    assert allocated_bytes() - before == large.nbytes
    assert large.data_ptr() % PAGE_BYTES == 0
    later = torch.empty(MIB)
    assert allocated_bytes() - before == large.nbytes
    del large
    assert allocated_bytes() == before
    del outside, small, later


@pytest.mark.usefixtures("library")
def test_a_block_may_die_on_another_thread() -> None:
    before = allocated_bytes()
    with step_memory.inside():
        tensors = [torch.empty(MIB)]
    assert allocated_bytes() > before
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert allocated_bytes() == before


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.usefixtures("one_thread")
def test_a_step_uses_the_arena_and_leaves_what_the_caller_holds(inner: str, library: ArenaLibrary) -> None:
    before = allocated_bytes()
    model, compiled = compile_layers(inner)
    compiled(data()).backward()
    model.zero_grad(set_to_none=True)
    library.reset_peaks()
    x = data()
    loss = compiled(x)
    loss.backward()
    stats = ssdtrain_fx.memory_stats()
    # An activation of 512 KiB at least, and no more than the plan says but for rounding to pages.
    assert x.nbytes <= stats.allocated_peak_bytes - before <= stats.planned_peak_bytes + 64 * PAGE_BYTES
    gradients = [parameter.grad for parameter in model.parameters()]
    held = sum(gradient.nbytes for gradient in gradients if gradient is not None and gradient.nbytes >= arena.MIN_BYTES)
    assert held and allocated_bytes() - before == held, "nothing but the gradients is left"
    del loss, gradients
    model.zero_grad(set_to_none=True)
    assert allocated_bytes() == before


def test_an_exception_in_a_step_leaves_nothing(library: ArenaLibrary) -> None:
    before = allocated_bytes()

    def fail(args: list[Tensor]) -> None:
        held = torch.empty_like(args[0])
        raise KeyboardInterrupt(held.nbytes)

    with pytest.raises(KeyboardInterrupt):
        in_step_memory(fail, planned_peak_bytes=0)([torch.empty(MIB)])
    gc.collect()
    assert not library.is_inside()
    assert allocated_bytes() == before


@pytest.mark.usefixtures("library")
def test_dropped_forwards_leave_nothing() -> None:
    _, compiled = compile_layers()
    compiled(data()).backward()
    x = data()
    compiled(x)
    before, reserved = allocated_bytes(), ssdtrain_fx.memory_stats().reserved_bytes
    moved = counted(lambda: [compiled(x) for _ in range(1000)])
    assert moved.offloads >= 1000
    stats = ssdtrain_fx.memory_stats()
    assert (stats.allocated_bytes, stats.reserved_bytes) == (before, reserved)


@pytest.mark.usefixtures("one_thread", "library")
def test_a_second_backward_finds_its_data() -> None:
    model, compiled = compile_layers()
    with torch._functorch.config.patch(donated_buffer=False):
        loss = compiled(data())
        loss.backward(retain_graph=True)
        first = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        loss.backward()
    for parameter, gradient in zip(model.parameters(), first, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


def test_freed_memory_is_not_read(library: ArenaLibrary) -> None:
    """Every block is overwritten when it is freed: a transfer that reads its source too late changes the gradients."""
    expected, _ = gradients_by("aot_eager")
    library.configure(min_bytes=1, poison=True)
    for inner in ("aot_eager", "inductor"):
        found, offloads = gradients_by(inner, offload=True)
        assert offloads
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-7), (inner, name)


def gradients_by(inner: str, *, offload: bool = False) -> tuple[dict[str, Tensor], int]:
    torch._dynamo.reset()
    model, compiled = compile_layers(inner)
    if not offload:
        compiled = model
    moved = counted(lambda: [compiled(data(seed)).backward() for seed in range(3)])
    return {name: parameter.grad for name, parameter in model.named_parameters()}, moved.offloads  # type: ignore[misc]


@pytest.mark.usefixtures("library")
def test_steps_of_two_threads_share_the_arena() -> None:
    expected, _ = gradients_by("aot_eager")
    before = allocated_bytes()
    results: list[dict[str, Tensor]] = []
    barrier, one_compiles = threading.Barrier(2, timeout=120), threading.Lock()

    def train() -> None:
        model = Layers()
        model.load_state_dict(start)
        config = OffloadConfig(policy="all", min_tensor_bytes=0, hardware=FAST_DISK, inner="aot_eager")
        compiled = torch.compile(model, backend=ssdtrain_fx.backend(config))
        with one_compiles:  # torch compiles in one thread at a time
            compiled(data()).backward()
        model.zero_grad(set_to_none=True)
        barrier.wait()
        for seed in range(3):
            compiled(data(seed)).backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})  # type: ignore[misc]

    torch.manual_seed(0)
    start = Layers().state_dict()
    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for found in results:
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-7), name
    results.clear()
    found = {}
    gc.collect()
    assert allocated_bytes() == before


# -- steps that repeat -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", ["whole", "same", "pairs"])
def test_a_step_that_repeats_is_laid_out_with_foresight(graphs: str) -> None:
    """Every layer leaves two blocks and has two for itself. Best fit leaves holes and ends 8 MiB above what is in use;
    the layout leaves none. The layers are one graph, a graph that runs for each, or two graphs that alternate.

    In a process of its own, so that nothing else lies in the arena.
    """
    done = run_python(
        """
        import sys
        import torch
        from ssdtrain_fx.runtime.memory.step_memory import in_step_memory, step_memory

        MIB = 1 << 20
        library = step_memory.library
        kept = []

        def block(mib):
            return torch.empty(mib * MIB // 4)

        def forward(args):
            (layer,) = args
            first, one = block(8), block(3)
            del first
            kept.append((one, block(6)))
            last = block(5 + layer % 2)
            del last

        def backward(args):
            first = block(8)
            kept.pop()
            second = block(5)
            del first, second

        def compiled(function):
            return in_step_memory(function, planned_peak_bytes=0)

        def layers(function):
            return lambda args: [function([layer]) for layer in args]

        if sys.argv[1] == "whole":
            runs = [(compiled(layers(forward)), [0, 1, 0, 1]), (compiled(layers(backward)), [0] * 4)]
        elif sys.argv[1] == "same":
            forward, backward = compiled(forward), compiled(backward)
            runs = [(forward, [layer]) for layer in (0, 1, 0, 1)] + [(backward, [0])] * 4
        else:
            even, odd, of_even, of_odd = map(compiled, (forward, forward, backward, backward))
            runs = [(even, [0]), (odd, [1])] * 2 + [(of_odd, [0]), (of_even, [0])] * 2

        def step():
            library.reset_peaks()
            for graph, args in runs:
                graph(args)
            state = library.describe()
            assert state.allocated_bytes == 0
            return state.allocated_peak_bytes // MIB, state.end_peak_bytes // MIB

        steps = [step() for _ in range(12)]
        assert steps[0] == (44, 52), steps
        assert steps[-1] == (44, 44), steps

        # A step with other sizes is served all the same, and learned in its turn.
        def forward(args):
            kept.append([torch.full((MIB + 1024 * number,), float(number)) for number in range(80)])

        def backward(args):
            for number, tensor in enumerate(kept.pop()):
                assert bool((tensor == number).all())

        forward = in_step_memory(forward, planned_peak_bytes=0)
        backward = in_step_memory(backward, planned_peak_bytes=0)
        for _ in range(6):
            forward([])
            backward([])
        assert library.describe().allocated_bytes == 0
        """,
        graphs,
    )
    assert done.returncode == 0, done.stderr


def test_many_runs_without_a_backward_cost_little_and_do_no_harm() -> None:
    done = run_python(
        """
        import time
        import torch
        from ssdtrain_fx.runtime.memory.step_memory import in_step_memory, step_memory

        def compiled(function):
            return in_step_memory(function, planned_peak_bytes=0)

        kept = []

        def forward(args):
            first = torch.empty(1 << 21)
            kept.append(torch.empty(1 << 20))
            last = torch.empty(1 << 21)
            return first.numel() + last.numel()

        def backward(args):
            kept.pop()

        forward, backward = compiled(forward), compiled(backward)
        for _ in range(5000):
            forward([])
            kept.clear()
        for _ in range(12):
            step_memory.library.reset_peaks()
            forward([])
            backward([])
        state = step_memory.library.describe()
        assert state.end_peak_bytes == state.allocated_peak_bytes, state
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["cond", "region"])
def test_graphs_within_a_graph_are_compiled(name: str, library: ArenaLibrary) -> None:
    """Inductor writes the code of a subgraph into that of the graph around it."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

    def of_cond(x: Tensor) -> Tensor:
        for layer in layers:
            x = torch.cond(x.sum() > 0, lambda x, layer=layer: torch.tanh(layer(x)), torch.sin, (x,))
        return x.square().mean()

    @torch.compiler.nested_compile_region
    def region(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight)

    def of_region(x: Tensor) -> Tensor:
        for layer in layers:
            x = region(x, layer.weight)
        return x.square().mean()

    function = of_cond if name == "cond" else of_region
    config = OffloadConfig(policy="all", min_tensor_bytes=0, hardware=FAST_DISK)
    compiled = torch.compile(function, backend=ssdtrain_fx.backend(config))
    before = library.describe().allocations
    loss = compiled(data())
    loss.backward()
    assert library.describe().allocations > before
    torch.testing.assert_close(loss, function(data()))


@settings(max_examples=30)
@given(st.lists(sequences(), min_size=2, max_size=3), st.integers(2, 5))
def test_blocks_of_repeating_steps_never_overlap(
    ask: Callable[..., Any], runs: list[list[tuple[str, int]]], repetitions: int
) -> None:
    """Whatever was learned, a block is where nothing else is. What a run leaves is freed in the next one."""
    addresses, _, after = ask([("run", number) for _ in range(repetitions) for number in range(len(runs))], runs)
    assert len(addresses) == repetitions * sum(name == "allocate" for run in runs for name, _ in run)
    assert ArenaState(*after).allocated_bytes == 0


# -- what it gives back ------------------------------------------------------------------------------------------------


def test_free_memory_stays_mapped_until_it_is_asked_for(library: ArenaLibrary) -> None:
    with step_memory.inside():
        first = torch.zeros(4 * MIB)
        second = torch.zeros(4 * MIB)
    in_use = library.describe().committed_bytes
    del first
    assert library.describe().committed_bytes == in_use
    ssdtrain_fx.empty_cache()
    assert library.describe().committed_bytes == in_use, "the second block is above the first"
    assert bool((second == 0).all())
    del second
    assert library.describe().committed_bytes == in_use
    ssdtrain_fx.empty_cache()
    assert library.describe().committed_bytes <= in_use - 32 * MIB


def test_memory_that_no_step_uses_goes_back_after_a_while(library: ArenaLibrary) -> None:
    def run(size: int) -> int:
        in_step_memory(lambda args: torch.empty(size).numel(), planned_peak_bytes=0)([])
        return library.describe().committed_bytes

    library.configure(unused_runs=4, unused_milliseconds=0)
    for _ in range(16):  # forget the steps of other tests
        run(MIB)
    start = library.describe().committed_bytes
    large = run(8 * MIB)
    assert large == 32 * MIB > start
    sizes = [run(MIB) for _ in range(8)]
    assert sizes[0] == large, "the memory of the large step stays at first"
    assert sizes[-1] <= start + 6 * MIB, sizes


def test_the_last_compiled_step_takes_the_memory_with_it() -> None:
    """In a process of its own: pytest keeps log records, and with them the compiled function."""
    done = run_python(
        """
        import gc
        import torch
        from test_step_memory import compile_layers, data, step_memory

        model, compiled = compile_layers()
        other_model, other = compile_layers()
        compiled(data()).backward()
        other(data()).backward()
        model.zero_grad(set_to_none=True)
        other_model.zero_grad(set_to_none=True)
        library = step_memory.library
        held = library.describe().committed_bytes
        assert held > 0
        del compiled, model
        gc.collect()
        assert library.describe().committed_bytes == held, "the other step may run again"
        del other, other_model
        torch._dynamo.reset()
        gc.collect()
        assert library.describe().committed_bytes == 0
        """
    )
    assert done.returncode == 0, done.stderr


# -- where there is no arena -------------------------------------------------------------------------------------------


def unavailable() -> ArenaLibrary:
    raise ArenaUnavailableError("there is no C++ compiler (looked for $CXX, g++, clang++, c++)")


@pytest.mark.usefixtures("one_thread")
def test_without_an_arena_training_works_as_before_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = gradients_by("aot_eager", offload=True)
    monkeypatch.setattr(module, "step_memory", StepMemory(unavailable))
    with caplog.at_level(logging.WARNING, logger="ssdtrain_fx"):
        found, offloads = gradients_by("aot_eager", offload=True)
    assert offloads
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    warnings = [record.getMessage() for record in caplog.records if "heap of the C library" in record.getMessage()]
    assert len(warnings) == 1 and "there is no C++ compiler" in warnings[0]
    assert ssdtrain_fx.memory_stats().allocated_bytes == 0


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ArenaUnavailableError, match=r"`false .*arena\.cpp"):
        arena.load_arena_library()
    assert not list((tmp_path / "ssdtrain_fx").glob("*")), "nothing is left behind"


def test_without_a_home_directory_there_is_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``docker run --user 12345``."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(arena.Path, "home", home)
    with pytest.raises(ArenaUnavailableError, match="home directory"):
        arena.load_arena_library()


def test_without_a_compiler_the_message_says_where_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArenaUnavailableError, match=r"no C\+\+ compiler \(looked for \$CXX, g\+\+"):
        arena.load_arena_library()


def test_where_the_system_grants_no_more_memory_the_heap_serves() -> None:
    done = run_python(
        """
        import torch
        from ssdtrain_fx.runtime.memory import step_memory as module
        library = module.load_arena_library()
        library.install(16 << 20)
        library.enter(0)
        inside, outside = torch.empty(2 << 20), torch.empty(4 << 20)
        library.leave(False)
        inside.fill_(1); outside.fill_(2)
        assert library.describe().allocated_bytes == inside.nbytes
        assert float(inside.sum()) == 2 << 20 and float(outside.mean()) == 2
        """
    )
    assert done.returncode == 0, done.stderr


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_forked_child_inherits_what_is_in_use_and_nothing_else() -> None:
    """The parent holds 64 MiB in use and 256 MiB free. The child reads the first, does not map the second, and has an
    arena of its own. What it frees is not freed in the parent."""
    done = run_python(
        """
        import os, sys
        import torch
        from ssdtrain_fx.runtime.memory.step_memory import step_memory

        def resident_bytes():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        torch.set_num_threads(1)
        MIB = 1 << 20
        with step_memory.inside():
            kept = torch.full((16 * MIB,), 3.0)
            free = torch.full((64 * MIB,), 4.0)
        library = step_memory.library
        del free
        committed = library.describe().committed_bytes
        assert committed >= 320 * MIB
        parent_bytes = resident_bytes()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert parent_bytes - resident_bytes() > 200 * MIB, "the free memory is not there"
                assert bool((kept == 3).all())
                assert library.describe().allocated_bytes == 0
                with step_memory.inside():
                    own = torch.full((2 * MIB,), 5.0)
                assert library.describe().allocated_bytes == own.nbytes
                kept.fill_(6)
                del kept
                assert library.describe().allocated_bytes == own.nbytes
                assert bool((own == 5).all())
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        assert bool((kept == 3).all())
        with step_memory.inside():
            again = torch.full((64 * MIB,), 7.0)
        assert library.describe().committed_bytes == committed, "the free memory is still there"
        assert bool((again == 7).all())
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_fork_within_a_run_leaves_the_child_an_arena_of_its_own() -> None:
    done = run_python(
        """
        import os
        import torch
        from ssdtrain_fx.runtime.memory.step_memory import in_step_memory

        def graph(args):
            before = torch.full((1 << 20,), 1.0)
            child = os.fork()
            if child == 0:
                own = torch.full((1 << 20,), 2.0)
                os._exit(0 if bool((before == 1).all()) and bool((own == 2).all()) else 1)
            return os.waitpid(child, 0)[1]

        torch.set_num_threads(1)
        run = in_step_memory(graph, planned_peak_bytes=0)
        assert [run([]) for _ in range(3)] == [0, 0, 0]
        """
    )
    assert done.returncode == 0, done.stderr


def test_steps_touch_no_new_pages_and_the_process_does_not_grow() -> None:
    done = run_python(
        """
        import gc, resource
        import torch
        import ssdtrain_fx
        from steps import FAST_DISK
        from test_step_memory import Layers, data

        def resident_bytes():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        torch.set_num_threads(1)
        model = Layers(layers=8)
        config = ssdtrain_fx.OffloadConfig(policy="all", min_tensor_bytes=0, hardware=FAST_DISK)
        compiled = torch.compile(model, backend=ssdtrain_fx.backend(config))
        x = data()
        faults, sizes = [], []
        for step in range(200):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            compiled(x).backward()
            model.zero_grad(set_to_none=True)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            sizes.append(resident_bytes())
        assert sum(faults[3:]) / len(faults[3:]) < 20, faults
        assert max(faults[3:]) < 1000, faults
        planned = ssdtrain_fx.memory_stats().planned_peak_bytes
        assert max(sizes[3:]) - min(sizes[3:]) < 0.05 * (min(sizes) + planned), (min(sizes), max(sizes))
        """,
    )
    assert done.returncode == 0, done.stderr
