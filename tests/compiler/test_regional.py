"""A model that is compiled layer by layer: activations between graphs, and possible orders of backward."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import FAST_DISK, compare_gradients, settled_statistics, small_model
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ssdtrain_fx import OffloadConfig, backend, explain, statistics
from ssdtrain_fx.hardware import Channel
from ssdtrain_fx.runtime.memory.movers import CpuMover
from ssdtrain_fx.studies.zoo import find_layers
from ssdtrain_fx.testing import assert_same_bits, gradients_of

pytestmark = pytest.mark.usefixtures("one_thread")

SLOW_DISK = dataclasses.replace(FAST_DISK, write=Channel(bytes_per_s=1.0), read=Channel(bytes_per_s=1.0))
"""No write completes before forward ends, so every release is planned for the end of forward."""
WIDTH = 32
INNERS = ["inductor", "aot_eager"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.nn.functional.gelu(self.widen(self.norm(x))))


class Tower(nn.Module):
    """Everything outside the layers runs as plain PyTorch."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def everything(inner: Any, **options: Any) -> OffloadConfig:
    return OffloadConfig(**{"inner": inner, "policy": "all", "min_tensor_bytes": 0, **options})


def compile_layers(tower: Tower, compiler: Any) -> None:
    torch._dynamo.reset()
    for layer in tower.layers:
        layer.compile(backend=compiler)


def compare(inner: Any, loop: Callable[[Tower, list[Tensor]], None], **options: Any) -> None:
    """Run ``loop(model, batches)`` with and without offloading. The accumulated gradients must be equal."""
    torch.manual_seed(0)
    tower = Tower()
    batches = [torch.randn(8, WIDTH) for _ in range(4)]

    def train(compiler: Any) -> None:
        compile_layers(tower, compiler)
        loop(tower, batches)

    compare_gradients(tower, inner, everything(inner, **options), train)


def one_after_the_other(tower: Tower, batches: list[Tensor]) -> None:
    for batch in batches:
        tower(batch).backward()


def forwards_first(tower: Tower, batches: list[Tensor]) -> None:
    for loss in [tower(batch) for batch in batches]:
        loss.backward()


def forwards_first_last_one_back_first(tower: Tower, batches: list[Tensor]) -> None:
    for loss in reversed([tower(batch) for batch in batches]):
        loss.backward()


def one_forward_one_backward(tower: Tower, batches: list[Tensor]) -> None:
    under_way = [tower(batches[0]), tower(batches[1])]
    for batch in batches[2:]:
        under_way.pop(0).backward()
        under_way.append(tower(batch))
    for loss in under_way:
        loss.backward()


def layer_by_layer(tower: Tower, batches: list[Tensor]) -> None:
    """Run every micro-batch through a layer before the next layer: an order that the engine does not foresee."""
    xs = [tower.first(batch) for batch in batches]
    for layer in tower.layers:
        xs = [layer(x) for x in xs]
    for x in xs[1:] + xs[:1]:
        x.square().sum().backward()


def some_dropped(tower: Tower, batches: list[Tensor]) -> None:
    losses = [tower(batch) for batch in batches]
    del losses[1]
    losses.pop().backward()
    losses.pop(0).backward()


ORDERS = [
    one_after_the_other,
    forwards_first,
    forwards_first_last_one_back_first,
    one_forward_one_backward,
    layer_by_layer,
    some_dropped,
]


@pytest.mark.parametrize("loop", ORDERS)
@pytest.mark.parametrize("inner", INNERS)
def test_gradients_are_the_same_in_every_order(inner: str, loop: Callable[[Tower, list[Tensor]], None]) -> None:
    compare(inner, loop)


