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
from collections.abc import Generator
from typing import Any, cast

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.runtime.book.records import MicroBatch


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.micro_batch: MicroBatch | None = None


class ScheduleHints:
    """The micro-batch whose forward a thread is in, and the one whose backward comes next in this process.

    Backward may run in another thread than the one that says what comes next, as it does on a GPU.
    """

    def __init__(self) -> None:
        self._of_thread = _OfThread()
        self.expected: MicroBatch | None = None

    @property
    def micro_batch(self) -> MicroBatch | None:
        """None: nobody has named it."""
        return self._of_thread.micro_batch

    @contextlib.contextmanager
    def forward_of(self, key: MicroBatch) -> Generator[None]:
        _check(key, "micro_batch")
        before, self._of_thread.micro_batch = self._of_thread.micro_batch, key
        try:
            yield
        finally:
            self._of_thread.micro_batch = before

    def expect(self, key: MicroBatch) -> None:
        _check(key, "expect_backward")
        self.expected = key

    def begun(self, key: MicroBatch | None) -> None:
        """Forget what was expected if it was ``key``, whose backward begins."""
        if self.expected == key:
            self.expected = None


def _check(key: Any, name: str) -> None:
    if not _is_key(key):
        raise ConfigError(f"{name}({key!r}): expected the number of a micro-batch, a string, or a tuple of these.")


def _is_key(key: Any) -> bool:
    return type(key) in (int, str) or (type(key) is tuple and all(map(_is_key, cast(tuple[Any, ...], key))))


schedule_hints = ScheduleHints()
"""Those of this process."""


@contextlib.contextmanager
def micro_batch(key: MicroBatch) -> Generator[None]:
    """Say that forwards within the block belong to the micro-batch ``key``. See `expect_backward`.

    A key may be used again when the backward of its last forward is over. Call this outside of compiled code.

    Args:
        key: its number, a string, or a tuple of these. The stages of one process share keys: if there are several, put
            the number of the stage into the key.

    Raises:
        ConfigError: ``key`` is something else.
    """
    with schedule_hints.forward_of(key):
        yield


def expect_backward(key: MicroBatch) -> None:
    """Say that the next backward that begins is that of the micro-batch ``key``.

    While the present backward computes, the tensors of ``key`` are read ahead, into as much memory as the present one
    has finished with. Without this call, the order is guessed: that of forward, or its reverse, and nothing is read
    ahead in schedules that put a forward between two backwards, such as 1F1B. What is read ahead there is in memory
    during that forward.

    The expectation holds until that backward begins, or until the next call. If there is no such micro-batch, the order
    is guessed. A wrong expectation costs a read, and memory until another backward begins. All this concerns models
    compiled as several graphs, and stages with ``forwards_in_flight`` above 1. Call it outside of compiled code.

    Raises:
        ConfigError: ``key`` is neither a number, nor a string, nor a tuple of these.
    """
    schedule_hints.expect(key)
