"""Compare results bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ssdtrain_fx import _torch_private


def assert_same_bits(found: object, expected: object, *, strides: bool = False) -> None:
    """Raise AssertionError unless every tensor in ``found`` has the bits of its counterpart in ``expected``.

    Args:
        found: tensors and other values, in nested tuples, lists, dicts and named tuples. A NaN equals a NaN with the
            same bits; 0.0 and -0.0 differ.
        expected: the values to compare with, in the same structure.
        strides: compare strides too.
    """
    ours, theirs = _torch_private.leaves_by_path(found), _torch_private.leaves_by_path(expected)
    assert ours.keys() == theirs.keys(), f"found {list(ours)}, expected {list(theirs)}"
    assert any(isinstance(value, Tensor) for value in theirs.values()), "expected contains no tensor to compare"
    for path, value in theirs.items():
        difference = _difference(ours[path], value, strides=strides)
        assert not difference, f"{path or 'the result'}: {difference}"


def _difference(found: object, expected: object, *, strides: bool) -> str:
    if not (isinstance(found, Tensor) and isinstance(expected, Tensor)):
        return "" if type(found) is type(expected) and found == expected else f"{found!r} instead of {expected!r}"
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if strides and found.stride() != expected.stride():
        return f"strides {found.stride()} instead of {expected.stride()}"
    differs = (_bytes_of(found) != _bytes_of(expected)).any(-1)
    if not differs.any():
        return ""
    ours, theirs = (value.detach().reshape(-1)[differs][0].item() for value in (found, expected))
    return f"{int(differs.sum())} of {found.numel()} elements differ, the first is {ours} instead of {theirs}"


def _bytes_of(value: Tensor) -> Tensor:
    """The bytes of every element, as a tensor of shape [elements, bytes]."""
    # A copy: contiguous() leaves a single element as it is, with any strides, and view() then refuses them.
    flat = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return flat.reshape(-1, 1).view(torch.uint8)
