"""Work that no interrupt splits.

Why: Ctrl-C raises KeyboardInterrupt in the main thread between any two bytecodes, also between the call that opens a
file and the store that keeps its descriptor. Python cannot hold it back, but it raises it in the main thread only. So
work that opens or closes something is done by another thread, and the main thread waits for it.

Guarantees:

* Work that has begun runs to its end, and its effects are complete, whether or not the caller is interrupted.
* An interrupt ends the caller's wait at once.
* The caller holds no lock while it waits. So the work may take any lock that the caller does not hold.

It takes about 0.1 ms: use it for what happens a few times per process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Work(Generic[T]):
    """Work of another thread, and its outcome."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self.results: list[T] = []
        self.errors: list[BaseException] = []

    def do(self) -> None:
        try:
            self.results.append(self._work())
        except BaseException as error:  # the caller raises it
            self.errors.append(error)


def shielded(work: Callable[[], T]) -> T:
    """Return what ``work()`` returns, or raise what it raises."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    task = _Work(work)
    thread = _start(task.do)
    if thread is None:
        return work()
    thread.join()
    if task.errors:
        raise task.errors.pop()  # popped: its traceback holds the frames that hold ``task``
    return task.results.pop()


def in_background(work: Callable[[], object]) -> bool:
    """Begin ``work`` and do not wait for it. False: no thread can be started any more, because the process ends."""
    return _start(work) is not None


def finishes_within(work: Callable[[], object], timeout_s: float) -> bool:
    """Begin ``work``, which may block forever, and wait for it for at most ``timeout_s``. Returns whether it ended."""
    thread = _start(work)
    if thread is None:
        return False
    thread.join(timeout_s)
    return not thread.is_alive()


def _start(work: Callable[[], object]) -> threading.Thread | None:
    thread = threading.Thread(target=work, name="ssdtrain-shield", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # at the end of the process, or the system allows no more threads
        return None
    return thread


def is_mine(lock: threading.RLock) -> bool:
    """Whether this thread holds ``lock``: then it is a signal handler or a finaliser that asks, in the midst of what
    the lock protects."""
    return lock._is_owned()  # type: ignore[attr-defined]  # ``threading.Condition`` uses it in the same way
