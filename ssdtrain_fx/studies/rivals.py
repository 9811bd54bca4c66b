"""Other ways to hold less between forward and backward, as baselines for measurements. No part of the backend.

Hooks see what autograd saves. Under ``torch.compile`` that is what the compiled forward returns for backward, so all of
it exists at once when the hooks are first called, and all of it is unpacked when the compiled backward begins.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from ssdtrain_fx import _torch_private


def with_activation_budget(compiled: Callable[..., Tensor], budget: float) -> Callable[..., Tensor]:
    """``compiled``, partitioned by torch's knapsack: saved bytes are at most this share of what it would save."""

    def call(*inputs: Any) -> Tensor:
        with _torch_private.functorch_config_patch(activation_memory_budget=budget):
            return compiled(*inputs)

    return call


def with_hooks(compiled: Callable[..., Tensor], hooks: AbstractContextManager[Any]) -> Callable[..., Tensor]:
    """``compiled`` with what it saves going through ``hooks``; these are entered anew for every call."""

    def call(*inputs: Any) -> Tensor:
        with hooks:
            return compiled(*inputs)

    return call


class SavedTensorsOnDisk(torch.autograd.graph.saved_tensors_hooks):
    """Hooks that write what autograd saves to a file, in the background, and read it back when backward asks for it.

    As ``torch.autograd.graph.save_on_cpu`` does it, with a file in the place of host memory: every saved tensor of at
    least ``min_tensor_bytes`` goes through the page cache, parameters stay. One thread writes and reads in order.
    """

    def __init__(self, directory: str | None = None, *, min_tensor_bytes: int = 1 << 20) -> None:
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 -- closed in close()
        self._thread = ThreadPoolExecutor(1, "saved tensors")
        self._min_tensor_bytes = min_tensor_bytes
        self._end = 0
        self._waiting = 0
        super().__init__(cast(Any, self._pack), cast(Any, self._unpack))

    @property
    def file_bytes(self) -> int:
        """How large the file has become."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Give the disk back. Nothing that is still packed can be unpacked afterwards."""
        self._thread.shutdown()
        self._file.close()

    def _pack(self, tensor: Tensor) -> Tensor | _OnDisk:
        size_bytes = tensor.numel() * tensor.element_size()
        if size_bytes < self._min_tensor_bytes or isinstance(tensor, torch.nn.Parameter):
            return tensor
        if self._waiting == 0:
            self._end = 0  # all of the last step is read: its room is free
        offset, self._end, self._waiting = self._end, self._end + size_bytes, self._waiting + 1
        return _OnDisk(tensor, offset, self._thread.submit(self._write, tensor.detach(), offset))

    def _unpack(self, packed: Tensor | _OnDisk) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        packed.written.result()
        self._waiting -= 1
        return self._thread.submit(self._read, packed).result()

    def _write(self, tensor: Tensor, offset: int) -> None:
        view = memoryview(cast(Any, _bytes_of(tensor.contiguous().cpu()).numpy()))
        while view:
            written = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[written:], offset + written

    def _read(self, packed: _OnDisk) -> Tensor:
        dense = torch.empty(packed.shape, dtype=packed.dtype)
        view, offset = memoryview(cast(Any, _bytes_of(dense).numpy())), packed.offset
        while view:
            count = os.preadv(self._file.fileno(), [view], offset)
            if not count:
                raise OSError(f"the file of saved tensors ends at {offset}")
            view, offset = view[count:], offset + count
        if packed.device.type == "cpu" and dense.stride() == packed.stride:
            return dense
        result = torch.empty_strided(packed.shape, packed.stride, dtype=packed.dtype, device=packed.device)
        return result.copy_(dense)


class _OnDisk:
    """Where a tensor is, and what it looked like."""

    def __init__(self, tensor: Tensor, offset: int, written: Future[None]) -> None:
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.offset = offset
        self.written = written


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)
