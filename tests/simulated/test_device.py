"""The simulated device itself: what is out of order shows, what is in order does not, and nothing hangs."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import build
import pytest
import torch
from device_process import environment
from device_under_test import DEVICE, TYPE, gpu

from ssdtrain_fx._torch_private.arena import ArenaUnavailableError

if TYPE_CHECKING:
    from simulated_device import Simulator

COUNT = 1024
POISON = b"\xcb" * (COUNT * 4)


def full(value: float, device: str = TYPE) -> torch.Tensor:
    return torch.full((COUNT,), value, device=device)


def raw(x: torch.Tensor) -> bytes:
    return x.cpu().numpy().tobytes()


def side_stream() -> torch.Stream:
    return gpu.Stream(device=DEVICE)


def test_a_read_on_another_stream_sees_poison_without_an_event_and_the_result_with_one(sim: Simulator) -> None:
    side = side_stream()
    with sim.hold():
        x = full(3.0)
        done = gpu.Event()
        done.record(gpu.current_stream())
        with gpu.stream(side):
            early = x.clone()
            sim.settle()
            side.wait_event(done)
            late = x.clone()
            sim.settle()
    gpu.synchronize()
    assert raw(early) == POISON
    assert late.cpu().tolist() == [3.0] * COUNT


def test_memory_is_reused_last_in_first_out_and_poisoned_in_stream_order(sim: Simulator) -> None:
    x, y = full(1.0), full(2.0)
    first, second = x.data_ptr(), y.data_ptr()
    with sim.hold():
        copy = y.clone()
        del x, y
        reused = torch.empty(COUNT, device=TYPE)
    assert reused.data_ptr() == second != first
    assert copy.cpu().tolist() == [2.0] * COUNT
    assert raw(reused) == POISON


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_another_stream_reads_is_reused_unless_record_stream_says_so(
    sim: Simulator, recorded: bool
) -> None:
    side = side_stream()
    x = full(1.0)
    gpu.synchronize()
    with sim.hold(side):
        with gpu.stream(side):
            read = x.clone()
        if recorded:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        y = full(2.0)
        sim.settle()
        assert (y.data_ptr() == address) != recorded
    side.synchronize()
    assert (read.cpu().tolist() == [1.0] * COUNT) == recorded


def test_a_block_that_was_recorded_is_reused_once_the_other_stream_has_passed(sim: Simulator) -> None:
    side = side_stream()
    x = full(1.0)
    x.record_stream(side)
    address = x.data_ptr()
    del x
    sim.settle()
    assert full(2.0).data_ptr() == address


def test_an_event_stands_for_its_last_record(sim: Simulator) -> None:
    event = gpu.Event()
    assert event.query()
    event.record(gpu.current_stream())
    event.synchronize()
    with sim.hold():
        full(1.0)
        event.record(gpu.current_stream())
        sim.settle()
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_each_thread_has_its_own_current_stream(sim: Simulator) -> None:
    import threading

    side, seen = side_stream(), []
    with gpu.stream(side):
        thread = threading.Thread(target=lambda: seen.append(gpu.current_stream().stream_id))
        thread.start()
        thread.join()
        assert gpu.current_stream() == side
    assert seen == [0]
    assert gpu.current_stream().stream_id == 0


def test_a_stream_that_is_held_for_too_long_goes_on_and_the_device_fails(sim: Simulator) -> None:
    sim.configure(hold_limit_s=0.05)
    with sim.hold():
        full(1.0)
        with pytest.raises(torch.AcceleratorError, match="held for too long"):
            gpu.synchronize()
    sim.repair()


def test_after_a_failed_kernel_nothing_runs_and_every_wait_raises(sim: Simulator) -> None:
    x = full(1.0)
    gpu.synchronize()
    side = side_stream()
    event = gpu.Event()
    sim.fail_next(gpu.current_stream())
    x.fill_(2.0)
    event.record(gpu.current_stream())
    waits = (gpu.synchronize, event.synchronize, side.synchronize, x.sum().item, x.cpu)
    for wait in waits:
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            wait()
    sim.repair()
    assert x.cpu().tolist() == [1.0] * COUNT


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("to_device", [False, True])
def test_only_copies_of_registered_memory_are_asynchronous(sim: Simulator, pinned: bool, to_device: bool) -> None:
    on_device, on_host = full(1.0), torch.full((COUNT,), 2.0)
    on_host = on_host.pin_memory() if pinned else on_host
    assert on_host.is_pinned() == pinned
    gpu.synchronize()
    sim.take_counts()
    if pinned:
        with sim.hold():
            on_device.copy_(on_host, non_blocking=True) if to_device else on_host.copy_(on_device, non_blocking=True)
            assert sim.take_counts().syncs == {}
            on_host.add_(0 if not to_device else 5)  # before the copy
    else:
        on_device.copy_(on_host, non_blocking=True) if to_device else on_host.copy_(on_device, non_blocking=True)
        assert sim.take_counts().syncs_of_training() == {"copy": 1}
    gpu.synchronize()
    assert on_device.cpu()[0] == ((7.0 if pinned else 2.0) if to_device else 1.0)
    assert on_host[0] == ((7.0 if pinned else 2.0) if to_device else 1.0)


@pytest.mark.only_cuda
def test_memory_that_is_unregistered_before_its_copy_runs_is_an_error(sim: Simulator) -> None:
    from ssdtrain_fx.runtime.memory.staging import StagingBuffer

    buffer = StagingBuffer(4096)
    host = buffer.as_bytes(4096)
    cudart = torch.cuda.cudart()
    assert cudart.cudaHostRegister(buffer.address, 4096, 1) == 0
    assert cudart.cudaHostRegister(buffer.address, 4096, 1) == 712
    with sim.hold():
        host.view(torch.float32).copy_(full(1.0), non_blocking=True)
        assert cudart.cudaHostUnregister(buffer.address) == 0
    assert cudart.cudaHostUnregister(buffer.address) == 713
    with pytest.raises(torch.AcceleratorError, match="not registered any more"):
        gpu.synchronize()
    sim.repair()


def test_waits_of_the_host_are_counted(sim: Simulator) -> None:
    x = full(1.0)
    y = (x * 2 + torch.tensor(3.0)).softmax(0)
    assert sim.take_counts().syncs == {}
    y.sum().item()
    y.nonzero()
    gpu.synchronize()
    assert sim.take_counts().syncs_of_training() == {"item": 1, "aten::nonzero": 1, "device": 1}


def test_operators_give_the_bits_of_the_cpu(sim: Simulator) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(8, 64), torch.randn(64, 64), torch.randn(64)

    def step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        w = w.clone().requires_grad_()
        h = torch.nn.functional.layer_norm(torch.addmm(b, x, w.t()), (64,))
        h = torch.nn.functional.gelu(h)[:, ::2] + torch.tensor(0.5, dtype=torch.float64)
        h = torch.cat([h, h.view(4, 2, 32).transpose(0, 1).reshape(8, 32)]).to(torch.bfloat16).float()
        loss = torch.nn.functional.cross_entropy(h, torch.arange(16, device=x.device))
        loss.backward()
        return [loss.detach(), w.grad, h.detach(), h.topk(3).indices, h.std(0), x[x > 0]]  # type: ignore[list-item]

    sim.configure(default_us=100, percent=20)
    for on_cpu, on_device in zip(step(x, w, b), step(x.to(TYPE), w.to(TYPE), b.to(TYPE)), strict=True):
        assert on_device.device.type == TYPE
        assert torch.equal(on_cpu, on_device.cpu())


def test_random_numbers_depend_on_the_order_of_the_host_alone(sim: Simulator) -> None:
    def draw() -> list[torch.Tensor]:
        torch.manual_seed(5)
        x = torch.randn(100, device=TYPE)
        with gpu.stream(side_stream()):
            y = torch.rand(100, device=TYPE)
        drawn = [x, y, torch.nn.functional.dropout(x, 0.5)]
        gpu.synchronize()  # `y` is on another stream than the copies that follow
        return drawn

    first = [x.cpu() for x in draw()]
    sim.configure(default_us=1000)
    assert all(torch.equal(x, y.cpu()) for x, y in zip(first, draw(), strict=True))


def test_two_devices(sim: Simulator) -> None:
    x = full(1.0)
    with pytest.raises(RuntimeError, match=r"same device|cuda:1"):
        x + full(1.0, f"{TYPE}:1")
    with sim.hold():
        x.add_(1)
        y = x.to(f"{TYPE}:1")
        z = y * 2
        sim.settle()
        x.add_(1)
    assert z.device == torch.device(f"{TYPE}:1")
    assert z.cpu().tolist() == [4.0] * COUNT
    assert x.cpu().tolist() == [3.0] * COUNT


def test_too_large_an_allocation_is_out_of_memory(sim: Simulator) -> None:
    sim.limit_memory(1 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 << 20, dtype=torch.uint8, device=TYPE)


def test_the_host_dies_by_name_when_it_reads_device_memory() -> None:
    program = (
        "import faulthandler; faulthandler.enable()\n"
        "import simulated_device, torch, ctypes\n"
        "simulated_device.install()\n"
        "ctypes.string_at(torch.ones(4, device=simulated_device.TYPE).data_ptr(), 4)\n"
    )
    try:
        library = build.build()
    except ArenaUnavailableError as error:
        pytest.skip(f"the simulated device cannot be built: {error}")
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(library), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == -11
    assert "simulated device: the host accessed device memory" in done.stderr
    assert "Segmentation fault" in done.stderr
