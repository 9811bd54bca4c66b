"""Measures a machine: what the planner must know about a device and about the SSD behind a directory.

    hardware = load_hardware("cpu", None)                # measured once per machine and path, then read from a file
    hardware = measure_hardware("cpu", "/mnt/nvme0")     # under a minute

The SSD is measured through a real ``Engine``, because the rate that counts is the one the engine reaches. The first run
of everything is thrown away: it meets blocks that were never written and memory that was never touched. Of the others a
kernel counts with its shortest, since what disturbs a kernel can only add time, and a transfer with the median, since a
drive has good and bad moments of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssdtrain_fx.clocks import Clock, clock_of
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.hardware import Channel, Hardware, convolution_key
from ssdtrain_fx.profile_store import profile_key, profile_path, read_profile, store_profile
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.directory import check_directories
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.staging import CPU_BUDGET_BYTES, CUDA_BUDGET_BYTES

log = logging.getLogger(__name__)

MIB = 1 << 20
SsdDir = str | Sequence[str] | None
"""A directory, several that tensors are striped over, or None for the default."""
OnStep = Callable[[str, int, int], None]
"""Called with what is measured next, the number of steps before it, and the number of all steps."""


def _ignore(description: str, done: int, total: int) -> None:
    return


# -- profiles that are kept --------------------------------------------------------------------------------------------

BUSY_KERNEL_S = 1e-3
"""A hundred times what it takes. Then the threads of a kernel wait for a processor, and no figure is worth keeping."""

MAX_PROBES = 3
"""How often a machine that was disturbed is measured again."""

_known: dict[str, Hardware] = {}
_known_lock = threading.Lock()


def load_hardware(device: str, ssd_dir: SsdDir, *, measure: bool = True) -> Hardware:
    """The profile of ``device`` ("cpu", "cuda" or "cuda:1") and of the file systems that hold ``ssd_dir``.

    Read from the user's profiles; measured within seconds and stored when there is none. A process that has asked once
    gets the same answer ever after, whatever happens to the file.

    Raises:
        ConfigError: nothing can be written in ``ssd_dir``, or nothing is stored and ``measure`` is False.
    """
    directories = check_directories(ssd_dir)
    key = profile_key(_device_name(device), directories)
    identity = str(profile_path(key))
    with _known_lock:
        hardware = _known.get(identity)
        if hardware is None:
            hardware = read_profile(key)
        if hardware is None:
            if not measure:
                raise ConfigError(
                    f"No hardware profile of {key.device} and {', '.join(map(repr, directories))} is stored in "
                    f"{profile_path(key).parent}. "
                    "Run `ssdtrain-fx probe` first."
                )
            log.info(
                "measuring %s and the SSD behind %s; `ssdtrain-fx probe` measures longer",
                key.device,
                ", ".join(directories),
            )
            try:
                hardware = measure_hardware(device, directories, quick=True)
            except FullDiskError as error:  # no reason to stop training: what cannot be written stays in memory
                log.warning("%s Until then plans are made for a drive of 2 GB/s.", error)
                return _assumed_hardware(_device_name(device), on_gpu=torch.device(device).type == "cuda")
            disturbance = _find_disturbance(hardware)
            if disturbance:
                log.warning(
                    "%s: the machine is busy, or torch has more threads than cores. This hardware profile is not kept. "
                    "`ssdtrain-fx probe` measures longer and keeps what it finds.",
                    disturbance,
                )
                _known[identity] = hardware
                return hardware
            try:
                hardware = store_profile(key, hardware, replace=False)
            except OSError as error:
                log.warning(
                    "The hardware profile cannot be stored in %s (%s): every process will measure again.",
                    profile_path(key).parent,
                    error,
                )
        _known[identity] = hardware
    return hardware


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeResult:
    """A profile, what it is of, and where it is kept."""

    hardware: Hardware
    directories: tuple[str, ...]
    path: Path


def probe_and_store(device: str, ssd_dir: SsdDir, *, quick: bool = False, on_step: OnStep = _ignore) -> ProbeResult:
    """Measure, and replace what is stored. A process that has loaded a profile already goes on with that one.

    Raises:
        ConfigError: nothing can be written in ``ssd_dir``, or it has too little room.
        OSError: the profile cannot be stored.
    """
    directories = check_directories(ssd_dir)
    key = profile_key(_device_name(device), directories)
    path = profile_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)  # rather fail now than in half a minute
    hardware = measure_hardware(device, directories, quick=quick, on_step=on_step)
    for _ in range(MAX_PROBES - 1):
        disturbance = _find_disturbance(hardware)
        if not disturbance:
            break
        log.warning("%s: the machine is busy, or torch has more threads than cores. It is measured again.", disturbance)
        hardware = measure_hardware(device, directories, quick=quick, on_step=on_step)
    return ProbeResult(store_profile(key, hardware, replace=True), directories, path)


def _find_disturbance(hardware: Hardware) -> str:
    """What no undisturbed machine does; empty where there is nothing of that kind."""
    if hardware.kernel_s > BUSY_KERNEL_S:
        return f"An empty kernel takes {hardware.kernel_s * 1e3:.1f} ms"
    product = hardware.flops_per_s["float32"]
    if product < hardware.memory_bytes_per_s:  # every processor multiplies faster than it fetches from memory
        return f"A matrix product runs at {product / 1e9:.1f} GFLOP/s"
    return ""


def _device_name(device: str, cuda: Any = torch.cuda) -> str:
    """``cpu``, or the name of the GPU.

    Raises:
        ConfigError: there is no such device.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return "cpu"
    if kind != "cuda":
        raise ConfigError(f"ssdtrain_fx offloads tensors on cpu and cuda devices; got {device!r}.")
    if not cuda.is_available():
        raise ConfigError(f"The device is {device!r}, but torch sees no CUDA device. Use 'cpu', or repair the driver.")
    return str(cuda.get_device_name(torch.device(device)))


