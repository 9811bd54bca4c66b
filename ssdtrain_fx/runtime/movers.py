"""How bytes get from a tensor into a staging buffer and back, as one interface for every kind of device.

A *mark* is a point in the work of a device: None on the CPU, where a copy is over when the call returns, and an event
on a GPU, where a copy is only enqueued.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ssdtrain_fx.runtime.layout import span_elements
from ssdtrain_fx.runtime.slots import ALIGNMENT_BYTES, round_up
from ssdtrain_fx.runtime.staging import CPU_BUDGET_BYTES, StagingBuffer


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that is used."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


Mark = Event | None


class Region:
    """The bytes that a tensor spans, from its first element to its last one. Keeps the tensor alive."""

    __slots__ = ("address", "byte_count", "pages", "tensor")

    def __init__(self, tensor: Tensor, byte_count: int, pages: memoryview | None = None) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.byte_count = byte_count
        self.pages = pages
        """Whole pages that start at ``address`` and belong to the tensor alone: the file can be read into them."""

    def as_bytes(self) -> Tensor:
        """A uint8 tensor of shape (byte_count,) over the same memory."""
        elements = self.byte_count // self.tensor.element_size()
        return self.tensor.as_strided((elements,), (1,)).view(torch.uint8)


class Mover(Protocol):
    """Copies for one kind of device. Called without locks, from any thread."""

    thread_count: int
    default_budget_bytes: int
    enqueues: bool
    """Copies return before they are over, so that the thread which calls ``offload`` can start them itself."""

    def allocate(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, memoryview | None]:
        """A tensor to reload into, and its pages where it has some (see :class:`Region`)."""
        ...

    def mark(self, device: torch.device) -> Mark:
        """This point of the caller's current stream."""
        ...

    def copy_out(self, source: Region, start: int, length: int, buffer: StagingBuffer, after: Mark) -> Mark:
        """``source[start:start + length]`` -> ``buffer``, not before ``after``."""
        ...

    def copy_in(self, buffer: StagingBuffer, target: Region, start: int, length: int, after: Sequence[Mark]) -> Mark:
        """``buffer`` -> ``target[start:start + length]``, not before ``after``."""
        ...

    def copy_kept(self, kept: Tensor, target: Region, start: int, length: int, after: Sequence[Mark]) -> None:
        """Ordinary host memory -> ``target[start:start + length]``; over when it returns."""
        ...

    def is_over(self, mark: Mark) -> bool:
        """Whether the device has reached ``mark``. Never blocks."""
        ...

    def wait_host(self, mark: Mark) -> None:
        """Block this thread until the device has reached ``mark``."""
        ...

    def wait_stream(self, mark: Mark, device: torch.device) -> None:
        """Make the caller's current stream wait for ``mark``; the thread goes on."""
        ...

    def forget(self, buffers: Sequence[StagingBuffer]) -> None:
        """Undo what was done to make ``buffers`` fit for copies."""
        ...


class CpuMover:
    """``memmove``, which releases the interpreter lock. Reloaded tensors lie on pages, so that they need no copy."""

    thread_count = 2
    default_budget_bytes = CPU_BUDGET_BYTES
    enqueues = False

    def allocate(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, memoryview | None]:
        byte_count = span_elements(size, stride) * dtype.itemsize
        if byte_count < ALIGNMENT_BYTES:  # not worth a page
            return torch.empty_strided(size, stride, dtype=dtype, device=device), None
        pages = allocate_pages(round_up(byte_count))
        tensor = torch.frombuffer(pages, dtype=dtype, count=byte_count // dtype.itemsize)
        return tensor.as_strided(size, stride), memoryview(pages).cast("B")

    def mark(self, device: torch.device) -> Mark:
        return None

    def copy_out(self, source: Region, start: int, length: int, buffer: StagingBuffer, after: Mark) -> Mark:
        ctypes.memmove(buffer.address, source.address + start, length)
        return None

    def copy_in(self, buffer: StagingBuffer, target: Region, start: int, length: int, after: Sequence[Mark]) -> Mark:
        ctypes.memmove(target.address + start, buffer.address, length)
        return None

    def copy_kept(self, kept: Tensor, target: Region, start: int, length: int, after: Sequence[Mark]) -> None:
        ctypes.memmove(target.address + start, kept.data_ptr(), length)

    def is_over(self, mark: Mark) -> bool:
        return True

    def wait_host(self, mark: Mark) -> None:
        return

    def wait_stream(self, mark: Mark, device: torch.device) -> None:
        return

    def forget(self, buffers: Sequence[StagingBuffer]) -> None:
        return


class _Pages:
    """Memory from the C library's allocator, given back when this object dies."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def __del__(self) -> None:
        _C.free(self._address)


_C = ctypes.CDLL(None)
_C.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_C.aligned_alloc.restype = ctypes.c_void_p
_C.free.argtypes = [ctypes.c_void_p]
_C.free.restype = None


def allocate_pages(byte_count: int) -> ctypes.Array[ctypes.c_char]:
    """``byte_count`` bytes on whole pages, uninitialised. From the heap, whose memory is warm, and not fresh by mmap.

    Raises:
        MemoryError: the allocator has no more.
    """
    address = _C.aligned_alloc(ALIGNMENT_BYTES, byte_count)
    if not address:
        raise MemoryError(f"cannot allocate {byte_count} bytes to reload a saved tensor")
    pages = (ctypes.c_char * byte_count).from_address(address)
    pages.owner = _Pages(address)  # pyright: ignore[reportAttributeAccessIssue]  # ctypes objects take attributes
    return pages


def keep_bytes(buffer: StagingBuffer, length: int) -> Tensor:
    """A copy of the first ``length`` bytes in ordinary memory."""
    kept = torch.empty(length, dtype=torch.uint8)
    ctypes.memmove(kept.data_ptr(), buffer.address, length)
    return kept
