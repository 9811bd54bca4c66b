"""Copies between tensors and staging buffers, with one interface for every kind of device.

A *mark* is a point in the work of a device: None on the CPU, where a copy has finished when the call returns, and an
event on a GPU, where a copy is only enqueued.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ssdtrain_fx.runtime.memory.staging import CHUNK_BYTES, CPU_BUDGET_BYTES, StagingBuffer


class Event(Protocol):
    """The methods of ``torch.cuda.Event`` that are used."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


Mark = Event | None


class Region:
    """The bytes that a tensor spans, from its first to its last element. Keeps the tensor alive."""

    __slots__ = ("address", "byte_count", "tensor")

    def __init__(self, tensor: Tensor, byte_count: int) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.byte_count = byte_count

    def as_bytes(self) -> Tensor:
        """A uint8 tensor of shape (byte_count,) over the same memory."""
        elements = self.byte_count // self.tensor.element_size()
        return self.tensor.as_strided((elements,), (1,)).view(torch.uint8)


class Mover(Protocol):
    """Copies for one kind of device. Called without locks, from any thread."""

    thread_count: int
    default_budget_bytes: int
    enqueues: bool
    """Copies return before they have finished, so that the thread that calls ``offload`` can start them itself."""

    def chunk_bytes(self, budget_bytes: int) -> int:
        """The size of staging buffers, if there may be ``budget_bytes`` of them."""
        ...

    def make_buffer(self, size_bytes: int) -> StagingBuffer:
        """A staging buffer that this mover can copy to and from."""
        ...

    def mark(self, device: torch.device) -> Mark:
        """Mark the current point of the caller's current stream."""
        ...

    def stream(self, device: torch.device) -> object:
        """The caller's current stream, for comparison with another one; None if the device has no streams."""
        ...

    def copy_out(self, source: Region, start: int, length: int, buffer: StagingBuffer, after: Mark) -> Mark:
        """Copy ``source[start:start + length]`` to ``buffer``, not before ``after``."""
        ...

    def copy_in(self, buffer: StagingBuffer, target: Region, start: int, length: int, after: Sequence[Mark]) -> Mark:
        """Copy ``buffer`` to ``target[start:start + length]``, not before ``after``."""
        ...

    def copy_kept(self, kept: Tensor, target: Region, start: int, length: int, after: Sequence[Mark]) -> None:
        """Copy ordinary host memory to ``target[start:start + length]``. Has finished when it returns."""
        ...

    def wait_host(self, mark: Mark) -> None:
        """Block this thread until the device has reached ``mark``."""
        ...

    def wait_stream(self, mark: Mark, device: torch.device) -> None:
        """Make the caller's current stream wait for ``mark``, without blocking the thread."""
        ...

    def last_marks(self) -> list[tuple[torch.device, Mark]]:
        """Marks that devices reach once they have made all copies that were enqueued before."""
        ...

    def forget(self, buffers: Sequence[StagingBuffer]) -> None:
        """Undo the preparation of ``buffers`` for copies."""
        ...


class CpuMover:
    """``memmove``, which releases the interpreter lock."""

    thread_count = 2
    default_budget_bytes = CPU_BUDGET_BYTES
    enqueues = False

    def chunk_bytes(self, budget_bytes: int) -> int:
        return CHUNK_BYTES

    def make_buffer(self, size_bytes: int) -> StagingBuffer:
        return StagingBuffer(size_bytes)

    def mark(self, device: torch.device) -> Mark:
        return None

    def stream(self, device: torch.device) -> object:
        return None

    def copy_out(self, source: Region, start: int, length: int, buffer: StagingBuffer, after: Mark) -> Mark:
        ctypes.memmove(buffer.address, source.address + start, length)
        return None

    def copy_in(self, buffer: StagingBuffer, target: Region, start: int, length: int, after: Sequence[Mark]) -> Mark:
        ctypes.memmove(target.address + start, buffer.address, length)
        return None

    def copy_kept(self, kept: Tensor, target: Region, start: int, length: int, after: Sequence[Mark]) -> None:
        ctypes.memmove(target.address + start, kept.data_ptr(), length)

    def wait_host(self, mark: Mark) -> None:
        return

    def wait_stream(self, mark: Mark, device: torch.device) -> None:
        return

    def last_marks(self) -> list[tuple[torch.device, Mark]]:
        return []

    def forget(self, buffers: Sequence[StagingBuffer]) -> None:
        return


def keep_bytes(address: int, length: int) -> Tensor:
    """Return a copy of the ``length`` bytes at ``address``, in ordinary memory."""
    kept = torch.empty(length, dtype=torch.uint8, device="cpu")
    ctypes.memmove(kept.data_ptr(), address, length)
    return kept
