"""Rates of a device: memory, matrix products, convolutions, expensive functions, and an empty kernel.

The shortest run of a kernel counts, because a disturbance can only add time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ssdtrain_fx.accelerators import is_accelerator
from ssdtrain_fx.hardware import Channel
from ssdtrain_fx.machine.clocks import Clock
from ssdtrain_fx.machine.probe_effort import MIB, Effort

BUSY_KERNEL_S = 1e-3
"""Time of an empty CPU kernel on a busy machine: a hundred times the usual time. Then threads wait for a processor, and
no measurement is worth keeping."""


def shortest_s(clock: Clock, call: Callable[[], object], effort: Effort) -> float:
    """The shortest of many runs. On a busy machine, some are undisturbed if each takes only a millisecond."""
    call()
    shortest_s, runs = clock.seconds(call), 1
    end_s = time.perf_counter() + effort.kernel_budget_s
    while runs < effort.kernel_repeats or time.perf_counter() < end_s:
        shortest_s, runs = min(shortest_s, clock.seconds(call)), runs + 1
    return shortest_s


def memory_rate(device: torch.device, clock: Clock, effort: Effort) -> float:
    count = effort.stream_bytes // 4
    x, y, out = (torch.ones(count, device=device) for _ in range(3))
    return 3 * effort.stream_bytes / shortest_s(clock, lambda: torch.add(x, y, out=out), effort)


def kernel_seconds(device: torch.device, clock: Clock, effort: Effort) -> float:
    """Time of an almost empty kernel. On the CPU, it is the smallest op that wakes all threads."""
    x = torch.ones(1 << 16, device=device)
    return shortest_s(clock, lambda: x.add_(1), effort)


LONG_ENOUGH_S = 1e-3
"""Run time at which a kernel shows its rate: longer than its launch, but short enough to run undisturbed at times."""


def product_rate(device: torch.device, clock: Clock, effort: Effort, dtype: torch.dtype) -> float:
    """FLOP/s of a product of square matrices. They grow until it takes long enough: some processors emulate a dtype."""
    size = 128
    while True:
        x, y = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(x)

        def product(x: Tensor = x, y: Tensor = y, out: Tensor = out) -> Tensor:
            return torch.mm(x, y, out=out)

        seconds = shortest_s(clock, product, effort)
        if seconds >= LONG_ENOUGH_S or size >= 8192:
            return 2 * size**3 / seconds
        size *= 2


def convolution_rate(device: torch.device, clock: Clock, effort: Effort, dtype: torch.dtype) -> float:
    """FLOP/s of a 3x3 convolution, whose batch grows until it takes long enough.

    The layout is channels last, which Inductor changes to.
    """
    channels, side, batch = 128, 32, 1
    last = torch.channels_last
    weight = torch.ones(channels, channels, 3, 3, device=device, dtype=dtype).to(memory_format=last)
    while True:
        x = torch.ones(batch, channels, side, side, device=device, dtype=dtype).to(memory_format=last)

        def convolve(x: Tensor = x) -> Tensor:
            return torch.conv2d(x, weight, padding=1)

        seconds = shortest_s(clock, convolve, effort)
        if seconds >= LONG_ENOUGH_S or batch >= 2048:
            return 2 * batch * side * side * channels * channels * 9 / seconds
        batch *= 4


def element_rate(
    device: torch.device, clock: Clock, effort: Effort, dtype: torch.dtype, memory_bytes_per_s: float
) -> float:
    """Elements per second of expensive functions.

    On a GPU, the time of reading and writing is subtracted, because it is most of the total. On the CPU, one thread is
    measured, with as many elements as torch gives to one thread, and multiplied by the number of threads: nothing
    scales better. Functions that torch leaves to MKL are not used: Inductor uses torch's vector classes, as these do.
    """
    on_gpu = is_accelerator(device)
    count, threads = (1 << 25, 1) if on_gpu else (1 << 15, torch.get_num_threads())
    x = torch.rand(count, device=device, dtype=torch.float32).to(dtype)
    out = torch.empty_like(x)
    rates: list[float] = []
    functions: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.sigmoid(x, out=out),
        lambda: F.gelu(x, approximate="tanh"),
        lambda: F.gelu(x),
    )
    for function in functions:
        seconds = shortest_s(clock, function, effort)
        moving_s = 2 * x.nbytes / memory_bytes_per_s if on_gpu else 0.0
        rates.append(threads * count / max(seconds - moving_s, seconds / 8))
    return statistics.geometric_mean(rates)


def copy_channels(device: torch.device, clock: Clock, effort: Effort) -> tuple[Channel, Channel]:
    """Copies from the device to pinned memory, and back."""
    count = 64 * MIB
    host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(count, dtype=torch.uint8, device=device)
    out_s = shortest_s(clock, lambda: host.copy_(there, non_blocking=True), effort)
    in_s = shortest_s(clock, lambda: there.copy_(host, non_blocking=True), effort)
    return Channel(bytes_per_s=count / out_s), Channel(bytes_per_s=count / in_s)
