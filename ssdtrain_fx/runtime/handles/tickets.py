"""Reloadings: what the op ``reload`` returns, and what the op ``wait`` turns into the reloaded tensor.

The reloaded tensor is not a value of the graph between the two ops. A compiler ensures that a value is produced before
it is read, but it is less careful about a value that is written a second time, and a ``wait`` that fills its argument
would write it a second time. So the tensor stays here, and enters the graph as the result of ``wait``.

If all values of a graph have to be tensors, a *ticket* stands for the reloading.

Guarantees:

* The tensor that is being filled and the owner of its data live until the wait, or as long as the reloading or the
  ticket's storage. A reloading that is dropped before its wait, by an exception in backward, leaves nothing behind.
* A ticket has its own 8 bytes and a number that is never reused.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.runtime.handles.tokens import Owner, handle_of


class Reloading:
    """A tensor that is being filled with the data of ``owner``."""

    __slots__ = ("_owner", "_tensor")

    def __init__(self, tensor: Tensor, owner: Owner) -> None:
        self._tensor: Tensor | None = tensor
        self._owner: Owner | None = owner

    def take(self) -> tuple[Tensor, Owner]:
        """Return the tensor and the owner, once. The reloading keeps nothing alive afterwards."""
        tensor, owner = self._tensor, self._owner
        self._tensor = self._owner = None
        if tensor is None or owner is None:
            raise InternalError("wait got a reloading that another wait has already taken")
        return tensor, owner


class _TicketBytes(bytearray):
    """The memory of one ticket; the ticket's storage keeps it alive."""

    __slots__ = ("number", "open")
    number: int
    open: dict[int, Reloading]

    def __del__(self) -> None:
        try:
            opened, number = self.open, self.number
        except AttributeError:  # an interrupt came before they were stored
            return
        opened.pop(number, None)


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
        """Return the reloading of ``ticket``, once. The ticket keeps nothing alive afterwards; it may outlive the
        tensor."""
        number = handle_of(ticket)
        reloading = self._open.pop(number, None)
        if reloading is None:
            raise InternalError(f"wait got a ticket with number {number}, which no reload issued or a wait has used")
        return reloading
