"""The I/O threads of one lane.

They are daemons, and start with the first chunk. Each op wakes only one thread, because every wake-up takes the GIL
from the training thread. A thread that takes a task and leaves others wakes the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.policy.patience import BLOCK_S, Patience

Task = Callable[[], None]


def nothing() -> None:
    """A task that only makes its thread tidy up, or look for a task again."""


class Workers:
    """Threads that run the tasks of one lane. Methods need the ledger's lock, except :meth:`join`."""

    def __init__(
        self, ledger: Ledger, count: int, next_task: Callable[[], Task | None], has_more: Callable[[], bool]
    ) -> None:
        """``next_task`` and ``has_more`` are called with the lock held. ``has_more`` may be wrong: it only says whether
        another thread should look."""
        self.count = count
        self._ledger = ledger
        self._next_task = next_task
        self._has_more = has_more
        self._work = threading.Condition(ledger.lock)
        self._threads: list[threading.Thread] = []
        self.closing = False
        """No further task will be taken."""

    def start(self) -> None:
        """Start the threads, unless they run or are about to end."""
        if len(self._threads) < self.count and not self.closing:
            for number in range(self.count):
                thread = threading.Thread(target=self._run, name=f"ssdtrain-io-{number}", daemon=True)
                self._threads.append(thread)  # first: an interrupt must not leave a thread that nobody joins
                thread.start()

    def wake(self, count: int = 1) -> None:
        """Let ``count`` waiting threads look for a task."""
        self._work.notify(count)

    def close(self) -> None:
        """Let every thread end after its task. Follow it by :meth:`join`."""
        self.closing = True
        self._work.notify_all()

    def join(self, patience: Patience) -> bool:
        """Wait until all threads have ended. False: patience ran out."""
        return join_all(self._ledger, self._threads, patience)

    def _run(self) -> None:
        ledger = self._ledger
        task = None
        try:
            while True:
                with ledger.lock:
                    task = self._wait_for_task()
                ledger.tidy()
                if task is None:
                    return
                task()
                task = None  # it holds tensors
        except BaseException as failure:  # whatever it is, no thread may wait for this one forever
            ledger.stop_because_of(failure)

    def _wait_for_task(self) -> Task | None:
        ledger = self._ledger
        while not self.closing:
            ledger.drain()
            task = self._next_task()
            if task is not None or ledger.trash or ledger.upkeep.trim_wanted:
                if self._has_more():
                    self._work.notify()
                return task or nothing
            self._work.wait()
        return None


def join_all(ledger: Ledger, threads: Sequence[threading.Thread], patience: Patience) -> bool:
    """Wait until ``threads`` have ended, without the ledger's lock. False: patience ran out."""
    for thread in threads:
        while thread.is_alive():
            with ledger.lock:
                left_s = patience.left_s()
            if not left_s:
                return False
            thread.join(min(BLOCK_S, left_s))
    return True
