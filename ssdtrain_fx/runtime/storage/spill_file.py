"""One unnamed file that holds the bytes of offloaded tensors.

Why: activations may hold private training data and must never outlive the process. A file without a name cannot be
opened by others and is deleted with its last descriptor, even after ``kill -9``.

Guarantees:

* The file has mode 0600 and no name. Where the file system does not support O_TMPFILE, it has a name between creation
  and unlink. NFS keeps a name (``.nfs...``) for an unlinked file until it is closed.
* Growth leaves room for other files (:mod:`ssdtrain_fx.runtime.storage.space`).
* Without direct I/O, the page cache holds little of the file: what has been written or read is dropped from it.
* A forked child does not hold the file (:mod:`ssdtrain_fx.runtime.storage.forks`).
* :meth:`SpillFile.write` and :meth:`SpillFile.read` move all bytes or raise OSError.
* :meth:`SpillFile.grow` returns the error instead of raising it: a full disk must not stop training.
* All methods may be called from any thread. ``grow`` and ``shrink`` exclude each other; reads and writes take no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ssdtrain_fx.runtime.alignment import ALIGNMENT_BYTES
from ssdtrain_fx.runtime.storage.forks import close_kept, keep_from_children
from ssdtrain_fx.runtime.storage.rank import process_rank, rank_directory, remove_if_empty
from ssdtrain_fx.runtime.storage.space import DiskSpace

log = logging.getLogger(__name__)

GROWTH_STEP_BYTES = 256 << 20
DROP_STEP_BYTES = 16 << 20
"""Without direct I/O, the page cache is dropped each time that this much has been moved. A guess."""

_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF})
_NO_O_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS})


class ChunkFile(Protocol):
    """The interface of a spill file, as the engine uses it. Tests implement it to inject faults."""

    path: str
    io_path: str
    direct: bool
    """Transfers bypass the page cache."""
    stripe_bytes: int | None
    """If set, another file begins at each multiple of it; chunks end there."""

    @property
    def size_bytes(self) -> int: ...

    def locate(self, offset_bytes: int) -> tuple[int, int]:
        """The descriptor of the file that holds the byte at ``offset_bytes``, and its offset there."""
        ...

    def grow(self, size_bytes: int) -> OSError | None: ...

    def shrink(self, size_bytes: int, from_bytes: int) -> None: ...

    def write(self, data: memoryview, offset_bytes: int) -> None: ...

    def read(self, data: memoryview, offset_bytes: int) -> None: ...

    def close(self) -> None: ...


class SpillFile:
    """The file of one engine. Addresses, lengths and offsets are multiples of 4096 bytes."""

    stripe_bytes: int | None = None

    def __init__(
        self, directory: str, reserve_bytes: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """See :class:`ssdtrain_fx.runtime.storage.space.DiskSpace` for ``reserve_bytes`` and ``clock``."""
        rank = process_rank()
        self.path = f"{directory}/(unnamed spill file{'' if rank is None else f' of rank {rank}'})"
        self._descriptor = -1
        self._directory = self._own_directory = directory
        self._size_bytes = 0
        self._size_lock = threading.Lock()
        self._step_bytes = GROWTH_STEP_BYTES
        self._undropped_bytes = 0
        try:
            with rank_directory(directory, rank) as self._own_directory:
                direct_descriptor = _open_unnamed(self._own_directory, os.O_DIRECT)
                if direct_descriptor is None:
                    descriptor = _open_unnamed(self._own_directory, 0)
                    assert descriptor is not None
                else:
                    descriptor = direct_descriptor
                self._descriptor = descriptor
            keep_from_children(descriptor)
            self.direct = direct_descriptor is not None and _accepts_direct_io(descriptor)
        except BaseException:
            self.close()
            raise
        self.io_path = "posix O_DIRECT" if self.direct else "posix buffered"
        if not self.direct:
            _warn_of_buffered_io(directory)
        self._space = DiskSpace(descriptor, reserve_bytes, clock)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def fileno(self) -> int:
        return self._descriptor

    def locate(self, offset_bytes: int) -> tuple[int, int]:
        return self._descriptor, offset_bytes

    def grow(self, size_bytes: int) -> OSError | None:
        """Grow the file to at least ``size_bytes``, with its blocks reserved. Returns the error if that failed."""
        if size_bytes <= self._size_bytes:
            return None
        with self._size_lock:
            if size_bytes <= self._size_bytes:
                return None
            in_steps = -(-size_bytes // self._step_bytes) * self._step_bytes
            return self._space.grow(self._size_bytes, size_bytes, in_steps, self._grow_to)

    def _grow_to(self, size_bytes: int) -> OSError | None:
        try:
            os.posix_fallocate(self._descriptor, self._size_bytes, size_bytes - self._size_bytes)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                with contextlib.suppress(OSError):  # a disk that has disappeared refuses this too
                    os.ftruncate(self._descriptor, self._size_bytes)  # free what was reserved before the failure
                return error.with_traceback(None)
            try:
                os.ftruncate(self._descriptor, size_bytes)
            except OSError as truncate_error:
                return truncate_error.with_traceback(None)
        self._size_bytes = size_bytes
        return None

    def shrink(self, size_bytes: int, from_bytes: int) -> None:
        """Cut the file from ``from_bytes`` to ``size_bytes``, unless it has grown beyond ``from_bytes``.

        The caller ensures that ``[size_bytes, from_bytes)`` is not in use. A thread that needs more space must grow the
        file first. So either 1. the growth comes first and nothing is cut, or 2. the cut comes first and the growth
        reserves the range again.
        """
        with self._size_lock:
            if size_bytes < self._size_bytes == from_bytes:
                os.ftruncate(self._descriptor, size_bytes)
                self._size_bytes = size_bytes

    def write(self, data: memoryview, offset_bytes: int) -> None:
        done = 0
        while done < len(data):
            count = os.pwrite(self._descriptor, data[done:], offset_bytes + done)
            done = bytes_done(done, count, len(data), "write", offset_bytes, self.path)
        self._drop_cached_pages(done)

    def read(self, data: memoryview, offset_bytes: int) -> None:
        done = 0
        while done < len(data):
            count = os.preadv(self._descriptor, [data[done:]], offset_bytes + done)
            done = bytes_done(done, count, len(data), "read", offset_bytes, self.path)
        self._drop_cached_pages(done)

    def close(self) -> None:
        """Free the disk space. Further use raises OSError."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close_kept(descriptor)
        if self._own_directory != self._directory:
            remove_if_empty(self._own_directory)  # on NFS, the file had a name in it until now
        self._size_bytes = 0

    def _drop_cached_pages(self, moved_bytes: int) -> None:
        """Drop the file from the page cache from time to time, which would hold it a second time.

        The advice starts to write dirty pages, does not wait for them, and drops clean ones: so it drops what was
        written before the previous advice. Several threads may lose a count of each other, which only delays it.
        """
        if self.direct:
            return
        self._undropped_bytes += moved_bytes
        if self._undropped_bytes >= DROP_STEP_BYTES:
            self._undropped_bytes = 0
            with contextlib.suppress(OSError):  # it is only advice
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_done(done: int, count: int, total: int, verb: str, offset_bytes: int, path: str) -> int:
    """How many of ``total`` bytes are done, after an attempt that started at byte ``done`` moved ``count`` bytes.

    After a short transfer this is rounded down, so that the next attempt starts on an aligned offset. Raises OSError if
    there is no progress.
    """
    after = done + count
    if after < total:
        after -= after % ALIGNMENT_BYTES
    if after <= done:
        raise OSError(errno.EIO, f"short {verb}: {done + count} of {total} bytes at offset {offset_bytes} of", path)
    return after


