"""Other ways to reduce saved activations, as baselines for benchmarks. The backend does not use them.

Hooks see the tensors that autograd saves. Under ``torch.compile`` these are the tensors that the compiled forward
returns for backward. So all of them exist at once when the hooks are first called, and all of them are unpacked when
the compiled backward starts.
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

CHUNKED_LOSS = {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 2}
"""Options of ``torch.compile`` for Inductor's auto-chunker (torch 2.13). By default, it chunks only losses whose logits
are eight times larger than the hidden states."""


def with_activation_budget(compiled: Callable[..., Tensor], budget: float) -> Callable[..., Tensor]:
    """``compiled``, partitioned with torch's knapsack solver to save at most this share of the bytes it would save."""

    def call(*inputs: Any) -> Tensor:
        with _torch_private.functorch_config_patch(activation_memory_budget=budget):
            return compiled(*inputs)

    return call


def with_hooks(compiled: Callable[..., Tensor], hooks: AbstractContextManager[Any]) -> Callable[..., Tensor]:
    """``compiled`` with its saved tensors passed through ``hooks``, which are entered for every call."""

    def call(*inputs: Any) -> Tensor:
        with hooks:
            return compiled(*inputs)

    return call


class SavedTensorsOnDisk(torch.autograd.graph.saved_tensors_hooks):
    """Hooks that write saved tensors to a file in the background, and read them back when backward needs them.

    They work as ``torch.autograd.graph.save_on_cpu`` does, with a file instead of host memory. Every saved tensor of at
    least ``min_tensor_bytes`` is written through the page cache; parameters stay in memory. One thread writes and reads
    in order.
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
        """Current size of the file."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Delete the file. Tensors that are still packed can no longer be unpacked."""
        self._thread.shutdown()
        self._file.close()

    def _pack(self, tensor: Tensor) -> Tensor | _OnDisk:
        size_bytes = tensor.numel() * tensor.element_size()
        if size_bytes < self._min_tensor_bytes or isinstance(tensor, torch.nn.Parameter):
            return tensor
        if self._waiting == 0:
            self._end = 0  # every tensor of the previous step has been read, so its space is free
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
    """Location and layout of a tensor in the file."""

    def __init__(self, tensor: Tensor, offset: int, written: Future[None]) -> None:
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.offset = offset
        self.written = written


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)
