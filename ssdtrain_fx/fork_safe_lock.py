"""A lock that a forked child can take.

Why: a fork copies locks in the state they are in, but only the thread that forks. A lock that another thread held is
then held by nobody, and the child waits for it forever: a worker that is forked while another thread compiles would
hang in its own first compilation.

The child finds what the lock protects as it was at the fork. Use it where every state between two statements is valid.
"""

from __future__ import annotations

import os
import threading
import weakref


class ForkSafeLock:
    """``with lock.current: ...``

    The ``with`` statement is that of a plain lock, which no KeyboardInterrupt leaves held.
    """

    def __init__(self) -> None:
        self.current = threading.Lock()
        """Another lock in a forked child, which is free. The thread that forks may hold the lock of its parent."""
        _locks.add(self)


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_in_child() -> None:
    for lock in _locks:
        lock.current = threading.Lock()


os.register_at_fork(after_in_child=_renew_in_child)
