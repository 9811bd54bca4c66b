"""Rates of the SSD, and the time that transfers take from the compute thread.

They are measured through a real ``Engine``, because the rate that counts is the one that the engine reaches. The median
of many transfers counts, because the speed of a drive varies over time.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssdtrain_fx.accelerators import device_functions, is_accelerator
from ssdtrain_fx.hardware import Channel
from ssdtrain_fx.machine.probe_effort import Effort
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.handles.tokens import Owner, handle_of, make_token

MOST_BYTES_PER_S = 1e13
"""A rate at which a copy takes no time."""
ROWS, INNER = 2048, 128
"""Sizes of a matrix product that writes 16 MiB and takes a few milliseconds."""


class Traffic:
    """Sets of transfers through one engine, which is called as the ops of a training step call it."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.device = device

    def tensors(self, size_bytes: int, count: int) -> list[Tensor]:
        """Tensors of random bytes, because some drives compress."""
        x = torch.empty(size_bytes // 8, dtype=torch.int64, device=self.device).random_()
        return [x.clone() for _ in range(count)]

    def write_s(self, size_bytes: int, count: int) -> float:
        """Seconds until all bytes are in the file."""
        tensors = self.tensors(size_bytes, count)
        self.settle()
        start_s = time.perf_counter()
        owners = self.offload(tensors)
        self.engine.wait_until_idle()
        seconds = time.perf_counter() - start_s
        del owners
        return seconds

    def read_s(self, size_bytes: int, count: int) -> float:
        """Seconds until all bytes are reloaded."""
        tensors = self.tensors(size_bytes, count)
        like = tensors[0]
        owners = self.offload(tensors)
        tensors.clear()
        self.settle()
        start_s = time.perf_counter()
        self.wait(self.reload(owners, like), owners)
        self.settle()
        return time.perf_counter() - start_s

    def both_s(self, size_bytes: int, writes: int, reads: int) -> float:
        """Seconds until ``writes`` tensors are written and ``reads`` others are reloaded, started together."""
        arriving = self.tensors(size_bytes, reads)
        like = arriving[0]
        owners = self.offload(arriving)
        arriving.clear()
        leaving = self.tensors(size_bytes, writes)
        self.settle()
        start_s = time.perf_counter()
        reloaded = self.reload(owners, like)
        left = self.offload(leaving)
        self.wait(reloaded, owners)
        self.settle()
        seconds = time.perf_counter() - start_s
        del left
        return seconds

    def offload_calls_s(self, size_bytes: int) -> float:
        """Seconds of one offload and its release on the calling thread, when neither has to wait."""
        (x,) = self.tensors(size_bytes, 1)
        self.settle()
        start_s = time.perf_counter()
        owner = self.engine.offload(x, "probe")
        offload_s = time.perf_counter() - start_s
        self.settle()
        start_s = time.perf_counter()
        self.engine.release(owner, x)
        release_s = time.perf_counter() - start_s
        self.settle()
        return offload_s + release_s

    def reload_calls_s(self, size_bytes: int) -> float:
        """Seconds of one reload and its wait on the calling thread, when neither has to wait."""
        (x,) = self.tensors(size_bytes, 1)
        owners = self.offload([x])
        self.settle()
        start_s = time.perf_counter()
        reloaded = self.reload(owners, x)
        reload_s = time.perf_counter() - start_s
        self.settle()
        start_s = time.perf_counter()
        self.wait(reloaded, owners)
        return reload_s + time.perf_counter() - start_s

    def offload(self, tensors: Sequence[Tensor]) -> list[Owner]:
        return [self.engine.release(self.engine.offload(x, "probe"), x) for x in tensors]

    def reload(self, owners: Sequence[Owner], like: Tensor) -> list[Tensor]:
        return [self.engine.reload(owner, like.size(), like.stride()) for owner in owners]

    def wait(self, reloaded: Sequence[Tensor], owners: Sequence[Owner]) -> None:
        for y, owner in zip(reloaded, owners, strict=True):
            self.engine.wait(y, owner)

    def settle(self) -> None:
        """Wait until nothing is in flight and the device is idle."""
        self.engine.wait_until_idle()
        if is_accelerator(self.device):
            device_functions(self.device.type).synchronize(self.device)


def fit_channel(small: tuple[int, float], large: tuple[int, float]) -> Channel:
    """Fit a line through two measurements (bytes, seconds), or through the origin if noise would give nonsense."""
    (small_bytes, small_s), (large_bytes, large_s) = small, large
    if large_s > small_s:
        bytes_per_s = (large_bytes - small_bytes) / (large_s - small_s)
        latency_s = small_s - small_bytes / bytes_per_s
        if latency_s >= 0:
            return Channel(bytes_per_s=bytes_per_s, latency_s=latency_s)
    return Channel(bytes_per_s=large_bytes / large_s)


def channel_of(measure: Callable[[int, int], float], effort: Effort) -> Channel:
    """Fit the time per transfer for two sizes. Runs of both sizes alternate, so that a busy moment affects both."""
    small_s: list[float] = []
    large_s: list[float] = []
    for _ in range(effort.transfer_repeats):
        small_s.append(measure(effort.small_bytes, effort.small_count) / effort.small_count)
        large_s.append(measure(effort.large_bytes, effort.large_count) / effort.large_count)
    small = (effort.small_bytes, statistics.median(small_s))
    return fit_channel(small, (effort.large_bytes, statistics.median(large_s)))


def share_when_both_of(traffic: Traffic, effort: Effort) -> float:
    shares: list[float] = []
    size, count = effort.large_bytes, effort.large_count
    for _ in range(effort.transfer_repeats):
        write_s, read_s = traffic.write_s(size, count), traffic.read_s(size, count)
        shares.append(share_of(write_s, read_s, traffic.both_s(size, count, count)))
    return statistics.median(shares)


def share_of(one_s: float, other_s: float, both_s: float) -> float:
    """Share of its rate that each direction keeps. They take ``one_s`` and ``other_s`` alone, ``both_s`` together.

    While both run, the shorter one takes ``short / share``. Then the longer one runs its remainder alone.
    """
    short_s, long_s = sorted((one_s, other_s))
    overlap_s = both_s - (long_s - short_s)
    return min(1.0, max(0.1, short_s / overlap_s)) if overlap_s > 0 else 1.0


class ComputeThreadTimes(NamedTuple):
    """Compute-stream time of the ops of one storage, without stalls."""

    offload: Channel
    """Time of an offload and its release, by size."""
    reload: Channel
    """Time of a reload and its wait, by size."""
    next_offload_s: float | None
    """``offload`` of a small storage whose ops follow those of another one; None: not measured."""
    next_reload_s: float | None


def compute_thread_times(traffic: Traffic, effort: Effort, write: Channel, read: Channel) -> ComputeThreadTimes:
    """Measure what the ops take from the compute stream."""
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
        if large_s - small_s < large / MOST_BYTES_PER_S:  # no more than noise: the time does not grow with size
            return Channel(bytes_per_s=MOST_BYTES_PER_S, latency_s=small_s)
        return fit_channel((small, small_s), (large, large_s))

    offload, reload = fit("out"), fit("in")
    if beside is None:
        return ComputeThreadTimes(offload, reload, None, None)
    saved_out_s, saved_in_s = beside.saved_in_row_s("out"), beside.saved_in_row_s("in")
    return ComputeThreadTimes(
        offload, reload, max(0.0, offload.latency_s - saved_out_s), max(0.0, reload.latency_s - saved_in_s)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Sample:
    """Transfers one by one, in parallel with matrix products."""

    product_s: float
    """Time of one product without transfers."""
    taken_s: float
    """How much longer all products took with transfers."""
    ops_s: list[float]
    """Time of both ops of each transfer."""
    row_ops_s: list[float]
    """The same where the ops of all transfers are in a row, without the first one of the row."""


class _BesideCompute:
    """Measures what transfers of CPU tensors cost the processor that computes, whichever thread does them.

    One part of the cost is the time of the ops. Each op runs after matrix products that write more memory than caches
    hold, as the layers of a model do. An op that directly follows another op is several times as fast, because its code
    and its data are still cached. Ops are called as Inductor's code calls them: with a token, but not through PyTorch's
    dispatcher, which would take as much time again with cold caches.

    The other part is what transfers take from the products in parallel: memory bandwidth, and processor time where
    threads make the copies or where the host of a virtual machine moves the bytes on the same cores. It is the median
    difference of alternating runs with and without transfers.

    The nodes of a step are priced by the rates of an undisturbed machine, because the shortest run of a kernel counts.
    Ops and differences are too small and too rare for that. So each one is divided by how much longer the products of
    its sample took than the products of the fastest sample.
    """

    COUNT = 4
    """Transfers per run."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._a = torch.randn(ROWS, INNER)
        self._b = torch.randn(INNER, ROWS)
        self._product = torch.empty(ROWS, ROWS)
        self._compute(4)
        start_s = time.perf_counter()
        self._compute(4)
        self._product_s = (time.perf_counter() - start_s) / 4
        self._samples: dict[tuple[str, int], list[_Sample]] = {}

    def measure(self, size_bytes: int, write: Channel, read: Channel) -> None:
        """Measure one run of offloads and one run of reloads."""
        traffic, engine = self._traffic, self._traffic.engine
        tensors = traffic.tensors(size_bytes, self.COUNT)
        like = tensors[0]
        tokens: list[Tensor] = []

        def release(number: int, owner: Owner) -> None:
            engine.release(owner, tensors[number])
            tokens.append(make_token(owner))

        def reload(number: int) -> tuple[Tensor, Owner]:
            owner = engine.find_owner(handle_of(tokens[number]))
            assert owner is not None
            return engine.reload(owner, like.size(), like.stride()), owner

        products = self._products(size_bytes, write)
        self._run(("out", size_bytes), products, lambda number: engine.offload(tensors[number], "probe"), release)
        del tokens[: self.COUNT]  # those of the row remain
        traffic.settle()
        for number in range(self.COUNT):  # the reloads that are measured then reuse memory
            engine.wait(*reload(number))
        products = self._products(size_bytes, read)
        self._run(("in", size_bytes), products, reload, lambda number, reloading: engine.wait(*reloading))

    def cost_s(self, direction: str, size_bytes: int) -> float:
        """Seconds that one transfer takes on an undisturbed processor."""
        samples = self._samples[direction, size_bytes]
        ops = statistics.median(ops_s / sample.product_s for sample in samples for ops_s in sample.ops_s)
        taken = statistics.median(sample.taken_s / sample.product_s for sample in samples)
        return self._shortest_s * (ops + max(0.0, taken) / self.COUNT)

    def saved_in_row_s(self, direction: str) -> float:
        """How many seconds less the ops of a storage take if they follow those of another one. The median over all
        sizes, since the size makes no difference to what is in the caches."""
        samples = [sample for (way, _), found in self._samples.items() if way == direction for sample in found]
        alone = statistics.median(ops_s / sample.product_s for sample in samples for ops_s in sample.ops_s)
        in_row = statistics.median(ops_s / sample.product_s for sample in samples for ops_s in sample.row_ops_s)
        return self._shortest_s * max(0.0, alone - in_row)

    @property
    def _shortest_s(self) -> float:
        """Time of a product on an undisturbed processor."""
        return min(sample.product_s for samples in self._samples.values() for sample in samples)

    def _run(
        self,
        key: tuple[str, int],
        products: int,
        begin: Callable[[int], Any],
        end: Callable[[int, Any], None],
    ) -> None:
        """Run transfers one by one, with ``products`` matrix products between the two ops of each. Then run them in a
        row."""
        self._traffic.settle()
        start_s = time.perf_counter()
        self._compute(products * self.COUNT)
        alone_s, busy_s = time.perf_counter() - start_s, 0.0
        ops_s: list[float] = []
        for number in range(self.COUNT):
            start_s = time.perf_counter()
            begun = begin(number)
            begun_s = time.perf_counter()
            self._compute(products)
            computed_s = time.perf_counter()
            end(number, begun)
            end_s = time.perf_counter()
            busy_s += computed_s - begun_s
            ops_s.append(begun_s - start_s + end_s - computed_s)
        row_ops_s = self._run_row(products, begin, end)
        sample = _Sample(alone_s / (products * self.COUNT), busy_s - alone_s, ops_s, row_ops_s)
        self._samples.setdefault(key, []).append(sample)

    def _run_row(self, products: int, begin: Callable[[int], Any], end: Callable[[int, Any], None]) -> list[float]:
        self._compute(products)
        times_s = [time.perf_counter()]
        begun: list[Any] = []
        for number in range(self.COUNT):
            begun.append(begin(number))
            times_s.append(time.perf_counter())
        begin_s = [later_s - before_s for before_s, later_s in itertools.pairwise(times_s)]
        self._compute(products * self.COUNT)
        times_s = [time.perf_counter()]
        for number in range(self.COUNT):
            end(number, begun[number])
            times_s.append(time.perf_counter())
        end_s = [later_s - before_s for before_s, later_s in itertools.pairwise(times_s)]
        return [begin_s[number] + end_s[number] for number in range(1, self.COUNT)]

    def _products(self, size_bytes: int, channel: Channel) -> int:
        """Number of products that hides one transfer."""
        return 1 + round(2 * channel.transfer_s(size_bytes) / self._product_s)

    def _compute(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._a, self._b, out=self._product)
