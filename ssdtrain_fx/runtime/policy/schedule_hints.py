"""What a training loop says about its schedule, so that reading ahead need not guess.

    with ssdtrain_fx.micro_batch(3):
        loss = stage(x)                  # tensors that this forward offloads belong to micro-batch 3
    ...
    ssdtrain_fx.expect_backward(3)       # while the present backward computes, read ahead for micro-batch 3
    backward_of(2)

These are SSDTrain's scheduler hints. A hint changes when tensors are read, never what a graph gets.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Hashable

from ssdtrain_fx.errors import ConfigError

UNTOLD = object()
"""Stands for a micro-batch that nobody has named."""


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.micro_batch: Hashable = UNTOLD


class ScheduleHints:
    """The micro-batch whose forward a thread is in, and the one whose backward comes next in this process.

    Backward may run in another thread than the one that says what comes next, as it does on a GPU.
    """

    def __init__(self) -> None:
        self._of_thread = _OfThread()
        self.expected: Hashable = UNTOLD

    @property
    def micro_batch(self) -> Hashable:
        return self._of_thread.micro_batch

    @contextlib.contextmanager
    def forward_of(self, key: Hashable) -> Generator[None]:
        _check(key, "micro_batch")
        before, self._of_thread.micro_batch = self._of_thread.micro_batch, key
        try:
            yield
        finally:
            self._of_thread.micro_batch = before

    def expect(self, key: Hashable) -> None:
        _check(key, "expect_backward")
        self.expected = key

    def begun(self, key: Hashable) -> None:
        """Forget what was expected if it was ``key``, whose backward begins."""
        if self.expected is not UNTOLD and self.expected == key:
            self.expected = UNTOLD


def _check(key: Hashable, name: str) -> None:
    try:
        hash(key)
    except TypeError:
        raise ConfigError(
            f"{name}({key!r}): a {type(key).__name__} cannot be a key. Use the number of the micro-batch."
        ) from None


schedule_hints = ScheduleHints()
"""Those of this process."""


@contextlib.contextmanager
def micro_batch(key: Hashable) -> Generator[None]:
    """Say that forwards within the block belong to the micro-batch ``key``: its number, or any other hashable value.

    A key may be used again when the backward of its last forward is over. See :func:`expect_backward`.

    Raises:
        ConfigError: ``key`` is not hashable.
    """
    with schedule_hints.forward_of(key):
        yield


def expect_backward(key: Hashable) -> None:
    """Say that the next backward that begins is that of the micro-batch ``key``.

    While the present backward computes, the tensors of ``key`` are read ahead, into as much memory as the present one
    has finished with. Without this call, the order is guessed: that of forward, or its reverse, and nothing is read
    ahead in schedules that put a forward between two backwards, such as 1F1B. What is read ahead there is in memory
    during that forward.

    The expectation holds until that backward begins, or until the next call. A wrong one costs a read, and memory until
    another backward begins. It has an effect on models compiled as several graphs, and with ``forwards_in_flight``
    above 1.

    Raises:
        ConfigError: ``key`` is not hashable.
    """
    schedule_hints.expect(key)
