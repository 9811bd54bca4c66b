import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from ssdtrain_fx.runtime.storage import spill_file
from ssdtrain_fx.runtime.storage.spill_file import SpillFile


def block(content: bytes, size_bytes: int = 4096) -> memoryview:
    memory = mmap.mmap(-1, size_bytes)
    memory[: len(content)] = content
    return memoryview(memory)


def check_transfers(file: SpillFile) -> None:
    assert file.grow(8192) is None
    file.write(block(b"second"), 4096)
    file.write(block(b"first"), 0)
    data = block(b"", 8192)
    file.read(data, 0)
    assert bytes(data[:5]) == b"first"
    assert bytes(data[4096:4102]) == b"second"


def test_transfers(tmp_path: Path) -> None:
    file = SpillFile(str(tmp_path))
    check_transfers(file)
    assert list(tmp_path.iterdir()) == []
    file.close()
    file.close()


def refuse(monkeypatch: pytest.MonkeyPatch, flag: int, number: int) -> None:
    real_open = os.open

    def fake_open(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if flags & flag == flag:
            raise OSError(number, os.strerror(number))
        return real_open(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", fake_open)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR])
def test_without_o_tmpfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    refuse(monkeypatch, os.O_TMPFILE, number)
    file = SpillFile(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(file.fileno())
    assert (status.st_mode & 0o777, status.st_nlink) == (0o600, 0)
    check_transfers(file)
    file.close()


def test_without_o_direct_at_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(monkeypatch, os.O_DIRECT, errno.EINVAL)
    for _ in range(2):
        file = SpillFile(str(tmp_path))
        assert file.io_path == "posix buffered"
        check_transfers(file)
        file.close()
    assert list(tmp_path.iterdir()) == []
    assert len(caplog.records) == 1
    assert f"{tmp_path} does not support direct I/O" in caplog.text


def test_without_o_direct_at_the_first_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_file, "_accepts_direct_io", lambda descriptor: False)
    file = SpillFile(str(tmp_path))
    assert file.io_path == "posix buffered"
    check_transfers(file)
    file.close()


def test_short_transfers_go_on_from_an_aligned_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpillFile(str(tmp_path))
    file.grow(16384)
    real_write, real_read = os.pwrite, os.preadv
    offsets: list[int] = []

    def write_at_most_5000(descriptor: int, data: memoryview, offset: int) -> int:
        offsets.append(offset)
        return min(5000, real_write(descriptor, data, offset))

    def read_at_most_5000(descriptor: int, views: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return min(5000, real_read(descriptor, views, offset))

    monkeypatch.setattr(os, "pwrite", write_at_most_5000)
    monkeypatch.setattr(os, "preadv", read_at_most_5000)
    content = os.urandom(12288)
    file.write(block(content, 12288), 4096)
    data = block(b"", 12288)
    file.read(data, 4096)
    assert bytes(data) == content
    assert offsets == [4096, 8192, 12288] * 2
    file.close()


def test_a_transfer_that_makes_no_progress_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpillFile(str(tmp_path))
    file.grow(8192)
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: 512)
    with pytest.raises(OSError, match="short write: 512 of 4096 bytes at offset 0"):
        file.write(block(b""), 0)
    file.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_growth_that_fails_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    file = SpillFile(str(tmp_path))

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    error = file.grow(4096)
    assert error is not None
    assert error.errno == number
    assert file.size_bytes == 0
    file.close()


def test_growth_on_a_disk_that_has_gone_is_a_result_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing the reserved space fails as well."""
    file = SpillFile(str(tmp_path))

    def gone(*arguments: int) -> None:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", gone)
        patch.setattr(os, "ftruncate", gone)
        error = file.grow(4096)
    assert error is not None
    assert error.errno == errno.ENODEV
    assert file.size_bytes == 0
    file.close()


def test_growth_in_large_steps_falls_back_to_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpillFile(str(tmp_path))
    real = os.posix_fallocate

    def almost_full(descriptor: int, offset: int, length: int) -> None:
        if length > 8192:
            raise OSError(errno.ENOSPC, "full")
        real(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", almost_full)
    assert file.grow(8192) is None
    assert file.size_bytes == os.fstat(file.fileno()).st_size == 8192
    file.close()


def test_a_file_system_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refused)
    file = SpillFile(str(tmp_path))
    check_transfers(file)
    file.close()


def test_shrinking(tmp_path: Path) -> None:
    file = SpillFile(str(tmp_path))
    file.grow(4096)
    size_bytes = file.size_bytes
    file.shrink(4096, size_bytes - 4096)
    assert file.size_bytes == size_bytes  # as if it had grown: nothing is cut
    file.shrink(4096, size_bytes)
    assert file.size_bytes == os.fstat(file.fileno()).st_size == 4096
    file.close()