# -- measuring ---------------------------------------------------------------------------------------------------------


class FullDiskError(ConfigError):
    """There is too little room to measure."""


def _assumed_hardware(name: str, *, on_gpu: bool) -> Hardware:
    """For where nothing can be measured. Guesses all: a slow drive, and a processor or GPU of the middle."""
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
        staging_bytes=CUDA_BUDGET_BYTES if on_gpu else CPU_BUDGET_BYTES,
    )


class _Effort:
    """How much is done: seconds in total when ``quick``, below a minute otherwise."""

    def __init__(self, *, quick: bool, on_gpu: bool) -> None:
        self.kernel_repeats = 5 if quick else 15
        self.kernel_budget_s = 0.04 if quick else 0.5
        """One kind of kernel is repeated for at least this long."""
        self.stream_bytes = (256 if on_gpu else 64) * MIB * (1 if quick else 2)
        """Per operand: three of them are more than most caches hold."""
        self.small_bytes = 1 * MIB
        self.large_bytes = 8 * MIB
        self.small_count = 16 if quick else 64
        self.large_count = 4 if quick else 24
        """Transfers in a row: 32 MiB or 192 MiB."""
        self.transfer_repeats = 3 if quick else 7

    @property
    def file_bytes(self) -> int:
        """Room that the SSD must have: one set of transfers goes out while another one comes back."""
        return 2 * max(self.small_count * self.small_bytes, self.large_count * self.large_bytes)


