"""Sizes of tensors as numbers: the hint for a symbolic size, 0 for one that depends on data."""

from __future__ import annotations

from typing import Any

import torch

from ssdtrain_fx import _torch_private

Shape = tuple[int, ...]


def hint(size: Any) -> int:
    if type(size) is int:
        return size
    try:
        return _torch_private.size_hint(size)
    except ValueError:
        return 0


def shape_of(tensor: Any) -> Shape:
    return tuple(map(hint, tensor.shape)) if isinstance(tensor, torch.Tensor) else ()


def touched_bytes(tensor: Any) -> int:
    """Bytes of the distinct elements. An expanded dimension repeats elements, so it does not count."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return 0
    count = tensor.dtype.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if type(stride) is not int or stride != 0:
            count *= hint(size)
    return count
