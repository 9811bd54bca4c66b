"""Measures the hardware profile that the planner needs: a device and the SSD that holds a directory.

The first run of each measurement is discarded: it uses blocks that were never written and memory that was never
touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ssdtrain_fx.accelerators import device_functions, is_accelerator, reason_to_refuse
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.hardware import Channel, Hardware, convolution_key
from ssdtrain_fx.machine.clocks import clock_of
from ssdtrain_fx.machine.probe_effort import Effort
from ssdtrain_fx.machine.probe_kernels import (
    convolution_rate,
    copy_channels,
    element_rate,
    kernel_seconds,
    memory_rate,
    product_rate,
)
from ssdtrain_fx.machine.probe_transfers import Traffic, channel_of, compute_thread_times, share_when_both_of
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.open_lanes import Parts
from ssdtrain_fx.runtime.memory.staging import PINNED_BUDGET_BYTES
from ssdtrain_fx.runtime.memory.step_memory import step_memory
from ssdtrain_fx.runtime.storage.directory import check_directories

SsdDir = str | Sequence[str] | None
"""One directory, several directories that tensors are striped over, or None for the default."""
OnStep = Callable[[str, int, int], None]
"""Called with the name of the next step, the number of steps before it, and the total number of steps."""


def ignore(description: str, done: int, total: int) -> None:
    return


class FullDiskError(ConfigError):
    """The disk has too little free space for measuring."""


def measure_hardware(
    device: str, ssd_dir: SsdDir, *, quick: bool = False, on_step: OnStep = ignore, cuda: Any = None
) -> Hardware:
    """Measure ``device`` and the SSD that holds ``ssd_dir`` (None: the backend's default).

    The number of torch's threads is not changed.

    Args:
        quick: measure for two or three seconds instead of half a minute, with less certain results.
        on_step: called before each step, and once at the end.

    Raises:
        ConfigError: nothing can be written in ``ssd_dir``, or it has too little room.
    """
    name = device_name(device, cuda)
    target = torch.device(device)
    on_gpu = is_accelerator(target)
    directories = check_directories(ssd_dir)
    effort = Effort(quick=quick, on_gpu=on_gpu)
    _require_room(directories, effort.file_bytes)
    clock = clock_of(target, cuda)
    dtypes = [torch.float32, torch.bfloat16]
    if on_gpu:
        dtypes.append(torch.float16)  # few processors can do more with float16 than convert it
    total = 2 * len(dtypes) + 7

    steps = iter(range(total))

    def begin(description: str) -> None:
        on_step(description, next(steps), total)

    with torch.no_grad():
        begin("memory")
        memory_bytes_per_s = memory_rate(target, clock, effort)
        begin("empty kernel")
        kernel_s = kernel_seconds(target, clock, effort)
        flops_per_s: dict[str, float] = {}
        elements_per_s: dict[str, float] = {}
        for dtype in dtypes:
            dtype_name = str(dtype).removeprefix("torch.")
            begin(f"matrix products, {dtype_name}")
            flops_per_s[dtype_name] = product_rate(target, clock, effort, dtype)
            flops_per_s[convolution_key(dtype_name)] = convolution_rate(target, clock, effort, dtype)
            begin(f"exp, tanh, erf, {dtype_name}")
            elements_per_s[dtype_name] = element_rate(target, clock, effort, dtype, memory_bytes_per_s)
        # The tensors of a step come from its arena. Pinning their huge pages costs less than pinning pages of the heap.
        # What is kept in memory would be measured as well. `_require_room` has found twice the room that is needed.
        config = EngineConfig(ssd_dir=directories, disk_reserve_bytes=0)
        with Engine(config, Parts(cuda=cuda or torch.cuda)) as engine, step_memory.inside():
            traffic = Traffic(engine, target)
            begin("blocks of the file")
            traffic.write_s(effort.large_bytes, 2 * effort.large_count)
            begin("writes")
            write = channel_of(lambda size, count: traffic.write_s(size, count), effort)
            begin("reads")
            read = channel_of(lambda size, count: traffic.read_s(size, count), effort)
            begin("writes during reads")
            share_when_both = share_when_both_of(traffic, effort)
            begin("time on the compute thread")
            times = compute_thread_times(traffic, effort, write, read)
            staging_bytes = engine.planned_staging_bytes(target.type)
    copy_out, copy_in = times.offload, times.reload
    if on_gpu:
        copy_out, copy_in = copy_channels(target, clock, effort)
    on_step("done", total, total)
    return Hardware(
        device=name,
        flops_per_s=flops_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        elements_per_s=elements_per_s,
        kernel_s=kernel_s,
        write=write,
        read=read,
        share_when_both=share_when_both,
        copy_out=Channel(bytes_per_s=copy_out.bytes_per_s),
        copy_in=Channel(bytes_per_s=copy_in.bytes_per_s),
        copies_block_compute=not on_gpu,
        offload_s=times.offload.latency_s,
        reload_s=times.reload.latency_s,
        next_offload_s=times.next_offload_s,
        next_reload_s=times.next_reload_s,
        staging_bytes=staging_bytes,
    )


def assumed_hardware(name: str, *, on_gpu: bool) -> Hardware:
    """A profile for when measuring is impossible. All guesses: a slow drive, and a mid-range processor or GPU."""
    drive, copies = Channel(bytes_per_s=2e9, latency_s=2e-4), Channel(bytes_per_s=1e10)
    return Hardware(
        device=name,
        flops_per_s={"float32": 3e13 if on_gpu else 3e11},
        memory_bytes_per_s=1e12 if on_gpu else 2e10,
        elements_per_s={"float32": 1e11 if on_gpu else 1e9},
        kernel_s=5e-6,
        write=drive,
        read=drive,
        share_when_both=0.5,
        copy_out=copies,
        copy_in=copies,
        copies_block_compute=not on_gpu,
        offload_s=5e-5,
        reload_s=5e-5,
        staging_bytes=PINNED_BUDGET_BYTES if on_gpu else 0,
    )


def device_name(device: str, functions: Any = None) -> str:
    """``cpu``, or the name of the accelerator. ``functions`` replaces those of the device.

    Raises:
        ConfigError: there is no such device.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return "cpu"
    refused = reason_to_refuse(kind)
    if refused:
        raise ConfigError(f"ssdtrain_fx cannot offload from {device!r}: {refused}.")
    functions = functions or device_functions(kind)
    if not functions.is_available():
        found = kind.upper() if kind == "cuda" else kind
        raise ConfigError(
            f"The device is {device!r}, but torch sees no {found} device. Use 'cpu', or repair the driver."
        )
    return str(functions.get_device_name(torch.device(device)))


def _require_room(directories: Sequence[str], size_bytes: int) -> None:
    """Require room for measuring with ``size_bytes`` in all, of which each directory takes an equal share."""
    needed_bytes = 2 * size_bytes // len(directories)
    for directory in directories:
        status = os.statvfs(directory)
        free_bytes = status.f_bavail * status.f_frsize
        if free_bytes < needed_bytes:
            raise FullDiskError(
                f"{directory!r} has {free_bytes >> 20} MiB left; measuring needs {needed_bytes >> 20} MiB. "
                "Make room, or set ssd_dir to another directory."
            )
