"""What one call site of ``offload`` has learned about the tensors that it moves.

Why: with cold caches, every call and every lookup costs time. A call site offloads the same kind of tensor in every
step, so what follows from its shape is worked out once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ssdtrain_fx.runtime.lanes.lane import Lane
from ssdtrain_fx.runtime.sites import Site


class Moved(NamedTuple):
    """A CPU tensor that was moved as it is. Immutable: threads may offload other shapes at the same call site."""

    lane: Lane
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    byte_count: int

    def is_like(self, x: Tensor) -> bool:
        return (
            x.is_cpu
            and self.size == x.size()
            and self.stride == x.stride()
            and self.dtype is x.dtype
            and not x.is_neg()  # complex tensors are never recorded
        )


class CallSite:
    """One ``offload`` in a graph, and the last tensor that it moved as it was."""

    __slots__ = ("last", "site")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.last: Moved | None = None
