"""Measure what the four ops cost the computing thread, without the copies, which other threads do.

    python benchmarks/ops.py --ssd-dir /mnt/nvme --count 500 --json ops.json
    python benchmarks/ops.py --ssd-dir /mnt/nvme --model gpt2

Each tensor is offloaded and reloaded by the functions that Inductor's code calls. Before every call, the thread
multiplies matrices until the engine is idle, so that `release` and `wait` do not have to wait. It does not sleep,
because a processor that was idle starts slowly. The remaining cost is Python, the system calls that submit requests,
allocating the reloaded tensor, locks, and waking an I/O thread.

`CPU` is the processor time of the thread for all four ops. The rest of `all four` is spent waiting for a processor or
for the interpreter lock, which the woken thread takes when an op returns. `kernel` is the part spent in the system
calls that submit the requests to the disk: one write and one read. With `--io posix`, I/O threads make these calls, and
a tensor wakes one of them twice; the cost of a wake-up is printed below the table.

The target is less than 30 us per tensor. Run this on an idle machine: with more processes than cores, caches are cold.

With ``--model``, the ops of real training steps are timed. There an op follows matrix products that take many
milliseconds, and its code and its data are no longer cached, so that it takes many times as long. This is why plans put
ops in rows, of which only the first one takes long, so the mean and the median differ. The figures do not include the
time for which `release` and `wait` wait for the disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ssdtrain_fx.runtime import ops
from ssdtrain_fx.runtime.config import EngineConfig, IOPath
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.engines import Engines
from ssdtrain_fx.runtime.lanes.aio.kernel import KernelAio
from ssdtrain_fx.runtime.lanes.open_lanes import Parts
from ssdtrain_fx.runtime.storage.directory import check_directories
from ssdtrain_fx.studies import zoo

OPS = ("offload", "release", "reload", "wait")
TARGET_S = 30e-6
WARM_UP = 20
WARM_UP_STEPS = 3
"""The first step compiles. From the third step on, the addresses of tensors no longer change."""
PRODUCTS_BEFORE_SLEEP = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The times of one tensor: ``seconds`` per op, in the order of ``OPS``, the others for all ops together."""

    seconds: tuple[float, ...]
    cpu_s: float
    kernel_s: float

    @property
    def total_s(self) -> float:
        return sum(self.seconds)


class TimedAio(KernelAio):
    """Adds up the time that it takes to submit requests."""

    submit_s = 0.0

    def submit(self, opcode: int, descriptor: int, address: int, length: int, offset: int, cookie: int) -> bool:
        start_s = time.perf_counter()
        try:
            return super().submit(opcode, descriptor, address, length, offset, cookie)
        finally:
            TimedAio.submit_s += time.perf_counter() - start_s


def open_timed_engine(config: EngineConfig, handles: Iterator[int]) -> Engine:
    return Engine(config, Parts(open_aio=None if config.io == "posix" else TimedAio), handles=handles)


