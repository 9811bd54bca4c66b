"""Clocks that time how long a device works on a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ssdtrain_fx.accelerators import device_functions, is_accelerator


class Clock(Protocol):
    """Times how long the device works on a call."""

    def seconds(self, call: Callable[[], object]) -> float: ...


class CpuClock:
    """Times a call until it returns."""

    def seconds(self, call: Callable[[], object]) -> float:
        start_s = time.perf_counter()
        call()
        return time.perf_counter() - start_s


class DeviceClock:
    """Times a call between two events on the current stream, so that earlier work does not count."""

    def __init__(self, functions: Any) -> None:
        """``functions`` is ``torch.cuda`` or an object with the same functions."""
        self._functions = functions

    def seconds(self, call: Callable[[], object]) -> float:
        before, after = (self._functions.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3


def clock_of(device: torch.device, functions: Any = None) -> Clock:
    """``functions`` replaces those of the device."""
    if not is_accelerator(device):
        return CpuClock()
    return DeviceClock(functions or device_functions(device.type))
