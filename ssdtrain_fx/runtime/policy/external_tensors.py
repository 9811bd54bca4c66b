"""Offloaded tensors that come from outside their graph and that their caller holds. None of them is written twice.

Several graphs may save the same activation. It is recognised by its address, its layout and a hash of all its bytes.
The bytes themselves have to be compared, because nothing else tells whether somebody wrote to them in between: a write
through ``.data``, NumPy, DLPack or an extension changes no version counter. A hash of some of the bytes would miss a
write to the others. With 128 bits, two contents have the same hash by chance with a probability of 3e-39.

The hash costs less than the write that it may save: XXH3 takes 0.04 s of one core per GB (2 cores, 2026-11-24), a disk
of 2 GB/s 0.5 s. It needs bytes that the CPU can read, so CUDA tensors are not recognised: each graph writes its own
copy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import xxhash
from torch import Tensor

from ssdtrain_fx.runtime.memory.movers import Region
from ssdtrain_fx.runtime.memory.raw_memory import bytes_at

MIN_SWEEP = 64
"""So few are cheap to keep."""

Content = tuple[int, bytes, tuple[int, ...], tuple[int, ...], torch.dtype]


def content_of(x: Tensor, span: Region) -> Content:
    """What two tensors have in common if one write serves both: the address of ``x``, its layout, and the bytes of
    ``span`` that are moved for it."""
    digest = xxhash.xxh3_128_digest(bytes_at(span.address, span.byte_count))
    return (x.data_ptr(), digest, tuple(x.size()), x.stride(), x.dtype)


class ExternalTensors:
    """Handles of offloaded tensors, by content. Methods need the ledger's lock."""

    def __init__(self) -> None:
        self._by_content: dict[Content, int] = {}
        self._sweep_at = MIN_SWEEP

    def __len__(self) -> int:
        """How many are remembered, those that are not known any more included."""
        return len(self._by_content)

    def find(self, content: Content) -> int | None:
        """The handle under which a tensor with this content was offloaded; None if there is none."""
        return self._by_content.get(content)

    def add(self, content: Content, handle: int, is_known: Callable[[int], bool]) -> None:
        """Record that a tensor was offloaded as ``handle``.

        Forgets handles that are not ``is_known`` when there are twice as many as were known the last time, so that n
        tensors take O(n) steps.
        """
        self._by_content[content] = handle
        if len(self._by_content) >= self._sweep_at:
            self._by_content = {other: known for other, known in self._by_content.items() if is_known(known)}
            self._sweep_at = max(MIN_SWEEP, 2 * len(self._by_content))
