"""Copies between CUDA memory and staging buffers that are registered with CUDA.

Why registered: torch's own allocator of pinned memory rounds sizes up to powers of two, and does not align them to huge
pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ssdtrain_fx.runtime.memory.staging import StagingBuffer
from ssdtrain_fx.runtime.memory.stream_mover import StreamMover, pinning_error

_HOST_REGISTER_PORTABLE = 1  # pinned for every device, not only the current one


class CudaMover(StreamMover):
    """See :class:`StreamMover`."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """``cuda`` is ``torch.cuda`` or an object with the same functions."""
        super().__init__(cuda)

    def make_buffer(self, size_bytes: int) -> StagingBuffer:
        return StagingBuffer(size_bytes)

    def forget(self, buffers: Sequence[StagingBuffer]) -> None:
        for buffer in buffers:
            if buffer.pinned is not None:
                _error_of(self._functions.cudart().cudaHostUnregister(buffer.address))
                buffer.pinned = None

    def _pinned(self, buffer: StagingBuffer) -> Tensor:
        if buffer.pinned is None:  # on first use, because registering takes milliseconds
            cudart = self._functions.cudart()
            # Noted first: if an interrupt comes after the call, the memory is unregistered before it is freed.
            # Otherwise it could not be registered again when the system hands it out for another buffer.
            buffer.pinned = torch.frombuffer(buffer.view, dtype=torch.uint8)
            error = _error_of(cudart.cudaHostRegister(buffer.address, buffer.size_bytes, _HOST_REGISTER_PORTABLE))
            if error != 0:
                buffer.pinned = None
                raise pinning_error(buffer.size_bytes, f"CUDA error {error}")
        return buffer.pinned


def _error_of(result: Any) -> int:
    """The number of a CUDA error, which is not left for others.

    CUDA remembers an error for the next call that asks for the last one. In torch, that is the launch of a kernel: an
    innocent one would raise.
    """
    error = int(result)
    if error != 0 and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.zeros((), device="cuda")
    return error