def measure(config: EngineConfig, size_bytes: int, count: int) -> list[Sample]:
    """Return one sample per tensor. Raises OSError or ConfigError when the directory cannot be used."""
    argument = config.to_argument()
    engine = ops._engines.open(argument)
    x = torch.empty(size_bytes // 4).uniform_()
    size, stride = list(x.size()), list(x.stride())
    a, b = torch.randn(128, 128), torch.empty(128, 128)

    def timed(op: Callable[..., Any], *arguments: object) -> tuple[Any, float, float]:
        torch.mm(a, a, out=b)
        while engine.statistics().in_flight_bytes:  # statistics() also drives native AIO
            torch.mm(a, a, out=b)
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        result = op(*arguments)
        return result, time.perf_counter() - start_s, time.thread_time() - start_cpu_s

    samples: list[Sample] = []
    for _ in range(WARM_UP + count):
        TimedAio.submit_s = 0.0
        owner, *of_offload = timed(ops.offload, x, stride, f"name=benchmark|{argument}")
        token, *of_release = timed(ops.release, owner, x)
        del owner
        reloading, *of_reload = timed(ops.reload, token, size, stride)
        y, *of_wait = timed(ops.wait, reloading)
        seconds, cpu_s = zip(of_offload, of_release, of_reload, of_wait, strict=True)
        samples.append(Sample(seconds, sum(cpu_s), TimedAio.submit_s))
        del token, reloading, y
    return samples[WARM_UP:]


class StepTimer:
    """Replaces the four functions that compiled code calls, and times them."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.calls: dict[str, list[tuple[float, float]]] = {name: [] for name in OPS}
        """Seconds of each call without waiting for the disk, and the part of them spent in the kernel."""
        for name in OPS:
            setattr(ops, name, self._timed(name, getattr(ops, name)))

    def open_engine(self, config: EngineConfig, handles: Iterator[int]) -> Engine:
        self.engines.append(open_timed_engine(config, handles))
        return self.engines[-1]

    def _stalled_s(self) -> float:
        counters = [engine._ledger.counters for engine in self.engines]
        return sum(counter.release_stall_s + counter.wait_stall_s for counter in counters)

    def _timed(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: object, **keywords: object) -> Any:
            stalled_s, kernel_s, start_s = self._stalled_s(), TimedAio.submit_s, time.perf_counter()
            result = op(*arguments, **keywords)
            seconds = time.perf_counter() - start_s
            self.calls[name].append((seconds - self._stalled_s() + stalled_s, TimedAio.submit_s - kernel_s))
            return result

        return timed


def measure_steps(size: Mapping[str, Any], options: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Train a model and time its ops: the mean and the median per call, and the share of the step that all ops take."""
    timer = StepTimer()
    ops._engines = Engines(timer.open_engine)
    torch.manual_seed(0)
    module, make_batch = zoo.build(**size)
    compiled = torch.compile(module, backend="ssdtrain", options=dict(options))
    generator = torch.Generator().manual_seed(0)
    step_s: list[float] = []
    for step in range(WARM_UP_STEPS + steps):
        if step == WARM_UP_STEPS:
            for calls in timer.calls.values():
                calls.clear()
        start_s = time.perf_counter()
        compiled(*make_batch(generator)).backward()
        module.zero_grad()
        step_s.append(time.perf_counter() - start_s)
    row: dict[str, Any] = {"tensors": len(timer.calls["offload"]) / steps}
    for what, average in (("us", statistics.fmean), ("median_us", statistics.median)):
        for name, calls in timer.calls.items():
            row[f"{name}_{what}"] = average(seconds for seconds, _ in calls) * 1e6 if calls else 0.0
        row[f"total_{what}"] = sum(row[f"{name}_{what}"] for name in OPS)
        kernel_s = (average(seconds for _, seconds in calls) for calls in timer.calls.values() if calls)
        row[f"kernel_{what}"] = sum(kernel_s) * 1e6
    ops_s = sum(seconds for calls in timer.calls.values() for seconds, _ in calls)
    row["step_share"] = ops_s / sum(step_s[WARM_UP_STEPS:])
    return row


def time_to_wake(count: int) -> float:
    """Median seconds that a computing thread takes to wake a sleeping thread."""
    a, b = torch.randn(128, 128), torch.empty(128, 128)
    bell, is_awake = threading.Lock(), threading.Lock()
    bell.acquire()
    is_awake.acquire()

    def sleep_and_wake() -> None:
        for _ in range(count):
            bell.acquire()
            is_awake.release()

    thread = threading.Thread(target=sleep_and_wake, daemon=True)
    thread.start()
    seconds: list[float] = []
    for _ in range(count):
        for _ in range(PRODUCTS_BEFORE_SLEEP):
            torch.mm(a, a, out=b)  # releases the GIL, so that the other thread can go to sleep
        start_s = time.perf_counter()
        bell.release()
        seconds.append(time.perf_counter() - start_s)
        is_awake.acquire()
    thread.join()
    return statistics.median(seconds)


def summarise(samples: list[Sample], size_bytes: int) -> dict[str, Any]:
    """Return medians over the tensors."""
    row: dict[str, Any] = {"size_mib": size_bytes / (1 << 20)}
    for index, name in enumerate(OPS):
        row[f"{name}_us"] = statistics.median(sample.seconds[index] for sample in samples) * 1e6
    row["total_us"] = statistics.median(sample.total_s for sample in samples) * 1e6
    row["cpu_us"] = statistics.median(sample.cpu_s for sample in samples) * 1e6
    row["kernel_us"] = statistics.median(sample.kernel_s for sample in samples) * 1e6
    return row


def render(rows: list[dict[str, Any]]) -> Table:
    table = Table("MiB", *OPS, "all four", "CPU", "kernel", title="Median µs per tensor on the computing thread")
    for row in rows:
        figures = (row[f"{name}_us"] for name in (*OPS, "total", "cpu", "kernel"))
        table.add_row(f"{row['size_mib']:g}", *(f"{figure:.1f}" for figure in figures))
    return table


def render_steps(row: dict[str, Any]) -> Table:
    table = Table("", *OPS, "all four", "kernel", "of the step", title="µs per call in training steps")
    for label, what, share in (("mean", "us", f"{row['step_share']:.2%}"), ("median", "median_us", "")):
        figures = (row[f"{name}_{what}"] for name in (*OPS, "total", "kernel"))
        table.add_row(label, *(f"{figure:.0f}" for figure in figures), share)
    return table


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time of the four ops on the computing thread.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ssd-dir", help="directory on the SSD")
    parser.add_argument("--io", choices=("auto", "posix", "aio"), default="auto")
    parser.add_argument("--count", type=int, default=300, help="tensors of each kind")
    parser.add_argument("--model", choices=list(zoo.MODELS), help="time the ops in training steps of this model")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--max-slowdown", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=10, help="timed training steps")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    chosen = parser.parse_args(arguments)
    if chosen.count < 1 or chosen.steps < 1:
        parser.error("--count and --steps must be at least 1.")
    try:
        chosen.ssd_dir = check_directories(chosen.ssd_dir)[0]
    except ValueError as error:
        parser.error(str(error))
    return chosen


def main(arguments: list[str]) -> int:
    chosen = parse_arguments(arguments)
    console = Console()
    results = run_steps(chosen, console) if chosen.model else run_tensors(chosen, console)
    if chosen.json is not None:
        written = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": {"cores": os.cpu_count(), "kernel": platform.release()},
            "torch": torch.__version__,
            "io_path": ops.statistics().io_path,
            **results,
        }
        chosen.json.write_text(json.dumps(written, indent=2) + "\n")
    ops.close()
    return 0