def measure_hardware(
    device: str, ssd_dir: SsdDir, *, quick: bool = False, on_step: OnStep = _ignore, cuda: Any = torch.cuda
) -> Hardware:
    """Measure ``device`` and the SSD behind ``ssd_dir`` (None: the default of the backend). Torch's threads are kept.

    Args:
        quick: two or three seconds instead of half a minute, and less certain figures.
        on_step: told what comes next.

    Raises:
        ConfigError: nothing can be written in ``ssd_dir``, or it has too little room.
    """
    name = _device_name(device, cuda)
    target = torch.device(device)
    on_gpu = target.type == "cuda"
    directories = check_directories(ssd_dir)
    effort = _Effort(quick=quick, on_gpu=on_gpu)
    _require_room(directories, effort.file_bytes)
    clock = clock_of(target, cuda)
    dtypes = [torch.float32, torch.bfloat16]
    if on_gpu:
        dtypes.append(torch.float16)  # few processors can do more with it than convert it
    total = 2 * len(dtypes) + 7

    steps = iter(range(total))

    def begin(description: str) -> None:
        on_step(description, next(steps), total)

    with torch.no_grad():
        begin("memory")
        memory_bytes_per_s = _memory_rate(target, clock, effort)
        begin("empty kernel")
        kernel_s = _kernel_seconds(target, clock, effort)
        flops_per_s: dict[str, float] = {}
        elements_per_s: dict[str, float] = {}
        for dtype in dtypes:
            dtype_name = str(dtype).removeprefix("torch.")
            begin(f"matrix products, {dtype_name}")
            flops_per_s[dtype_name] = _product_rate(target, clock, effort, dtype)
            flops_per_s[convolution_key(dtype_name)] = _convolution_rate(target, clock, effort, dtype)
            begin(f"exp, tanh, erf, {dtype_name}")
            elements_per_s[dtype_name] = _element_rate(target, clock, effort, dtype, memory_bytes_per_s)
        with Engine(EngineConfig(ssd_dir=directories), cuda=cuda) as engine:
            traffic = _Traffic(engine, target)
            begin("blocks of the file")
            traffic.write_s(effort.large_bytes, 2 * effort.large_count)
            begin("writes")
            write = _channel(lambda size, count: traffic.write_s(size, count), effort)
            begin("reads")
            read = _channel(lambda size, count: traffic.read_s(size, count), effort)
            begin("writes beside reads")
            share_when_both = _share_when_both(traffic, effort)
            begin("time on the compute thread")
            offload, reload = _compute_thread_channels(traffic, effort, write, read)
    copy_out, copy_in = offload, reload
    if on_gpu:
        copy_out, copy_in = _copy_channels(target, clock, effort)
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
        offload_s=offload.latency_s,
        reload_s=reload.latency_s,
        staging_bytes=(CUDA_BUDGET_BYTES if on_gpu else CPU_BUDGET_BYTES) * len(directories),
    )


def _require_room(directories: Sequence[str], size_bytes: int) -> None:
    """Each directory takes an equal share of ``size_bytes``."""
    needed_bytes = 2 * size_bytes // len(directories)
    for directory in directories:
        status = os.statvfs(directory)
        free_bytes = status.f_bavail * status.f_frsize
        if free_bytes < needed_bytes:
            raise FullDiskError(
                f"{directory!r} has {free_bytes >> 20} MiB left; measuring needs {needed_bytes >> 20} MiB. "
                "Make room, or set ssd_dir to another directory."
            )


def _shortest_s(clock: Clock, call: Callable[[], object], effort: _Effort) -> float:
    """The shortest of many runs: on a busy machine some run undisturbed as long as each takes only a millisecond."""
    call()
    shortest_s, runs = clock.seconds(call), 1
    end_s = time.perf_counter() + effort.kernel_budget_s
    while runs < effort.kernel_repeats or time.perf_counter() < end_s:
        shortest_s, runs = min(shortest_s, clock.seconds(call)), runs + 1
    return shortest_s


def _memory_rate(device: torch.device, clock: Clock, effort: _Effort) -> float:
    count = effort.stream_bytes // 4
    x, y, out = (torch.ones(count, device=device) for _ in range(3))
    return 3 * effort.stream_bytes / _shortest_s(clock, lambda: torch.add(x, y, out=out), effort)


def _kernel_seconds(device: torch.device, clock: Clock, effort: _Effort) -> float:
    """On the CPU the smallest op that wakes all threads."""
    x = torch.ones(1 << 16, device=device)
    return _shortest_s(clock, lambda: x.add_(1), effort)


LONG_ENOUGH_S = 1e-3
"""For a kernel to show its rate: longer than starting it takes, and shorter than other processes leave it alone."""


