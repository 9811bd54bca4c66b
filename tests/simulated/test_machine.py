"""What is asked of a device besides copies: its memory, its name, its clock and its random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from device_under_test import DEVICE, TYPE, gpu

from ssdtrain_fx.accelerators import device_functions
from ssdtrain_fx.machine.call_runner import run_calls
from ssdtrain_fx.machine.clocks import clock_of
from ssdtrain_fx.machine.probe_hardware import device_name
from ssdtrain_fx.memory_limit import read_device_memory
from ssdtrain_fx.passes.analysis.node_calls import Call, TensorLayout

if TYPE_CHECKING:
    from simulated_device import Simulator

MIB = 1 << 20


def test_the_memory_of_a_device(sim: Simulator) -> None:
    sim.limit_memory(64 * MIB)
    before = read_device_memory(DEVICE)
    x = torch.empty(8 * MIB, dtype=torch.uint8, device=TYPE)
    limit = read_device_memory(DEVICE)
    assert limit.limit_bytes == 64 * MIB
    assert limit.used_bytes - before.used_bytes == x.nbytes
    functions = device_functions(TYPE)
    assert functions.max_memory_allocated() >= functions.memory_allocated() >= x.nbytes
    del x
    functions.reset_peak_memory_stats()
    assert functions.max_memory_allocated() == functions.memory_allocated()


def test_the_name_of_a_device(sim: Simulator) -> None:
    name = device_name(f"{TYPE}:0")
    assert name == str(gpu.get_device_name(DEVICE)) != ""


def test_the_clock_of_a_device_leaves_out_what_was_enqueued_before(sim: Simulator) -> None:
    clock = clock_of(DEVICE)
    x = torch.ones(64, device=TYPE)
    sim.configure(default_us=2000)
    for _ in range(50):
        x += 1
    sim.configure()
    assert 0 < clock.seconds(lambda: x.add_(1)) < 10
    with pytest.raises(RuntimeError, match="must be a matrix"):
        clock.seconds(lambda: x.mm(x))


def test_calls_are_timed_on_a_device_and_its_random_numbers_go_on_as_before(sim: Simulator) -> None:
    torch.manual_seed(3)
    gpu.manual_seed(3)
    expected = torch.rand(8, device=TYPE).cpu()
    gpu.manual_seed(3)
    layout = TensorLayout(torch.float32, DEVICE, (64,), (1,))
    calls = [
        Call(torch.ops.aten.native_dropout.default, (layout, 0.5, True), {}, DEVICE),
        Call(torch.ops.aten.mm.default, (layout, layout), {}, DEVICE),
    ]
    dropout_s, failed = run_calls(calls)
    assert isinstance(dropout_s, float), dropout_s
    assert 0 < dropout_s < 10
    assert isinstance(failed, str)
    assert torch.rand(8, device=TYPE).cpu().equal(expected)
