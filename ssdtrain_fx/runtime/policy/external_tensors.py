"""Offloaded tensors that come from outside their graph and that their caller holds. None of them is written twice.

Several graphs may save the same activation. It is recognised by the storage of the tensor, its place in the storage,
and its version, which every write through PyTorch changes. An address alone is not enough: when a tensor dies, another
one may get its memory. A weak reference keeps the identity of a storage from being reused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ssdtrain_fx._torch_private import StorageWeakRef, storage_key

Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class _External:
    storage: StorageWeakRef
    version: int
    handle: int


class ExternalTensors:
    """Handles of offloaded tensors, by the place of the tensor. Methods need the ledger's lock."""

    def __init__(self) -> None:
        self._by_place: dict[Place, _External] = {}

    def find(self, x: Tensor) -> int | None:
        """The handle under which ``x`` was offloaded; None if there is none or ``x`` was written to since then."""
        known = self._by_place.get(_place_of(x))
        return known.handle if known is not None and known.version == _version_of(x) else None

    def add(self, x: Tensor, handle: int, is_known: Callable[[int], bool]) -> None:
        """Record that ``x`` was offloaded as ``handle``. Forgets dead tensors and handles that are not ``is_known``."""
        for place, known in list(self._by_place.items()):
            if known.storage.expired() or not is_known(known.handle):
                del self._by_place[place]
        if not x.is_inference():
            self._by_place[_place_of(x)] = _External(StorageWeakRef(x.untyped_storage()), _version_of(x), handle)


def _place_of(x: Tensor) -> Place:
    return (storage_key(x), int(x.storage_offset()), tuple(x.size()), x.stride(), x.dtype)


def _version_of(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version