def test_gpt2_layer_by_layer_is_equal_to_inductor_to_the_bit_and_reads_ahead() -> None:
    model, batches = small_model("gpt2", layers=3)
    found: list[list[tuple[Tensor, dict[str, Tensor]]]] = []
    for compiler in ("inductor", backend(everything("inductor"))):
        torch._dynamo.reset()
        for layer in find_layers(model):
            layer.compile(backend=compiler)
        before = statistics()
        steps: list[tuple[Tensor, dict[str, Tensor]]] = []
        for batch in batches:
            model.zero_grad(set_to_none=True)
            loss = model(*batch)
            loss.backward()
            steps.append((loss.detach(), gradients_of(model)))
        found.append(steps)
    assert_same_bits(found[1], found[0])
    done = settled_statistics().since(before)
    # The input of each layer is one of 13 tensors. The last layer is the only one without read-ahead.
    assert done.offloads == len(batches) * 3 * 13
    moved_bytes = done.bytes_written + done.cancelled_bytes  # what is read before its write began is not written
    assert 0 < done.ahead_bytes <= moved_bytes * 2 // 3
    assert done.slots_in_use == 0


@pytest.mark.parametrize("reads_in_time", [True, False])
def test_only_what_backward_could_not_read_in_time_is_read_before_it(reads_in_time: bool) -> None:
    """On a disk with fast reads, a reload at its planned place is early enough; earlier, it only takes memory."""
    torch.manual_seed(0)
    tower, batch = Tower(), torch.randn(8, WIDTH)
    read = Channel(bytes_per_s=1e15 if reads_in_time else 1e3)
    hardware = dataclasses.replace(FAST_DISK, read=read, kernel_s=1e-3)
    compile_layers(tower, backend(everything("aot_eager", hardware=hardware)))
    before = settled_statistics()
    for _ in range(2):
        tower(batch).backward()
    done = settled_statistics().since(before)
    assert done.offloads > 0
    assert (done.ahead_bytes == 0) is reads_in_time


def held_after_forward(tower: Tower, batch: Tensor) -> int:
    """Bytes allocated by forward that are still allocated when it has finished and nothing is in flight."""
    tower(batch).backward()  # one-time allocations
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = tower(batch)
        settled_statistics()
    held = sum(event.self_cpu_memory_usage for event in profiled.events())
    loss.backward()
    return held


@pytest.mark.parametrize("inner", INNERS)
def test_between_forward_and_backward_nothing_is_held_that_was_moved(inner: Any) -> None:
    """The activations between the layers are freed too, because only their layer needs them.

    With native AIO, because threads free memory a moment after the engine is idle.
    """
    torch.manual_seed(0)
    tower, batch = Tower(), torch.randn(64, WIDTH)
    compile_layers(tower, inner)
    plain = held_after_forward(tower, batch)
    compile_layers(tower, backend(everything(inner, io="aio")))
    before = settled_statistics()
    moving = held_after_forward(tower, batch)
    moved = settled_statistics().since(before).bytes_written // 2  # two steps
    if "native AIO" not in statistics().io_path:
        pytest.skip("this system has no native AIO")
    assert moved > 4 * len(tower.layers) * 64 * WIDTH * 4
    assert plain - moving == moved


def test_what_leaves_after_forward_has_returned_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard 1 between two graphs: the compiler reuses the memory of a tensor after its deferred release."""
    forward_is_over = threading.Event()
    copy_out = CpuMover.copy_out
    count = 0

    def copy_out_later(self: CpuMover, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count > 1:  # the first is the layer's input, which must be offloaded before forward ends
            assert forward_is_over.wait(60)
        return copy_out(self, *arguments)

    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(8, WIDTH, requires_grad=True)
    found: list[dict[str, Tensor]] = []
    for compiler in ("inductor", backend(everything("inductor", hardware=SLOW_DISK, io="posix"))):
        torch._dynamo.reset()
        layer.zero_grad(set_to_none=True)
        x.grad = None
        if compiler != "inductor":
            monkeypatch.setattr(CpuMover, "copy_out", copy_out_later)
        layer.compile(backend=compiler)
        y = layer(x * 2)
        noise = [torch.full_like(y, float("nan")) for _ in range(64)]  # takes the free memory
        forward_is_over.set()
        y.square().sum().backward()
        del noise
        assert x.grad is not None
        found.append({"x": x.grad, **gradients_of(layer)})
        forward_is_over.clear()
    assert count > 1
    assert settled_statistics().late_bytes > 0
    assert_same_bits(found[1], found[0])


class Twice(nn.Module):
    """Two compiled layers that both save the same activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.write_between = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.layers[0](x)
        if self.write_between:
            with torch.no_grad():
                x.mul_(2)
        return (y * self.layers[1](x)).sum()


