"""The memory of compiled steps: what a step holds, what it leaves, and that nothing is read after it was freed."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from arena_help import MIB, PAGE_BYTES, allocated_bytes, run_python
from steps import FAST_DISK, counted
from torch import Tensor, nn

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx._torch_private import arena
from ssdtrain_fx._torch_private.arena import ArenaLibrary, ArenaUnavailableError
from ssdtrain_fx.runtime.memory import step_memory as module
from ssdtrain_fx.runtime.memory.step_memory import StepMemory, in_step_memory


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
    options = {"policy": "all", "min_tensor_bytes": 0, **options}
    config = OffloadConfig(hardware=FAST_DISK, inner=inner, **options)
    return model, torch.compile(model, backend=ssdtrain_fx.backend(config))


def data(seed: int = 0) -> Tensor:
    return torch.randn(1024, 128, generator=torch.Generator().manual_seed(seed))


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


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_step_that_moves_nothing_uses_the_arena_that_another_one_needs(
    inner: str, library: ArenaLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.step_memory, "is_needed", False)
    torch._dynamo.reset()
    x = data()
    _, idle = compile_layers(inner, policy="auto", min_tensor_bytes=1 << 40)
    _, moving = compile_layers(inner)
    from_arena: list[int] = []
    for compiled in (idle, moving, idle):
        compiled(x).backward()
        library.reset_peaks()
        before = allocated_bytes()
        moved = counted(lambda compiled=compiled: compiled(x).backward())
        assert bool(moved.offloads) == (compiled is moving)
        from_arena.append(ssdtrain_fx.memory_stats().allocated_peak_bytes - before)
    assert from_arena[0] == 0
    assert from_arena[2] > from_arena[1] > x.nbytes, "without offloading, more is held"


@pytest.mark.usefixtures("library")
def test_a_reset_peak_is_compared_with_the_plans_that_run_after_it() -> None:
    small, large = (in_step_memory(lambda args: None, planned_peak_bytes=size_bytes) for size_bytes in (10, 20))
    ssdtrain_fx.reset_peak_memory_stats()
    planned_bytes = [ssdtrain_fx.memory_stats().planned_peak_bytes]
    for graph in (small, large, small):
        graph([])
        planned_bytes.append(ssdtrain_fx.memory_stats().planned_peak_bytes)
    assert planned_bytes == [0, 10, 20, 20]
    ssdtrain_fx.reset_peak_memory_stats()
    small([])
    assert ssdtrain_fx.memory_stats().planned_peak_bytes == 10


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


def test_the_last_compiled_step_takes_the_memory_with_it() -> None:
    """In a process of its own: pytest keeps log records, and with them the compiled function."""
    done = run_python(
        """
        import gc
        import torch
        from ssdtrain_fx.runtime.memory.step_memory import step_memory
        from test_step_memory import compile_layers, data

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
