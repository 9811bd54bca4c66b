"""Changes of the ledger that an interrupt cannot split unnoticed.

KeyboardInterrupt can arrive in the main thread between any two bytecodes, also within ``except`` and ``finally``, and
any allocation may raise MemoryError. Stores that belong together are then incomplete. This cannot be prevented, but it
can be detected, as a database detects a crash by its journal::

    with ledger.lock, ledger.change:        # 1. sets ``unfinished``
        ...                                 # 2. any stores
                                            # 3. clears ``unfinished``, or records a failure if an exception passes

The invariant: **a thread that holds the lock and finds no failure sees every earlier change completely or not at all.**

* A failure ends only the engine. Its ops raise. The registry opens another engine for the next step, and closes this
  one.
* If step 3 itself is interrupted, ``unfinished`` stays set, and the next holder of the lock records the failure.
* An error that an op raises on purpose, such as that of a closed engine, precedes its first store, and is no failure.
* No lock is lost. ``with`` acquires a lock of :mod:`threading` in one instruction, and releases it in one. The
  interpreter does not check for signals between the acquisition and the block, nor before the release.
  ``Condition.wait`` gives no such guarantee, so only the engine's own threads, which receive no signals, use it.
* No thread waits while it holds the lock: it checks the state, releases the lock, and waits in :class:`Progress` for a
  change. An interrupt in between does no harm.

A signal handler or a finaliser may run on a thread that is making a change. They may request statistics or close
engines (see :mod:`ssdtrain_fx.runtime.engines`). A change within a change is refused.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from typing import Any, NamedTuple

from ssdtrain_fx.errors import ActivationLostError, ConfigError, InternalError, SSDTrainError
from ssdtrain_fx.runtime.shield import is_mine

log = logging.getLogger(__name__)


class Failure(NamedTuple):
    """Why an engine cannot be used any more. An exception would hold the frames that it passed, and tensors."""

    error_type: type[BaseException]
    text: str

    @property
    def is_interrupt(self) -> bool:
        """The program or the user ended an op in its midst: no bug and no broken disk."""
        return not issubclass(self.error_type, Exception) or issubclass(self.error_type, MemoryError)


class Progress:
    """Threads that wait, without the lock, until something has changed. Methods need the lock."""

    def __init__(self) -> None:
        self.count = 0
        """Grows with every change that a thread may wait for."""
        self._waiting: collections.deque[Any] = collections.deque()

    def notify_all(self) -> None:
        self.count += 1
        while self._waiting:
            self._waiting.popleft().release()

    def enlist(self) -> Any:
        """A lock that the next :meth:`notify_all` releases: the caller acquires it, without the ledger's lock."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiting.append(waiter)
        return waiter

    def withdraw(self, waiter: Any) -> None:
        """Forget a lock that has not been released in time."""
        with contextlib.suppress(ValueError):  # it was released after all
            self._waiting.remove(waiter)


class Change:
    """See the head of this module. One object serves all changes, because they exclude each other."""

    __slots__ = ("_lock", "_path", "_progress", "failure", "undelivered", "unfinished")

    def __init__(self, lock: threading.RLock, progress: Progress, path: str) -> None:
        """``lock`` knows its owner. ``path`` names the engine in messages."""
        self._path = path
        self._lock = lock
        self._progress = progress
        self.unfinished = False
        self.failure: Failure | None = None
        self.undelivered: BaseException | None = None
        """What interrupted a finaliser, which cannot raise it. The next op does."""

    def __enter__(self) -> None:
        if self.unfinished:
            self._find_unfinished()
        self.unfinished = True

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None and (not isinstance(error, SSDTrainError) or isinstance(error, InternalError)):
            self.fail(error)
        self.unfinished = False

    def fail(self, error: BaseException) -> None:
        """Record that a change was torn apart, and wake everyone. The first failure counts. Needs the lock."""
        if self.failure is None:
            is_telling = isinstance(error, ConfigError)
            self.failure = Failure(type(error), str(error) if is_telling else repr(error))
            if self.failure.is_interrupt:
                # Its text, because a handler may keep what it is given, and the error holds frames.
                log.info("%s interrupted an op: the engine on %s is given up", self.failure.text, self._path)
            else:
                log.error("the I/O of the engine on %s stopped", self._path, exc_info=error)
        self._progress.notify_all()

    def check_usable(self, name: str) -> None:
        """Raise if an op on the tensor ``name`` cannot succeed any more, or if a finaliser was interrupted. Needs the
        lock."""
        failure, undelivered = self.failure, self.undelivered
        if undelivered is not None:
            self.undelivered = None
            try:
                raise undelivered
            finally:
                del undelivered  # its traceback will hold this frame
        if failure is None:
            return
        if issubclass(failure.error_type, ConfigError):
            raise ConfigError(failure.text)
        if failure.is_interrupt:
            raise ActivationLostError(
                f"{name!r} cannot be read back: {failure.text} interrupted an op, so the engine on {self._path} "
                "was given up, and what it had saved is lost. Run the step again from its forward: it opens another "
                "engine."
            )
        raise InternalError(f"{name!r}: the I/O of the engine on {self._path} stopped: {failure.text}")

    def check(self) -> None:
        """Record the failure of a change whose thread was interrupted twice. Needs the lock."""
        if self.unfinished:
            self._find_unfinished()

    def _find_unfinished(self) -> None:
        self._lock.release()
        is_nested = is_mine(self._lock)
        self._lock.acquire()
        if is_nested:
            raise SSDTrainError(
                "a signal handler or a finaliser ran a compiled step, or a part of one, in the midst of an op of "
                "another step on the same thread. Let it set a flag, and run the step when the other one is over."
            )
        self.fail(KeyboardInterrupt())
        self.unfinished = False