@pytest.mark.parametrize("inner", INNERS)
def test_an_activation_that_two_graphs_save_is_written_once(inner: Any) -> None:
    torch.manual_seed(0)
    model, batch = Twice(), torch.randn(8, WIDTH)
    found: list[dict[str, Tensor]] = []
    for compiler in (inner, backend(everything(inner))):
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile(backend=compiler)
        model.zero_grad(set_to_none=True)
        model(batch).backward()
        found.append(gradients_of(model))
    assert_same_bits(found[1], found[0])
    done = settled_statistics()
    assert done.deduplicated_bytes == batch.nbytes
    assert done.slots_in_use == 0
    one = done.bytes_written + done.cancelled_bytes
    torch._dynamo.reset()
    model.layers[0].compile(backend=backend(everything(inner)))
    model.layers[0](model.first(batch)).sum().backward()
    done = settled_statistics()
    alone = done.bytes_written + done.cancelled_bytes - one
    assert one == 2 * alone - batch.nbytes


def test_an_activation_that_was_written_to_in_between_is_another_one() -> None:
    """Plain PyTorch refuses this backward. Here, each layer reloads the values that it has read."""
    torch.manual_seed(0)
    model, batch = Twice(), torch.randn(8, WIDTH)
    config = backend(everything("aot_eager"))
    for layer in model.layers:
        layer.compile(backend=config)
    model.write_between = True
    model(batch).backward()
    assert settled_statistics().deduplicated_bytes == 0
    found = {name: p.grad for name, p in model.layers.named_parameters()}

    x = model.first(batch).detach()
    first, second = model.layers
    model.zero_grad(set_to_none=True)
    (first.forward(x) * second.forward(2 * x)).sum().backward()
    for name, parameter in model.layers.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def double_data(x: Tensor) -> None:
    x.data.mul_(2)


def double_numpy(x: Tensor) -> None:
    x.detach().numpy()[...] *= 2


def double_dlpack(x: Tensor) -> None:
    torch.from_dlpack(x.detach()).mul_(2)


@pytest.mark.parametrize("write", [double_data, double_numpy, double_dlpack])
def test_a_write_that_changes_no_version_makes_another_activation(write: Callable[[Tensor], None]) -> None:
    """Hazard 11. Both graphs save ``x``; the second one saves what it has read, as under plain Inductor."""
    torch.manual_seed(0)
    model, batch = Twice(), torch.randn(8, WIDTH)
    first, second = model.layers
    found: list[dict[str, Tensor]] = []
    for compiler in ("inductor", backend(everything("inductor"))):
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile(backend=compiler)
        model.zero_grad(set_to_none=True)
        x = model.first(batch)
        version = x._version
        y = first(x)
        write(x)
        assert x._version == version
        second(x).square().sum().backward()
        found.append(gradients_of(model))
        del y  # alive until here, so that its graph keeps what it has saved
    assert_same_bits(found[1], found[0])
    assert settled_statistics().deduplicated_bytes == 0


@pytest.mark.parametrize("options", [{}, {"policy": "auto", "max_slowdown": 10.0}])
def test_a_link_of_a_chain_has_no_host_tier(options: dict[str, Any]) -> None:
    """All links would fill it at the same time. The same layer alone, whose input is no activation, has one."""
    gpu = dataclasses.replace(FAST_DISK, device="toy GPU", staging_bytes=64 << 20)
    config = everything("aot_eager", hardware=gpu, **options)
    x = torch.randn(8, WIDTH, requires_grad=True)
    link = explain(Layer(), x.exp(), config=config).plan
    assert link.offloaded and not link.on_host
    assert explain(Layer(), x, config=config).plan.on_host