def _product_rate(device: torch.device, clock: Clock, effort: _Effort, dtype: torch.dtype) -> float:
    """Square matrices that grow until one product takes long enough: some processors emulate a dtype."""
    size = 128
    while True:
        x, y = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(x)

        def product(x: Tensor = x, y: Tensor = y, out: Tensor = out) -> Tensor:
            return torch.mm(x, y, out=out)

        seconds = _shortest_s(clock, product, effort)
        if seconds >= LONG_ENOUGH_S or size >= 8192:
            return 2 * size**3 / seconds
        size *= 2


def _convolution_rate(device: torch.device, clock: Clock, effort: _Effort, dtype: torch.dtype) -> float:
    """3x3 over a batch of images that grows until it takes long enough; channels last, which Inductor changes to."""
    channels, side, batch = 128, 32, 1
    last = torch.channels_last
    weight = torch.ones(channels, channels, 3, 3, device=device, dtype=dtype).to(memory_format=last)
    while True:
        x = torch.ones(batch, channels, side, side, device=device, dtype=dtype).to(memory_format=last)

        def convolve(x: Tensor = x) -> Tensor:
            return torch.conv2d(x, weight, padding=1)

        seconds = _shortest_s(clock, convolve, effort)
        if seconds >= LONG_ENOUGH_S or batch >= 2048:
            return 2 * batch * side * side * channels * channels * 9 / seconds
        batch *= 4


def _element_rate(
    device: torch.device, clock: Clock, effort: _Effort, dtype: torch.dtype, memory_bytes_per_s: float
) -> float:
    """On a GPU without the time of reading and writing, which is most of it there.

    On the CPU one thread is measured, with as many elements as torch gives to one: nothing scales better with threads.
    And none of the functions may be one that torch leaves to MKL: Inductor uses torch's vector classes, as these do.
    """
    on_gpu = device.type == "cuda"
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
        seconds = _shortest_s(clock, function, effort)
        moving_s = 2 * x.nbytes / memory_bytes_per_s if on_gpu else 0.0
        rates.append(threads * count / max(seconds - moving_s, seconds / 8))
    return statistics.geometric_mean(rates)


# -- transfers ---------------------------------------------------------------------------------------------------------