def _open_unnamed(directory: str, extra_flags: int) -> int | None:
    """Open a file without a name. Returns its descriptor, or None if the file system refuses ``extra_flags``."""
    flags = os.O_RDWR | os.O_CLOEXEC | extra_flags
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_O_TMPFILE:
            raise
    descriptor, name = tempfile.mkstemp(prefix="ssdtrain-", dir=directory)
    try:
        try:
            if extra_flags:
                reopened = os.open(name, flags | os.O_NOFOLLOW)
                os.close(descriptor)
                descriptor = reopened
        finally:
            Path(name).unlink()
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EINVAL:
            return None
        raise
    return descriptor


def _accepts_direct_io(descriptor: int) -> bool:
    """Whether a direct transfer works: some file systems accept O_DIRECT at open and refuse the first transfer.

    If it does not, O_DIRECT is cleared."""
    with mmap.mmap(-1, ALIGNMENT_BYTES) as block:
        try:
            os.pwrite(descriptor, block, 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
                return False
            return True  # a full disk is handled when tensors are written
    os.ftruncate(descriptor, 0)
    return True


@functools.cache
def _warn_of_buffered_io(directory: str) -> None:
    log.warning(
        "%s does not support direct I/O (O_DIRECT): transfers go through the page cache, which costs memory and CPU "
        "time. Set ssd_dir to a directory on ext4 or XFS.",
        directory,
    )
