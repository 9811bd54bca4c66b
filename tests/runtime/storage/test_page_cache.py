"""Without direct I/O, the page cache would hold a second copy of what was offloaded."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssdtrain_fx.runtime.storage.directory import MEMORY_FILE_SYSTEMS, file_system_type
from ssdtrain_fx.runtime.storage.spill_file import DROP_STEP_BYTES, SpillFile

MIB = 1 << 20
SIZE_BYTES = 4 * DROP_STEP_BYTES


def cached_bytes(file: SpillFile) -> int:
    """How much of the file the page cache holds."""
    size_bytes = os.fstat(file.fileno()).st_size
    c_library = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(file.fileno(), size_bytes) as memory:
        pages = (ctypes.c_ubyte * (size_bytes // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(memory)
        result = c_library.mincore(ctypes.byref(start), ctypes.c_size_t(size_bytes), pages)
        del start
        assert result == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.fixture
def buffered_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SpillFile:
    if file_system_type(str(tmp_path)) in MEMORY_FILE_SYSTEMS:
        pytest.skip("the files of this file system are the page cache")
    real: Callable[..., int] = os.open

    def without_direct_io(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", without_direct_io)
    file = SpillFile(str(tmp_path))
    assert not file.direct
    assert file.grow(SIZE_BYTES) is None
    return file


def test_what_was_written_and_read_leaves_the_page_cache(buffered_file: SpillFile) -> None:
    file = buffered_file
    data = memoryview(bytearray(os.urandom(MIB)))
    for offset in range(0, SIZE_BYTES - DROP_STEP_BYTES, MIB):
        file.write(data, offset)
    os.fdatasync(file.fileno())  # the kernel drops only clean pages
    for offset in range(SIZE_BYTES - DROP_STEP_BYTES, SIZE_BYTES, MIB):
        file.write(data, offset)
    assert cached_bytes(file) <= DROP_STEP_BYTES
    os.fdatasync(file.fileno())
    found = memoryview(bytearray(MIB))
    for offset in range(0, SIZE_BYTES, MIB):
        file.read(found, offset)
        assert found == data
    assert cached_bytes(file) <= MIB
    file.close()


def test_direct_io_asks_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpillFile(str(tmp_path))
    if not file.direct:
        pytest.skip("this file system has no direct I/O")
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: pytest.fail("there is nothing in the page cache"))
    assert file.grow(DROP_STEP_BYTES) is None
    file.write(memoryview(mmap.mmap(-1, DROP_STEP_BYTES)), 0)
    file.close()