class _Traffic:
    """Sets of transfers through one engine, as the ops of a training step call it."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.device = device

    def tensors(self, size_bytes: int, count: int) -> list[Tensor]:
        """Random bytes: some drives compress."""
        x = torch.empty(size_bytes // 8, dtype=torch.int64, device=self.device).random_()
        return [x.clone() for _ in range(count)]

    def write_s(self, size_bytes: int, count: int) -> float:
        """Until all bytes are in the file."""
        tensors = self.tensors(size_bytes, count)
        self.settle()
        start_s = time.perf_counter()
        tokens = self.offload(tensors)
        self.engine.wait_until_idle()
        seconds = time.perf_counter() - start_s
        del tokens
        return seconds

    def read_s(self, size_bytes: int, count: int) -> float:
        """Until all bytes are back."""
        tensors = self.tensors(size_bytes, count)
        like = tensors[0]
        tokens = self.offload(tensors)
        tensors.clear()
        self.settle()
        start_s = time.perf_counter()
        self.wait(self.reload(tokens, like), tokens)
        self.settle()
        return time.perf_counter() - start_s

    def both_s(self, size_bytes: int, writes: int, reads: int) -> float:
        """Until ``writes`` tensors have gone and ``reads`` others have come, begun together."""
        arriving = self.tensors(size_bytes, reads)
        like = arriving[0]
        tokens = self.offload(arriving)
        arriving.clear()
        leaving = self.tensors(size_bytes, writes)
        self.settle()
        start_s = time.perf_counter()
        reloaded = self.reload(tokens, like)
        left = self.offload(leaving)
        self.wait(reloaded, tokens)
        self.settle()
        seconds = time.perf_counter() - start_s
        del left
        return seconds

    def offload_calls_s(self, size_bytes: int) -> float:
        """Of one offload and its release, on the calling thread, when nothing has to be waited for."""
        (x,) = self.tensors(size_bytes, 1)
        self.settle()
        start_s = time.perf_counter()
        token = self.engine.offload(x, "probe")
        offload_s = time.perf_counter() - start_s
        self.settle()
        start_s = time.perf_counter()
        token = self.engine.release(token, x)
        release_s = time.perf_counter() - start_s
        self.settle()
        return offload_s + release_s

    def reload_calls_s(self, size_bytes: int) -> float:
        """Of one reload and its wait, on the calling thread, when nothing has to be waited for."""
        (x,) = self.tensors(size_bytes, 1)
        tokens = self.offload([x])
        self.settle()
        start_s = time.perf_counter()
        reloaded = self.reload(tokens, x)
        reload_s = time.perf_counter() - start_s
        self.settle()
        start_s = time.perf_counter()
        self.wait(reloaded, tokens)
        return reload_s + time.perf_counter() - start_s

    def offload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.engine.release(self.engine.offload(x, "probe"), x) for x in tensors]

    def reload(self, tokens: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        return [self.engine.reload(token, like.size(), like.stride(), like.dtype, like.device) for token in tokens]

    def wait(self, reloaded: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for y, token in zip(reloaded, tokens, strict=True):
            self.engine.wait(y, token)

    def settle(self) -> None:
        """Nothing is in flight, and the device has nothing to do."""
        self.engine.wait_until_idle()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def fit_channel(small: tuple[int, float], large: tuple[int, float]) -> Channel:
    """The line through two measurements (bytes, seconds); through the origin where noise would give nonsense."""
    (small_bytes, small_s), (large_bytes, large_s) = small, large
    if large_s > small_s:
        bytes_per_s = (large_bytes - small_bytes) / (large_s - small_s)
        latency_s = small_s - small_bytes / bytes_per_s
        if latency_s >= 0:
            return Channel(bytes_per_s=bytes_per_s, latency_s=latency_s)
    return Channel(bytes_per_s=large_bytes / large_s)


def _channel(measure: Callable[[int, int], float], effort: _Effort) -> Channel:
    """Time of one transfer of many, for two sizes. Runs of both sizes alternate: a busy moment hits both."""
    small_s: list[float] = []
    large_s: list[float] = []
    for _ in range(effort.transfer_repeats):
        small_s.append(measure(effort.small_bytes, effort.small_count) / effort.small_count)
        large_s.append(measure(effort.large_bytes, effort.large_count) / effort.large_count)
    small = (effort.small_bytes, statistics.median(small_s))
    return fit_channel(small, (effort.large_bytes, statistics.median(large_s)))


def _share_when_both(traffic: _Traffic, effort: _Effort) -> float:
    shares: list[float] = []
    size, count = effort.large_bytes, effort.large_count
    for _ in range(effort.transfer_repeats):
        write_s, read_s = traffic.write_s(size, count), traffic.read_s(size, count)
        shares.append(share_of(write_s, read_s, traffic.both_s(size, count, count)))
    return statistics.median(shares)


def share_of(one_s: float, other_s: float, both_s: float) -> float:
    """Share of its rate that each keeps, when they take ``one_s`` and ``other_s`` alone and ``both_s`` begun together.

    The shorter one takes ``short / share`` beside the longer one, which then runs its remainder alone.
    """
    short_s, long_s = sorted((one_s, other_s))
    overlap_s = both_s - (long_s - short_s)
    return min(1.0, max(0.1, short_s / overlap_s)) if overlap_s > 0 else 1.0


def _compute_thread_channels(
    traffic: _Traffic, effort: _Effort, write: Channel, read: Channel
) -> tuple[Channel, Channel]:
    """Compute-stream time of leaving and of coming back, by size, stalls not included."""
    small, large = 64 << 10, effort.large_bytes
    times: dict[tuple[str, int], list[float]] = {}
    beside = _BesideCompute(traffic) if traffic.device.type == "cpu" else None
    for _ in range(effort.kernel_repeats):
        for size in (small, large):
            if beside is not None:
                beside.measure(size, write, read)
            else:
                times.setdefault(("out", size), []).append(traffic.offload_calls_s(size))
                times.setdefault(("in", size), []).append(traffic.reload_calls_s(size))
    if beside is not None:
        times = {key: [beside.cost_s(*key)] for key in itertools.product(("out", "in"), (small, large))}

    def fit(direction: str) -> Channel:
        small_s, large_s = (min(times[direction, size]) for size in (small, large))
        if large_s - small_s < large / MOST_BYTES_PER_S:  # no more than noise: what it takes does not grow with size
            return Channel(bytes_per_s=MOST_BYTES_PER_S, latency_s=small_s)
        return fit_channel((small, small_s), (large, large_s))

    return fit("out"), fit("in")


class _BesideCompute:
    """What transfers of CPU tensors cost the processor that computes, whichever thread does them.

    Matrix products on all of torch's threads run with and without one transfer beside them, in turns. The difference of
    the shortest runs holds the ops themselves, the copies, the work of the kernel, and what the I/O threads disturb.
    """

    COUNT = 4
    """Transfers of one measurement."""

    def __init__(self, traffic: _Traffic) -> None:
        self._traffic = traffic
        self._a = torch.randn(512, 512)
        self._b = torch.empty(512, 512)
        self._compute(20)
        start_s = time.perf_counter()
        self._compute(20)
        self._product_s = (time.perf_counter() - start_s) / 20
        self._runs_s: dict[tuple[str, int], list[tuple[float, float]]] = {}
        """With transfers, and without."""

    def measure(self, size_bytes: int, write: Channel, read: Channel) -> None:
        """One run each of transfers out and in."""
        self._runs_s.setdefault(("out", size_bytes), []).append(self._offload(size_bytes, write))
        self._runs_s.setdefault(("in", size_bytes), []).append(self._reload(size_bytes, read))

    def cost_s(self, direction: str, size_bytes: int) -> float:
        """Seconds of compute that one transfer takes."""
        busy_s, alone_s = (min(runs) for runs in zip(*self._runs_s[direction, size_bytes], strict=True))
        return max(0.0, busy_s - alone_s) / self.COUNT

    def _offload(self, size_bytes: int, write: Channel) -> tuple[float, float]:
        tensors = self._traffic.tensors(size_bytes, self.COUNT)
        self._traffic.settle()
        products = self._products(size_bytes, write)
        alone_s = self._alone_s(products)
        tokens: list[Tensor] = []
        start_s = time.perf_counter()
        for x in tensors:
            token = self._traffic.engine.offload(x, "probe")
            self._compute(products)
            tokens.append(self._traffic.engine.release(token, x))
        return time.perf_counter() - start_s, alone_s

    def _reload(self, size_bytes: int, read: Channel) -> tuple[float, float]:
        tensors = self._traffic.tensors(size_bytes, self.COUNT)
        like = tensors[0]
        tokens = self._traffic.offload(tensors)
        tensors.clear()
        self._traffic.settle()
        products = self._products(size_bytes, read)
        alone_s = self._alone_s(products)
        start_s = time.perf_counter()
        for token in tokens:
            reloaded = self._traffic.reload([token], like)
            self._compute(products)
            self._traffic.wait(reloaded, [token])
        return time.perf_counter() - start_s, alone_s

    def _products(self, size_bytes: int, channel: Channel) -> int:
        """Enough to hide one transfer."""
        return 1 + round(2 * channel.transfer_s(size_bytes) / self._product_s)

    def _alone_s(self, products: int) -> float:
        start_s = time.perf_counter()
        self._compute(products * self.COUNT)
        return time.perf_counter() - start_s

    def _compute(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._a, self._a, out=self._b)


MOST_BYTES_PER_S = 1e13
"""A rate that makes a copy free of charge."""


def _copy_channels(device: torch.device, clock: Clock, effort: _Effort) -> tuple[Channel, Channel]:
    """Device to pinned memory and back."""
    count = 64 * MIB
    host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(count, dtype=torch.uint8, device=device)
    out_s = _shortest_s(clock, lambda: host.copy_(there, non_blocking=True), effort)
    in_s = _shortest_s(clock, lambda: there.copy_(host, non_blocking=True), effort)
    return Channel(bytes_per_s=count / out_s), Channel(bytes_per_s=count / in_s)
