"""Tensors that were offloaded and that somebody outside the graph holds: the same one is not written twice.

An activation that goes into several graphs may be saved by each of them. They find one another by the storage of the
tensor, its place in it, and its version, which every write through PyTorch changes. An address alone says nothing: a
tensor dies, and the next one gets its memory. Here a weak reference keeps the identity of a storage from being given
to another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ssdtrain_fx._torch_private import StorageWeakRef, storage_key

Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    storage: StorageWeakRef
    version: int
    handle: int


class HeldTensors:
    """Handles of offloaded tensors, by what the tensor was. Methods need the ledger's lock."""

    def __init__(self) -> None:
        self._by_place: dict[Place, _Held] = {}

    def find(self, x: Tensor) -> int | None:
        """The handle under which ``x`` was offloaded, if it has not been written to since then."""
        held = self._by_place.get(_place_of(x))
        return held.handle if held is not None and held.version == _version_of(x) else None

    def add(self, x: Tensor, handle: int, is_known: Callable[[int], bool]) -> None:
        """``x`` was offloaded as ``handle``. What has died or is not ``is_known`` any more is forgotten."""
        for place, held in list(self._by_place.items()):
            if held.storage.expired() or not is_known(held.handle):
                del self._by_place[place]
        if not x.is_inference():
            self._by_place[_place_of(x)] = _Held(StorageWeakRef(x.untyped_storage()), _version_of(x), handle)


def _place_of(x: Tensor) -> Place:
    return (storage_key(x), int(x.storage_offset()), tuple(x.size()), x.stride(), x.dtype)


def _version_of(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version
