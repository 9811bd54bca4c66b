"""Training on the simulated device: every configuration gives the bits of the CPU, and the host runs ahead."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from device_under_test import DEVICE, TYPE, gpu
from interrupter import Interrupter
from steps import counted, settled_statistics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ssdtrain_fx import OffloadConfig, Statistics, backend
from ssdtrain_fx.errors import SSDTrainError
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.runtime.book import admission
from ssdtrain_fx.runtime.memory.stream_mover import StreamMover
from ssdtrain_fx.runtime.storage.spill_file import SpillFile
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.testing import assert_same_bits, gradients_of, toy_hardware

if TYPE_CHECKING:
    from simulated_device import Simulator

DISK_BYTES_PER_S = 1e9
ONLY_DISK: Hardware = toy_hardware(disk_bytes_per_s=DISK_BYTES_PER_S, device="simulated", kernel_s=1e-3)
HOST_TIER = dataclasses.replace(ONLY_DISK, staging_bytes=64 << 20)
FAST_DISK: Hardware = toy_hardware(disk_bytes_per_s=1e12, device="simulated", kernel_s=1e-3)
REFERENCE = "cpu" if "SIMULATED_DEVICE" in os.environ else TYPE
"""Whose bits are expected: the simulated device has the kernels of the CPU."""
DELAYS = [(0, 0), (300, 0), (0, 1000), (200, 200)]
"""Up to how many microseconds kernels are late on the default stream, and on side streams."""

Loop = Callable[[Callable[..., Tensor], Sequence[tuple[Tensor, ...]]], None]


class Block(nn.Module):
    """A layer of a GPT without attention kernels, whose choice depends on the device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, 2, width // 2).transpose(1, 2) for part in self.qkv(self.norm(x)).split(width, -1)
        )
        attention = (q @ k.transpose(-1, -2) / width**0.5).softmax(-1) @ v
        x = x + self.out(attention.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(nn.functional.gelu(self.widen(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int = 3, width: int = 32, vocab: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().sum()


class Checkpointed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().sum()


def make(name: str) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """A model and the data of three steps, on the CPU."""
    torch.manual_seed(0)
    if name == "gpt":
        return Gpt(), [(torch.randint(64, (4, 16)),) for _ in range(3)]
    if name in ("mlp", "checkpointed"):
        return Mlp() if name == "mlp" else Checkpointed(), [(torch.randn(512, 64),) for _ in range(3)]
    model, make_batch = zoo.build(name, layers=2, hidden=64, sequence=32, vocab=128, batch=2)
    generator = torch.Generator().manual_seed(1)
    return model, [make_batch(generator) for _ in range(3)]


def ordinary(model: Callable[..., Tensor], batches: Sequence[tuple[Tensor, ...]]) -> None:
    for batch in batches:
        model(*batch).backward()


def train(name: str, device: str, compiler: Any, loop: Loop, *, regional: bool = False) -> dict[str, Tensor]:
    """The gradients that ``loop`` accumulates, on the CPU."""
    torch._dynamo.reset()
    model, batches = make(name)
    model = model.to(device)
    on_device = [tuple(value.to(device) for value in batch) for batch in batches]
    if regional:
        for layer in model.layers:  # pyright: ignore[reportGeneralTypeIssues]
            layer.compile(backend=compiler)
        loop(model, on_device)
    else:
        loop(torch.compile(model, backend=compiler), on_device)
    return {key: value.cpu() for key, value in gradients_of(model).items()}


def compare(
    ssd_dir: str,
    name: str,
    loop: Loop = ordinary,
    *,
    reference: str = REFERENCE,
    regional: bool = False,
    moves: bool = True,
    **options: Any,
) -> Statistics:
    """Train with and without offloading. The gradients must have equal bits, and nothing is left on the disk."""
    config = OffloadConfig(
        **{
            "inner": "aot_eager",
            "policy": "all",
            "min_tensor_bytes": 0,
            "hardware": ONLY_DISK,
            "io": "posix",
            "ssd_dir": ssd_dir,
            **options,
        }
    )
    expected = train(name, reference, "aot_eager", loop, regional=regional)
    found: list[dict[str, Tensor]] = []
    moved = counted(lambda: found.append(train(name, TYPE, backend(config), loop, regional=regional)))
    assert_same_bits(found[0], expected)
    assert (moved.offloads > 0) == moves
    gc.collect()
    assert settled_statistics().slots_in_use == 0
    return moved


@pytest.mark.parametrize("name", ["gpt", "mlp"])
@pytest.mark.quick_on_cuda
def test_policy_all(sim: Simulator, ssd_dir: str, name: str) -> None:
    def loop(model: Callable[..., Tensor], batches: Sequence[tuple[Tensor, ...]]) -> None:
        for seed, (default_us, side_us) in enumerate(DELAYS):
            sim.configure(seed=seed, default_us=default_us, side_us=side_us, percent=30)
            ordinary(model, batches)

    moved = compare(ssd_dir, name, loop)
    assert moved.bytes_written > 0
    assert moved.bytes_read > 0


@pytest.mark.parametrize(
    "name",
    [
        "encoder",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("conv", "gpt2", "bert", "t5", "llama", "mixtral", "vit")
        ),
    ],
)
@pytest.mark.quick_on_cuda
def test_models_whose_kernels_depend_on_the_device(sim: Simulator, ssd_dir: str, name: str) -> None:
    sim.configure(seed=8, default_us=200, side_us=200, percent=20)
    compare(ssd_dir, name, reference=TYPE)


def test_policy_auto_with_a_budget_and_the_host_tier(sim: Simulator, ssd_dir: str) -> None:
    sim.configure(seed=9, default_us=200, side_us=200, percent=20)
    moved = compare(ssd_dir, "gpt", policy="auto", memory_budget_bytes=400_000, recompute=False, hardware=HOST_TIER)
    assert moved.host_bytes > 0


@pytest.mark.quick_on_cuda
def test_policy_auto_recomputes(sim: Simulator, ssd_dir: str) -> None:
    sim.configure(seed=10, default_us=200, side_us=200, percent=20)
    compare(ssd_dir, "gpt", policy="auto", max_slowdown=1.0)


@pytest.mark.parametrize("disk", ["works", "is full"])
def test_a_host_tier_that_is_too_small_is_demoted(sim: Simulator, ssd_dir: str, disk: str) -> None:
    """The engine has less staging than the plan counts on. What cannot be written stays in memory."""
    sim.configure(seed=11, default_us=100, side_us=300, percent=30)
    options = {} if disk == "works" else {"disk_reserve_bytes": 1 << 60}
    with unittest.mock.patch.object(StreamMover, "default_budget_bytes", 8 << 20):
        moved = compare(ssd_dir, "gpt", hardware=HOST_TIER, **options)
    assert moved.demoted_bytes > 0
    assert (moved.bytes_written > 0) == (disk == "works")
    assert (moved.kept_bytes > 0) == (disk == "is full")


@pytest.mark.quick_on_cuda
def test_checksums(sim: Simulator, ssd_dir: str) -> None:
    sim.configure(seed=12, default_us=100, side_us=300, percent=30)
    compare(ssd_dir, "mlp", checksum=True)


@pytest.mark.parametrize("reads_in_time", [True, False])
@pytest.mark.quick_on_cuda
def test_a_chain_of_graphs(sim: Simulator, ssd_dir: str, reads_in_time: bool) -> None:
    sim.configure(seed=13, default_us=100, side_us=300, percent=30)
    hardware = ONLY_DISK if reads_in_time else dataclasses.replace(ONLY_DISK, read=Channel(bytes_per_s=1e3))
    moved = compare(ssd_dir, "gpt", regional=True, hardware=hardware)
    assert (moved.ahead_bytes == 0) is reads_in_time


def test_tensors_that_leave_after_their_graph(sim: Simulator, ssd_dir: str) -> None:
    """By the plan, the disk takes for ever, so all releases are at the end. Staging has two buffers, so most tensors of
    a layer are still on the device when the next layer begins."""
    sim.configure(seed=28, side_us=10_000)
    for_ever = Channel(bytes_per_s=1.0)
    slow = dataclasses.replace(ONLY_DISK, write=for_ever, read=for_ever)
    with unittest.mock.patch.object(StreamMover, "default_budget_bytes", 4 << 20):
        moved = compare(ssd_dir, "gpt", regional=True, hardware=slow)
    assert moved.late_bytes > 0


@pytest.mark.quick_on_cuda
def test_second_backward_with_retain_graph(sim: Simulator, ssd_dir: str) -> None:
    sim.configure(seed=14, default_us=100, side_us=300, percent=30)

    def loop(model: Callable[..., Tensor], batches: Sequence[tuple[Tensor, ...]]) -> None:
        loss = model(*batches[0])
        loss.backward(retain_graph=True)
        loss.backward()

    compare(ssd_dir, "gpt", loop)


@pytest.mark.quick_on_cuda
def test_losses_that_are_dropped(sim: Simulator, ssd_dir: str) -> None:
    sim.configure(seed=15, default_us=100, side_us=1000, percent=30)

    def loop(model: Callable[..., Tensor], batches: Sequence[tuple[Tensor, ...]]) -> None:
        for batch in batches:
            model(*batch)
            model(*batch).backward()

    compare(ssd_dir, "mlp", loop)


def test_two_forwards_before_their_backwards(sim: Simulator, ssd_dir: str) -> None:
    sim.configure(seed=16, default_us=100, side_us=300, percent=30)

    def loop(model: Callable[..., Tensor], batches: Sequence[tuple[Tensor, ...]]) -> None:
        losses = [model(*batch) for batch in batches]
        for loss in losses:
            loss.backward()

    compare(ssd_dir, "mlp", loop)


@pytest.mark.quick_on_cuda
def test_a_full_disk_keeps_bytes_in_memory(sim: Simulator, ssd_dir: str) -> None:
    sim.configure(seed=17, default_us=100, side_us=1000, percent=50)
    moved = compare(ssd_dir, "mlp", disk_reserve_bytes=1 << 60)
    assert moved.kept_bytes > 0


@pytest.mark.quick_on_cuda
def test_training_on_a_stream_of_its_own(sim: Simulator, ssd_dir: str) -> None:
    sim.configure(seed=18, default_us=300, side_us=300, percent=30)

    def loop(model: Callable[..., Tensor], batches: Sequence[tuple[Tensor, ...]]) -> None:
        if batches[0][0].device.type != TYPE:
            ordinary(model, batches)
            return
        gpu.synchronize()
        with gpu.stream(gpu.Stream(device=DEVICE)):
            ordinary(model, batches)
        gpu.synchronize()

    compare(ssd_dir, "gpt", loop)


def test_two_devices_at_the_same_time(sim: Simulator, ssd_dir: str) -> None:
    if gpu.device_count() < 2:
        pytest.skip("there is one device")
    sim.configure(seed=19, default_us=100, side_us=300, percent=30)
    expected = train("mlp", REFERENCE, "aot_eager", ordinary)
    options: dict[str, Any] = {"inner": "aot_eager", "policy": "all", "min_tensor_bytes": 0, "hardware": ONLY_DISK}
    config = OffloadConfig(**options, io="posix", ssd_dir=ssd_dir)
    models, losses = [], []
    torch._dynamo.reset()
    for index in range(2):
        model, batches = make("mlp")
        models.append(
            (model.to(f"{TYPE}:{index}"), [tuple(x.to(f"{TYPE}:{index}") for x in batch) for batch in batches])
        )
    compiled = [torch.compile(model, backend=backend(config)) for model, _ in models]
    for step in range(3):
        losses = [compiled[index](*models[index][1][step]) for index in range(2)]
        for loss in losses:
            loss.backward()
    for model, _ in models:
        assert_same_bits({key: value.cpu() for key, value in gradients_of(model).items()}, expected)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_training_thread_never_waits_for_the_device(sim: Simulator, ssd_dir: str, tier: str) -> None:
    options: dict[str, Any] = {"inner": "aot_eager", "policy": "auto", "max_slowdown": 1.0, "min_tensor_bytes": 0}
    config = OffloadConfig(
        **options,
        recompute=False,
        hardware=HOST_TIER if tier == "host" else ONLY_DISK,
        io="posix",
        ssd_dir=ssd_dir,
    )
    model, batches = make("mlp")
    model, inputs = model.to(TYPE), [tuple(x.to(TYPE) for x in batch) for batch in batches]
    compiled = torch.compile(model, backend=backend(config))
    ordinary(compiled, inputs)  # compiles
    gpu.synchronize()
    sim.take_counts()
    ordinary(compiled, inputs)
    assert sim.take_counts().syncs_of_training() == {}


def test_accumulated_gradients_and_an_optimizer(sim: Simulator, ssd_dir: str) -> None:
    sim.configure(seed=21, default_us=200, side_us=300, percent=30)

    def loop(model: Any, batches: Sequence[tuple[Tensor, ...]]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            for batch in batches:
                (model(*batch) / len(batches)).backward()
            optimizer.step()

    compare(ssd_dir, "mlp", loop)


def test_checkpointed_layers(sim: Simulator, ssd_dir: str) -> None:
    """What a checkpoint saves is offloaded, and backward computes the layer again from what is reloaded."""
    sim.configure(seed=22, default_us=200, side_us=300, percent=30)

    def loop(model: Any, batches: Sequence[tuple[Tensor, ...]]) -> None:
        ordinary(model, batches)

    compare(ssd_dir, "checkpointed", loop)


def test_a_budget_in_a_chain_of_graphs(sim: Simulator, ssd_dir: str) -> None:
    sim.configure(seed=23, default_us=200, side_us=300, percent=30)
    compare(ssd_dir, "gpt", regional=True, policy="auto", memory_budget_bytes=150_000, recompute=False)


def test_tensors_that_stay_to_save_time(sim: Simulator, ssd_dir: str) -> None:
    """The disk is slower than planned. What would leave or come back too late stays on the device."""
    sim.configure(seed=24, default_us=100, side_us=300, percent=30)
    write, read = SpillFile.write, SpillFile.read

    def write_late(file: SpillFile, data: memoryview, offset_bytes: int) -> None:
        time.sleep(0.01)
        write(file, data, offset_bytes)

    def read_late(file: SpillFile, data: memoryview, offset_bytes: int) -> None:
        time.sleep(0.01)
        read(file, data, offset_bytes)

    def loop(model: Callable[..., Tensor], batches: Sequence[tuple[Tensor, ...]]) -> None:
        for _ in range(4):
            ordinary(model, batches)

    options: dict[str, Any] = {"policy": "auto", "max_slowdown": 1e-6, "recompute": False, "hardware": FAST_DISK}
    with (
        unittest.mock.patch.multiple(SpillFile, write=write_late, read=read_late),
        unittest.mock.patch.object(StreamMover, "default_budget_bytes", 4 << 20),  # of chunks of 2 MiB
        unittest.mock.patch.object(admission, "BALANCE_LIMIT_S", 1e-6),  # nothing has been saved up for stalls
    ):
        moved = compare(ssd_dir, "mlp", loop, **options)
    assert moved.kept_for_time_bytes > 0


def steps_after_interrupts(ssd_dir: str, points: Iterable[int], interrupt: Callable[..., Interrupter]) -> None:
    """Train after steps that ``interrupt(model, batch, point)`` has run: gradients have the bits of before."""

    def loop(model: Any, batches: Sequence[tuple[Tensor, ...]]) -> None:
        ordinary(model, batches)
        if batches[0][0].device.type != TYPE:
            return
        kept = [parameter.grad for parameter in model.parameters()]
        for at in points:
            for parameter in model.parameters():
                parameter.grad = None
            interrupter = interrupt(model, batches[0], at)
            assert interrupter.place, f"the step has {interrupter.count} points, and not {at}"
        for parameter in model.parameters():
            parameter.grad = None
        ordinary(model, batches)
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            assert gradient is not None
            assert torch.equal(parameter.grad, gradient)

    compare(ssd_dir, "mlp", loop)


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "MemoryError"])
def test_a_step_after_one_whose_forward_was_interrupted(sim: Simulator, ssd_dir: str, error: str) -> None:
    """The exception comes at some instruction of the runtime."""
    sim.configure(seed=25, default_us=100, side_us=300, percent=30)
    raised: type[BaseException] = {"KeyboardInterrupt": KeyboardInterrupt, "MemoryError": MemoryError}[error]

    def interrupt(model: Callable[..., Tensor], batch: tuple[Tensor, ...], at: int) -> Interrupter:
        with contextlib.suppress(raised, SSDTrainError), Interrupter(at, raised) as interrupter:
            model(*batch).backward()
        return interrupter

    steps_after_interrupts(ssd_dir, range(100, 1500, 200), interrupt)


def test_a_step_after_one_whose_backward_lacked_memory(sim: Simulator, ssd_dir: str) -> None:
    """Backward runs on a thread of torch, where a hook of the loss plants the exception. Ctrl-C never comes there."""
    sim.configure(seed=29, default_us=100, side_us=300, percent=30)

    def interrupt(model: Callable[..., Tensor], batch: tuple[Tensor, ...], at: int) -> Interrupter:
        interrupter = Interrupter(at, MemoryError)
        loss = model(*batch)
        loss.register_hook(lambda _: interrupter.__enter__() and None)
        with contextlib.suppress(MemoryError, SSDTrainError):
            loss.backward()
        return interrupter

    steps_after_interrupts(ssd_dir, range(50, 950, 150), interrupt)


def test_a_forked_process_leaves_the_training_alone(sim: Simulator, ssd_dir: str) -> None:
    """A worker of a data loader is forked between forward and backward, and ends by itself."""
    sim.configure(seed=26, default_us=100, side_us=1000, percent=30)

    def loop(model: Callable[..., Tensor], batches: Sequence[tuple[Tensor, ...]]) -> None:
        for batch in batches:
            loss = model(*batch)
            child = os.fork()
            if child == 0:
                gc.collect()
                os._exit(0)
            loss.backward()
            assert os.waitpid(child, 0)[1] == 0

    compare(ssd_dir, "mlp", loop)


@pytest.mark.quick_on_cuda
def test_threads_that_train_on_streams_of_their_own(sim: Simulator, ssd_dir: str) -> None:
    sim.configure(seed=20, default_us=300, side_us=300, percent=30)

    def loop(model: Callable[..., Tensor], batches: Sequence[tuple[Tensor, ...]]) -> None:
        def work(batch: tuple[Tensor, ...]) -> None:
            if batch[0].device.type != TYPE:
                model(*batch).backward()
                return
            with gpu.stream(gpu.Stream(device=DEVICE)):
                model(*batch).backward()
                gpu.current_stream().synchronize()

        for batch in batches:
            gpu.synchronize()
            thread = threading.Thread(target=work, args=(batch,))
            thread.start()
            thread.join()

    compare(ssd_dir, "mlp", loop)
