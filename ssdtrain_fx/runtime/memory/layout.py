"""The memory layout of strided tensors, and whether their bytes can be moved as one run of memory.

Example: a (4, 6) view of the first 6 columns of a (4, 8) float32 matrix has strides (8, 1). Its span is
1 + 3*8 + 5*1 = 30 elements = 120 bytes for 24 elements, 1.25 times its size: the span is moved, holes included. An
expanded tensor spans fewer elements than it has: repeated elements are moved once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_SPAN_RATIO = 1.5
"""Above this ratio, a dense copy costs less than moving the holes. A guess, not measured."""


def span_elements(size: Sequence[int], stride: Sequence[int]) -> int:
    """Number of elements from the first to the last one, holes included; 0 for an empty tensor."""
    span = 1
    for length, step in zip(size, stride, strict=True):
        if length == 0:
            return 0
        span += (length - 1) * step
    return span


def span_bytes(x: Tensor) -> int:
    """Number of bytes from the first to the last element of ``x``, holes included."""
    return x.nbytes if x.is_contiguous() else span_elements(x.size(), x.stride()) * x.element_size()


def same_layout(size: Sequence[int], stride: Sequence[int], other_stride: Sequence[int]) -> bool:
    """Whether both strides address the same elements; the stride of a dimension of size 1 is ignored."""
    return stride == other_stride or all(
        length <= 1 or step == other for length, step, other in zip(size, stride, other_stride, strict=True)
    )


def movable(x: Tensor) -> Tensor:
    """Return ``x`` itself if the bytes that it spans can be moved unchanged, else a dense copy of it."""
    if (x.dtype.is_complex and x.is_conj()) or x.is_neg():  # the flag is not in the bytes
        return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if x.is_contiguous():
        return x
    size, stride = x.size(), x.stride()
    if span_elements(size, stride) > MAX_SPAN_RATIO * x.numel():
        return x.clone(memory_format=torch.contiguous_format)
    return x


def copy_with_layout(x: Tensor) -> Tensor:
    """Return a copy of ``x`` with the same strides, holes included."""
    copy = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)
    copy_elements(x, copy)
    return copy


def copy_elements(source: Tensor, target: Tensor) -> None:
    """Copy by index into a ``target`` of any layout; a dimension of stride 0 is written once."""
    for dim, (length, step) in enumerate(zip(target.size(), target.stride(), strict=True)):
        if length > 1 and step == 0:
            source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    target.copy_(source)
