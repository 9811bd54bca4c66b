"""Tensors that stay in memory, because moving them would stall the step for too long.

A tensor that was not released yet is still in its own memory. A released one is in memory that the engine holds: the
tensor itself, if nobody else can write to it, or a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssdtrain_fx._torch_private import storage_key
from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Entry
from ssdtrain_fx.runtime.memory.layout import copy_elements, copy_with_layout, same_layout

TRITON_ALIGNMENT_BYTES = 16


class Residents:
    """The tensors of one engine that stay. Methods are called without the ledger's lock."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def keep(self, entry: Entry, x: Tensor, source: Tensor, *, exclusive: bool) -> None:
        """Keep a copy of ``x`` in memory, or ``x`` itself if its memory is ``exclusive`` and fills most of its storage.

        In other cases a reference to ``x`` does not protect its memory: a compiler may write the next tensor to it
        after its last reader (``buf55 = buf42  # reuse``), no matter what else holds it.
        """
        ledger = self._ledger
        is_copy = source.data_ptr() != x.data_ptr()
        holds_more = source.untyped_storage().nbytes() >= 2 * entry.byte_count
        resident = source if is_copy or (exclusive and not holds_more) else copy_with_layout(source)
        with ledger.lock, ledger.change:
            if entry.resident is None:  # otherwise another thread has released it meanwhile
                ledger.settle_in(entry, resident)
            if entry.unsafe == 0:
                ledger.drop_source(entry)
        ledger.tidy()

    def reload(self, entry: Entry, stride: Sequence[int]) -> Tensor:
        """The tensor that stayed in memory; a copy of it if another layout is requested, or kernels cannot read it."""
        ledger = self._ledger
        with ledger.lock, ledger.change:
            ledger.begin_op(entry.name)
            ledger.counters.reloads += 1
            resident = entry.resident
            source = entry.source
        fits = resident is not None and same_layout(entry.size, stride, resident.stride()) and _is_aligned(resident)
        if resident is not None and fits:
            y = resident.as_strided(entry.size, stride)
        else:
            y = torch.empty_strided(entry.size, stride, dtype=entry.dtype, device=entry.device)
            if resident is None:  # not released yet
                assert source is not None
                resident = source.tensor
            copy_elements(resident, y)
        with ledger.lock, ledger.change:
            entry.waited_addresses.add(y.data_ptr())
        ledger.tidy()
        return y

    def hand_over(self, y: Tensor) -> Tensor:
        """``y`` for a caller that may write to it; a copy if another backward could request the same memory."""
        ledger = self._ledger
        with ledger.lock, ledger.change:
            ledger.drain()
            shared = storage_key(y) in ledger.residents
        ledger.tidy()
        return copy_with_layout(y) if shared else y


def _is_aligned(x: Tensor) -> bool:
    """Whether kernels can read ``x``. Triton's take for granted that what they get starts at such an address."""
    return x.device.type == "cpu" or x.data_ptr() % TRITON_ALIGNMENT_BYTES == 0
