"""The owner of an offloaded tensor, and the token: the small CPU tensor that autograd saves in its place.

A token is built over a Python object. Autograd, AOTAutograd and compiled code all drop references to a tensor's storage
when they no longer need it, and only the storage can tell. So the storage holds the owner, and the owner's death tells
the engine.

Guarantees:

* Every token has its own 8 bytes, because a compiler may reuse the memory of a dead token for another tensor.
* All tokens of one offload share one owner. It dies when the last storage of a token dies and nothing else holds it.
* An owner's finaliser may run during garbage collection, at any moment, on any thread, even on one that holds the
  engine's lock: what it calls waits for nothing (:meth:`ssdtrain_fx.runtime.book.ledger.Ledger.note_death`).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ssdtrain_fx.errors import InternalError


class Engine(Protocol):
    """The part of :class:`ssdtrain_fx.runtime.engine.Engine` that the ops reach through an owner."""

    def release(self, owner: Owner, x: Tensor, *, deferred: bool = False, exclusive: bool = False) -> Owner: ...

    def reload(
        self,
        owner: Owner,
        size: Sequence[int],
        stride: Sequence[int] | None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor: ...

    def wait(self, y: Tensor, owner: Owner) -> None: ...

    def hand_over(self, y: Tensor) -> Tensor: ...


class Owner:
    """Keeps an offloaded tensor reloadable from ``engine``. When the owner dies, it passes its handle, which is no
    longer reachable, to ``note_death``."""

    __slots__ = ("__weakref__", "_note_death", "engine", "handle")

    def __init__(self, engine: Engine, handle: int, note_death: Callable[[int], object]) -> None:
        self.engine = engine
        self.handle = handle
        self._note_death = note_death

    def __del__(self) -> None:
        try:
            note_death = self._note_death
        except AttributeError:  # an interrupt came before it was stored
            return
        note_death(self.handle)


class OwnerRef(weakref.ref[Owner]):
    """A reference to an owner that tells its end: ``OwnerRef(owner, deque.append)`` appends itself, without any Python
    code that an interrupt could keep from it."""

    __slots__ = ("handle",)
    handle: int


class _TokenBytes(bytearray):
    """The memory of one token; the tensor's storage keeps it alive, and it keeps the owner alive."""

    __slots__ = ("owner",)
    owner: Owner


def make_token(owner: Owner) -> Tensor:
    """A new int64 tensor of shape (1,) that holds the handle and a share of ``owner``."""
    memory = _TokenBytes(owner.handle.to_bytes(8, "little"))
    memory.owner = owner
    return torch.frombuffer(memory, dtype=torch.int64)


def handle_of(token: Tensor) -> int:
    """The handle that is written in ``token``.

    ``token.item()`` would release the GIL, and while an I/O thread is awake, it takes long to acquire it again.
    """
    address = token.data_ptr()
    if not address or not token.is_cpu:
        raise InternalError(f"expected a token in CPU memory, found a tensor on {token.device} at address {address:#x}")
    return ctypes.c_int64.from_address(address).value
