"""What the file needs apart from transfers: its unused tail is cut off, and an error of a write is reported.

Both are noted with the lock held, and done without it: a file system may take long, and a log handler may call an op.
"""

from __future__ import annotations

import functools
import logging
import threading

from ssdtrain_fx.runtime.book.changes import Change
from ssdtrain_fx.runtime.shield import shielded
from ssdtrain_fx.runtime.storage.slots import SlotAllocator
from ssdtrain_fx.runtime.storage.spill_file import ChunkFile

log = logging.getLogger(__name__)

TRIM_ABOVE_BYTES = 1 << 30
"""A smaller file is never shrunk while the engine is open. A guess."""


class Upkeep:
    """Of one file. Methods need the ledger's lock unless they say otherwise."""

    def __init__(self, file: ChunkFile, slots: SlotAllocator) -> None:
        self._file = file
        self._slots = slots
        self.trim_wanted = False
        self._may_trim = True
        self._peak_end_bytes = 0
        """The most that was allocated since the file was last empty."""
        self._has_warned = False
        self._unreported: OSError | None = None

    def note_allocation(self) -> None:
        """A slot has been allocated."""
        self._peak_end_bytes = max(self._peak_end_bytes, self._slots.end_bytes)

    def note_empty(self) -> None:
        """No slot is in use: the file is to be shrunk if it is far larger than was needed since the last time."""
        peak, self._peak_end_bytes = self._peak_end_bytes, 0
        self.trim_wanted = self._may_trim and self._file.size_bytes > max(TRIM_ABOVE_BYTES, 2 * peak)

    def note_write_error(self, error: OSError) -> None:
        """Let the next :meth:`run` warn, once per engine."""
        if not self._has_warned:
            self._has_warned = True
            self._unreported = error

    @property
    def is_due(self) -> bool:
        """Whether there is something to do. Needs no lock."""
        return self.trim_wanted or self._unreported is not None

    def run(self, lock: threading.RLock, change: Change) -> None:
        """Do what is due. Takes the lock."""
        if self.trim_wanted:
            shielded(functools.partial(self._trim, lock, change))
        with lock, change:
            error, self._unreported = self._unreported, None
        if error is not None:
            log.warning(
                "cannot write to %s (errno %s: %s): tensors that cannot be written stay in memory. Training continues "
                "with correct data but needs more memory than planned. Free disk space or set ssd_dir to another "
                "directory.",
                error.filename or self._file.path,
                error.errno,
                error.strerror or error,
            )

    def _trim(self, lock: threading.RLock, change: Change) -> None:
        """Return the unused tail of the file to the file system.

        The tail is allocated as a slot until then, so that no tensor gets it.
        """
        with lock, change:
            wanted, self.trim_wanted = self.trim_wanted, False
            tail = self._slots.allocate_from_end(self._file.size_bytes) if wanted else None
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
