"""What an engine needs apart from transfers: the unused tail of its file is cut off, and what goes wrong is reported.

Both are noted with the lock held, and done without it: a file system may take long, and a log handler may call an op.
"""

from __future__ import annotations

import functools
import logging
import threading
import time

from ssdtrain_fx.runtime.book.changes import Change
from ssdtrain_fx.runtime.book.counters import Counters
from ssdtrain_fx.runtime.shield import shielded
from ssdtrain_fx.runtime.storage.slots import SlotAllocator
from ssdtrain_fx.runtime.storage.spill_file import ChunkFile

log = logging.getLogger(__name__)

TRIM_ABOVE_BYTES = 1 << 30
"""A smaller file is never shrunk while the engine is open. A guess."""
TRIM_AFTER_S = 10.0
"""For so long, little of a file must have been in use. One short step is no reason: an op would wait for the file to be
shrunk, and the next steps would make it grow again. A guess."""


KEPT_SHARE = 0.25
KEPT_WINDOW = 256
"""A warning is due when this share of so many offloaded tensors stayed in memory to save time. Guesses."""


class Upkeep:
    """Of one engine. Methods need the ledger's lock unless they say otherwise."""

    def __init__(self, file: ChunkFile, slots: SlotAllocator, counters: Counters) -> None:
        self._file = file
        self._slots = slots
        self._counters = counters
        self.trim_wanted = False
        self._may_trim = True
        self._peak_end_bytes = 0
        """The most that was allocated since the file was last empty."""
        self._too_large_since_s: float | None = None
        self._needed_bytes = 0
        """The most that was allocated since then."""
        self._warned: set[str] = set()
        self._unreported: list[tuple[str, *tuple[object, ...]]] = []
        """Messages and their arguments. No error: it would hold the frames that it passed, and tensors."""
        self._window = 0, 0
        """Tensors that were offloaded before the current window began, and that had stayed."""

    def note_allocation(self) -> None:
        """A slot has been allocated."""
        self._peak_end_bytes = max(self._peak_end_bytes, self._slots.end_bytes)

    def note_empty(self) -> None:
        """No slot is in use: the file is to be shrunk if it has been far larger than was needed for some time."""
        peak, self._peak_end_bytes = self._peak_end_bytes, 0
        if self._file.size_bytes <= max(TRIM_ABOVE_BYTES, 2 * peak):
            self._too_large_since_s = None
            return
        now_s = time.monotonic()
        if self._too_large_since_s is None:
            self._too_large_since_s, self._needed_bytes = now_s, 0
        self._needed_bytes = max(self._needed_bytes, peak)
        self.trim_wanted = self._may_trim and now_s - self._too_large_since_s >= TRIM_AFTER_S

    def note_write_error(self, error: OSError) -> None:
        """Let the next :meth:`run` warn, once per engine."""
        self._warn_once(
            "cannot write to %s (errno %s: %s): tensors that cannot be written stay in memory. Training continues "
            "with correct data but needs more memory than planned. Free disk space or set ssd_dir to another "
            "directory.",
            error.filename or self._file.path,
            error.errno,
            error.strerror or str(error),
        )

    def note_stay(self) -> None:
        """A tensor stays in memory to save time. If many do, let the next :meth:`run` warn, once per engine."""
        counters, (offloads, kept) = self._counters, self._window
        offloaded = counters.offloads - offloads
        if offloaded < KEPT_WINDOW:
            return
        stayed = counters.kept_for_time - kept
        self._window = counters.offloads, counters.kept_for_time
        if stayed >= KEPT_SHARE * offloaded:
            self._warn_once(
                "%d of %d tensors stayed in memory, because moving them would have taken more time than max_slowdown "
                "allows. Memory is larger than planned. The disk is slower than in the hardware profile, or "
                "computation is faster. Run `ssdtrain-fx probe` when nothing else runs, or increase max_slowdown.",
                stayed,
                offloaded,
            )

    def _warn_once(self, message: str, *arguments: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._unreported.append((message, *arguments))

    @property
    def is_due(self) -> bool:
        """Whether there is something to do. Needs no lock."""
        return self.trim_wanted or bool(self._unreported)

    def run(self, lock: threading.RLock, change: Change) -> None:
        """Do what is due. Takes the lock."""
        if self.trim_wanted:
            shielded(functools.partial(self._trim, lock, change))
        with lock, change:
            unreported, self._unreported = self._unreported, []
        for message, *arguments in unreported:
            log.warning(message, *arguments)

    def _trim(self, lock: threading.RLock, change: Change) -> None:
        """Return the unused tail of the file to the file system.

        The tail is allocated as a slot until then, so that no tensor gets it.
        """
        with lock, change:
            wanted, self.trim_wanted = self.trim_wanted, False
            self._too_large_since_s = None  # what is needed is counted anew
            tail = self._slots.allocate_tail(self._needed_bytes, self._file.size_bytes) if wanted else None
        if tail is None:
            return
        try:
            self._file.shrink(tail.offset_bytes, tail.end_bytes)
        except OSError as error:  # costs disk space, nothing else
            self._may_trim = False
            log.warning("cannot shrink %s: %s. It keeps its size until the engine is closed.", self._file.path, error)
        finally:
            with lock, change:
                self._slots.free(tail)
