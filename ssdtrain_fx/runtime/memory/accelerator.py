"""Copies between the memory of any accelerator and staging buffers that torch has pinned for it.

``torch.accelerator`` has no function that registers other memory, as CUDA has.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ssdtrain_fx.runtime.alignment import ALIGNMENT_BYTES
from ssdtrain_fx.runtime.memory.staging import StagingBuffer
from ssdtrain_fx.runtime.memory.stream_mover import StreamMover, pinning_error

_MADV_DOFORK = 11
_libc = ctypes.CDLL(None)


class PinnedBuffer(StagingBuffer):
    """Memory of torch's allocator of pinned memory, taken when the buffer is first used because it takes milliseconds.

    The allocator rounds sizes up to powers of two, which chunks are. If what it returns does not begin on a page, a
    buffer takes twice its size.
    """

    __slots__ = ()

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.users = 0
        self.pinned = None

    @property
    def address(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.tensor().data_ptr()

    @property
    def view(self) -> memoryview:  # pyright: ignore[reportIncompatibleVariableOverride]
        return memoryview(cast(Any, self.tensor().numpy()))

    def tensor(self) -> Tensor:
        """The memory as a tensor. Raises ConfigError."""
        if self.pinned is None:
            try:
                memory = _pinned_memory(self.size_bytes)
                if memory.data_ptr() % ALIGNMENT_BYTES:
                    memory = _pinned_memory(self.size_bytes + ALIGNMENT_BYTES)
            except RuntimeError as error:
                raise pinning_error(self.size_bytes, str(error).splitlines()[0]) from error
            skip = -memory.data_ptr() % ALIGNMENT_BYTES
            self.pinned = memory[skip : skip + self.size_bytes]
            _libc.madvise(ctypes.c_void_p(self.pinned.data_ptr()), ctypes.c_size_t(self.size_bytes), mmap.MADV_DONTFORK)
        return self.pinned

    def forget(self) -> None:
        """Give the memory back, as forked processes expect it. Nothing may use it any more."""
        if self.pinned is not None:
            _libc.madvise(ctypes.c_void_p(self.pinned.data_ptr()), ctypes.c_size_t(self.size_bytes), _MADV_DOFORK)
            self.pinned = None


class AcceleratorMover(StreamMover):
    """See :class:`StreamMover`."""

    def make_buffer(self, size_bytes: int) -> StagingBuffer:
        return PinnedBuffer(size_bytes)

    def forget(self, buffers: Sequence[StagingBuffer]) -> None:
        for buffer in buffers:
            assert isinstance(buffer, PinnedBuffer)
            buffer.forget()

    def _pinned(self, buffer: StagingBuffer) -> Tensor:
        assert isinstance(buffer, PinnedBuffer)
        return buffer.tensor()


def _pinned_memory(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
