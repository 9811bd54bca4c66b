"""What :mod:`simulated_device` does to its device, done to a GPU: streams are held, late, or fail.

``hold`` enqueues a function of the host that returns late (``cuLaunchHostFunc``). A delay is a kernel that spins. What
a GPU cannot do skips the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sync_counts
import torch
from torch import Tensor

SKIPPED = "skipped: "
"""What the answer of a test begins with that a GPU cannot run."""
CYCLES_PER_US = 2000
SETTLED_AFTER_S = 0.05
_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Counts:
    """What :class:`simulated_device.Counts` is; the kernels are not counted."""

    def __init__(self, syncs: dict[tuple[int, str], int]) -> None:
        self.syncs = syncs

    def syncs_of_training(self) -> dict[str, int]:
        return sync_counts.of_training(self.syncs)


class RealDevice:
    """The interface of :class:`simulated_device.Simulator`. The first call that needs the GPU initializes CUDA."""

    repetition = 0

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, _HostFunction, ctypes.c_void_p]
        self._host_functions: list[Any] = []
        self._is_warm = False
        self._failed = False
        self._hold_limit_s = 20.0
        self._side_us = 0
        self._percent = 100
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._syncs: dict[tuple[int, str], int] = {}

    @property
    def failed(self) -> bool:
        """Whether a failure was asked for. The process can then no longer use the GPU."""
        return self._failed

    def configure(
        self, *, seed: int = 1, default_us: int = 0, side_us: int = 0, percent: int = 100, hold_limit_s: float = 20.0
    ) -> None:
        """Delay ``percent`` of the copies on other streams by up to ``side_us``, and what comes next on the current
        one by ``default_us``."""
        self._random = random.Random(seed + 1000 * self.repetition)
        self._side_us, self._percent, self._hold_limit_s = side_us, percent, hold_limit_s
        if default_us:
            torch.cuda._sleep(default_us * CYCLES_PER_US)

    @contextlib.contextmanager
    def hold(self, stream: Any = None) -> Iterator[None]:
        chosen = torch.cuda.current_stream() if stream is None else stream
        self._warm()
        may_go_on, expired = threading.Event(), threading.Event()

        def wait(_: object) -> None:
            if not may_go_on.wait(self._hold_limit_s):
                expired.set()

        function = _HostFunction(wait)
        self._host_functions.append(function)  # the driver calls it when the stream comes to it
        code = self._driver.cuLaunchHostFunc(chosen.cuda_stream, function, None)
        assert code == 0, f"cuLaunchHostFunc returned {code}"
        try:
            yield
        finally:
            may_go_on.set()
        assert not expired.is_set(), f"a thread waited for a stream that was held, for {self._hold_limit_s} s"

    def settle(self) -> None:
        time.sleep(SETTLED_AFTER_S)

    def peek(self, x: Tensor) -> bytes:
        with torch.cuda.stream(self._own_stream()):
            return bytes(x.flatten().view(torch.uint8).cpu().numpy())

    def poke(self, x: Tensor, data: bytes) -> None:
        stream = self._own_stream()
        with torch.cuda.stream(stream):
            x.flatten().view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        stream.synchronize()

    def fail_next(self, stream: Any) -> None:
        self._failed = True
        with torch.cuda.stream(stream):
            torch._assert_async(torch.zeros(1, device="cuda"))

    def is_pinned(self, address: int) -> bool:
        return int(torch.cuda.cudart().cudaHostUnregister(address)) != 713

    @contextlib.contextmanager
    def refuse_pinning(self) -> Iterator[None]:
        pytest.skip("memory of a real machine can be pinned")
        yield

    def repair(self) -> None:
        """Nothing can repair a CUDA context."""

    def memory(self, device: Any = None) -> Any:
        pytest.skip("a real device has no memory statistics of the simulated one")

    def limit_memory(self, limit_bytes: int, device: Any = None) -> None:
        if limit_bytes:
            pytest.skip("the memory of a real device is not limited")

    def take_counts(self) -> Counts:
        """The waits for the device since the last call, as torch and the wrappers of :func:`install` see them."""
        with self._lock:
            counts, self._syncs = Counts(self._syncs), {}
        return counts

    def count(self, kind: str) -> None:
        with self._lock:
            key = (threading.get_native_id(), kind)
            self._syncs[key] = self._syncs.get(key, 0) + 1

    def delay(self, stream: Any) -> None:
        """Let ``stream`` be late, if :meth:`configure` says so."""
        if self._side_us and self._random.randrange(100) < self._percent:
            torch.cuda._sleep(self._random.randrange(self._side_us) * CYCLES_PER_US)

    def _own_stream(self) -> Any:
        return torch.cuda.Stream()

    def _warm(self) -> None:
        """CUDA loads a kernel when it is first launched, and waits for all streams then. So launch them all before one
        is held."""
        if self._is_warm:
            return
        self._is_warm = True
        torch.cuda.set_sync_debug_mode("warn")
        for dtype in (torch.float32, torch.uint8):
            x = torch.full((32, 32), 1, dtype=dtype, device="cuda")
            (x + 1).clone()
            x.t().clone()
            x[:, :16].clone()
            torch.empty(32, 32, dtype=dtype, device="cuda").copy_(x.t())
            x.view(-1).view(torch.uint8).cpu()
        torch.arange(16, dtype=torch.float32, device="cuda")
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        self.take_counts()


def install() -> RealDevice:
    """Wrap what is counted and delayed."""
    device = RealDevice()
    cuda: Any = torch.cuda
    stream_context = cuda.stream

    @contextlib.contextmanager
    def late_stream(stream: Any) -> Iterator[None]:
        with stream_context(stream):
            if stream is not None and stream != cuda.default_stream(stream.device):
                device.delay(stream)
            yield

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            device.count(kind)
            return function(*args, **kwargs)

        return call

    def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            device.count("operation")

    warnings.simplefilter("always")
    warnings.showwarning = show_warning
    cuda.stream = late_stream
    cuda.synchronize = counted("device", cuda.synchronize)
    cuda.Event.synchronize = counted("event", cuda.Event.synchronize)
    cuda.Stream.synchronize = counted("stream", cuda.Stream.synchronize)
    return device
