"""Follow the copies that devices make: one thread per device and direction.

So a slow device delays no other one, and no thread asks a device for its state with the ledger's lock held.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

import torch

from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.traffic import Direction
from ssdtrain_fx.runtime.lanes.threads.workers import Task, join_all
from ssdtrain_fx.runtime.memory.movers import Mark, Mover
from ssdtrain_fx.runtime.policy.patience import Patience


class _Stream:
    """Copies that a device makes in order, each with what to do when it is over, and the thread that follows them."""

    def __init__(self, lock: threading.RLock, follow: Callable[[_Stream], None], name: str) -> None:
        self.changed = threading.Condition(lock)
        self.copies: collections.deque[tuple[Mark, Task]] = collections.deque()
        self.thread = threading.Thread(target=follow, args=(self,), name=name, daemon=True)


class DeviceStreams:
    """The copies of one lane that are enqueued on devices."""

    def __init__(self, ledger: Ledger, mover: Mover, when_changed: Callable[[], None]) -> None:
        """``when_changed`` is called, with the lock held, after each copy that is over."""
        self._ledger = ledger
        self._mover = mover
        self._when_changed = when_changed
        self._streams: dict[tuple[torch.device, Direction], _Stream] = {}
        """By device and by what the disk does before or after the copy."""
        self._draining = False
        """Nothing will be enqueued on a device any more."""

    def when_over(self, mark: Mark, device: torch.device, direction: Direction, finish: Task) -> None:
        """Call ``finish``, with the lock held, when the device has reached ``mark``. Needs the lock."""
        stream = self._streams.get((device, direction))
        if stream is None:
            stream = _Stream(self._ledger.lock, self._follow, f"ssdtrain-{device}-{direction.name.lower()}")
            self._streams[device, direction] = stream
            stream.thread.start()
        stream.copies.append((mark, finish))
        stream.changed.notify()

    def drain(self, patience: Patience) -> bool:
        """Wait until all copies are over and all threads have ended. Nothing may be enqueued meanwhile. False: patience
        ran out."""
        with self._ledger.lock:
            self._draining = True
            for stream in self._streams.values():
                stream.changed.notify()
        if not join_all(self._ledger, [stream.thread for stream in self._streams.values()], patience):
            return False
        self._streams.clear()
        return True

    def _follow(self, stream: _Stream) -> None:
        """Finish the copies of ``stream`` one after the other. Blocks on the device without the lock."""
        ledger = self._ledger
        try:
            while True:
                with ledger.lock:
                    while not stream.copies:
                        if self._draining:
                            return
                        stream.changed.wait()
                    mark, finish = stream.copies[0]
                self._mover.wait_host(mark)
                with ledger.lock:
                    stream.copies.popleft()
                    ledger.drain()  # bytes whose owner has died meanwhile are not worth holding
                    finish()
                    self._when_changed()
                del mark, finish  # without the lock, because they may hold the last reference to a tensor
                ledger.tidy()
        except BaseException as failure:  # such as a failed assertion in a kernel
            ledger.stop_because_of(failure)