def run_tensors(chosen: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Time single tensors, one after another."""
    io: IOPath = chosen.io
    torch.set_num_threads(1)  # else the synchronisation of torch's threads after every product is measured
    ops._engines = Engines(open_timed_engine)
    config = EngineConfig(ssd_dir=chosen.ssd_dir, io=io)
    rows = [
        summarise(measure(config, size_bytes, chosen.count), size_bytes) for size_bytes in (1 << 20, 2 << 20, 8 << 20)
    ]
    console.print(render(rows))
    worst_us = max(row["total_us"] for row in rows)
    wake_us = time_to_wake(chosen.count) * 1e6
    console.print(f"Waking a thread takes {wake_us:.1f} µs.", highlight=False)
    console.print(f"Target: below {TARGET_S * 1e6:g} µs; the largest is {worst_us:.1f} µs.", highlight=False)
    return {"count": chosen.count, "wake_us": wake_us, "results": rows}


def run_steps(chosen: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Time the ops in training steps of a model."""
    size = {name: getattr(chosen, name) for name in ("layers", "hidden", "batch", "sequence", "vocab")}
    options = {"max_slowdown": chosen.max_slowdown, "io": chosen.io, "ssd_dir": chosen.ssd_dir}
    row = measure_steps({"name": chosen.model, **size}, options, chosen.steps)
    console.print(render_steps(row))
    console.print(f"{row['tensors']:g} tensors per step.", highlight=False)
    return {"model": chosen.model, **size, **options, "steps": chosen.steps, "results": [row]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
