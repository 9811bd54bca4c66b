"""The devices beside the CPU that tensors may leave, and what is asked of them.

``torch.accelerator`` has one interface for CUDA, XPU and what other packages register (NPU and others). With streams,
events and pinned host memory, a device can be used.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

SHARED_MEMORY = ("mps",)
"""Accelerators whose memory is that of the CPU."""


def is_accelerator(device: torch.device) -> bool:
    """Whether tensors on ``device`` are not in memory of the CPU."""
    return device.type not in ("cpu", "meta")


def find_accelerator(values: Iterable[object]) -> torch.device | None:
    """The accelerator of the first of these tensors that is on one."""
    tensors = (value for value in values if isinstance(value, Tensor))
    return next((tensor.device for tensor in tensors if is_accelerator(tensor.device)), None)


def reason_to_refuse(device_type: str) -> str:
    """Why tensors on such a device cannot be offloaded; empty if they can be.

    CUDA is planned for on machines without it as well.
    """
    if device_type in SHARED_MEMORY:
        return f"{device_type} shares its memory with the CPU, so offloading from it would free nothing"
    supported = ["cpu", "cuda"]
    here = torch.accelerator.current_accelerator()
    if here is not None and here.type not in (*supported, *SHARED_MEMORY):
        supported.append(here.type)
    return "" if device_type in supported else f"{device_type} is not one of {', '.join(supported)}"


def available_type() -> str | None:
    """The type of the accelerator that this machine has. None if it has none that is supported."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return None if here is None or reason_to_refuse(here.type) else here.type


def device_functions(device_type: str) -> Any:
    """``torch.cuda``, or an object with those of its functions that are used here."""
    return torch.cuda if device_type == "cuda" else Accelerator(device_type)


class Accelerator:
    """The functions of ``torch.cuda`` that are used here, for the accelerator that torch has found.

    What ``torch.accelerator`` lacks comes from the device's own module (``torch.xpu``, ``torch.npu``).
    """

    def __init__(self, device_type: str) -> None:
        self._type = device_type

    # -- streams -------------------------------------------------------------------------------------------------------

    def Stream(self, device: torch.device) -> torch.Stream:
        return torch.Stream(device=device)

    def Event(self, enable_timing: bool = False) -> torch.Event:
        return torch.Event(device=self._type, enable_timing=enable_timing)

    def stream(self, stream: torch.Stream) -> AbstractContextManager[object]:
        return stream

    def current_stream(self, device: torch.device | None = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def synchronize(self, device: torch.device | None = None) -> None:
        torch.accelerator.synchronize(device)

    # -- devices -------------------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        here = torch.accelerator.current_accelerator(check_available=True)
        return here is not None and here.type == self._type

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def device(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.accelerator.device_index(device.index)

    def get_device_name(self, device: torch.device | None = None) -> str:
        name = getattr(self._module, "get_device_name", None)
        return self._type if name is None else str(name(device))

    # -- memory --------------------------------------------------------------------------------------------------------

    def mem_get_info(self, device: torch.device | None = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(device)

    def memory_allocated(self, device: torch.device | None = None) -> int:
        return torch.accelerator.memory_allocated(device)

    def max_memory_allocated(self, device: torch.device | None = None) -> int:
        return torch.accelerator.max_memory_allocated(device)

    def memory_reserved(self, device: torch.device | None = None) -> int:
        return torch.accelerator.memory_reserved(device)

    def reset_peak_memory_stats(self, device: torch.device | None = None) -> None:
        torch.accelerator.reset_peak_memory_stats(device)

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    # -- random numbers ------------------------------------------------------------------------------------------------

    def get_rng_state(self, device: torch.device) -> Tensor:
        return self._module.get_rng_state(device)

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self._module.set_rng_state(state, device)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self._type)
