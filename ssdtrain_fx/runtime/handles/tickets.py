"""Reloadings: what the op ``reload`` returns, and what the op ``wait`` turns into the reloaded tensor.

Why the reloaded tensor has no name between the two: a compiler sees to it that a value is made before it is read. It
is less careful about a value that is written a second time, and what a ``wait`` that fills its argument does is such a
write. So the tensor stays in here, and comes into the graph as the result of ``wait``.

Where all values of a graph have to be tensors, a *ticket* stands for the reloading.

Guarantees:

* The tensor that is being filled and the owner of what it comes from live until the wait, or as long as the reloading,
  or the ticket's storage. One that is dropped before its wait, by an exception in backward, leaves nothing behind.
* A ticket has 8 bytes of its own and a number that is never used twice.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.runtime.handles.tokens import Owner, handle_of


class Reloading:
    """A tensor that is being filled with what ``owner`` stands for."""

    __slots__ = ("_owner", "_tensor")

    def __init__(self, tensor: Tensor, owner: Owner) -> None:
        self._tensor: Tensor | None = tensor
        self._owner: Owner | None = owner

    def take(self) -> tuple[Tensor, Owner]:
        """The tensor and the owner, once. Nothing is kept alive then."""
        tensor, owner = self._tensor, self._owner
        self._tensor = self._owner = None
        if tensor is None or owner is None:
            raise InternalError("wait got what another wait has taken already")
        return tensor, owner


class _TicketBytes(bytearray):
    """The memory of one ticket; the ticket's storage keeps it alive."""

    __slots__ = ("number", "open")
    number: int
    open: dict[int, Reloading]

    def __del__(self) -> None:
        self.open.pop(self.number, None)


class Tickets:
    """The tickets of one process that have not been redeemed."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, Reloading] = {}

    def issue(self, reloading: Reloading) -> Tensor:
        """A ticket for ``reloading``."""
        number = next(self._numbers)
        memory = _TicketBytes(number.to_bytes(8, "little"))
        memory.number, memory.open = number, self._open
        self._open[number] = reloading
        return torch.frombuffer(memory, dtype=torch.int64)

    def redeem(self, ticket: Tensor) -> Reloading:
        """A ticket can be redeemed once. It keeps nothing alive then, and may outlive the tensor."""
        number = handle_of(ticket)
        reloading = self._open.pop(number, None)
        if reloading is None:
            raise InternalError(f"wait got a ticket with number {number}, which no reload issued or which was used")
        return reloading
