"""A file system that keeps a name for an unlinked file until it is closed, as NFS does."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssdtrain_fx.runtime.storage import rank
from ssdtrain_fx.runtime.storage.rank import STALE_AFTER_S, rank_directory
from ssdtrain_fx.runtime.storage.spill_file import SpillFile


class SillyRename:
    """What an NFS client does: there is no O_TMPFILE, an open file that is unlinked is renamed to ``.nfs...``, and that
    name is removed when the file is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[int] = []
        self._left: dict[tuple[int, int], str] = {}
        self._open: Callable[..., int] = os.open
        self._unlink: Callable[..., None] = os.unlink
        self._close = os.close
        for name in ("open", "unlink", "close"):
            monkeypatch.setattr(os, name, getattr(self, name))

    def open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        descriptor = self._open(path, flags, mode, **options)
        if "ssdtrain" in str(path):
            self.opened.append(descriptor)
        return descriptor

    def unlink(self, path: Any, **options: Any) -> None:
        status = Path(path).stat()
        left = Path(path).with_name(f".nfs{status.st_ino:024x}")
        Path(path).rename(left)
        self._left[status.st_dev, status.st_ino] = str(left)

    def close(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self._close(descriptor)
        left = self._left.pop((status.st_dev, status.st_ino), None)
        if left is not None:
            self._unlink(left)


@pytest.mark.parametrize("number", [None, "3"])
def test_a_file_that_keeps_a_name_until_it_is_closed(
    number: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of the rank cannot be removed before."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if number is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", number)
    SillyRename(monkeypatch)
    file = SpillFile(str(tmp_path))
    (left,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left.name.startswith(".nfs")
    assert left.stat().st_mode & 0o777 == 0o600
    assert file.grow(4096) is None
    file.write(memoryview(mmap.mmap(-1, 4096)), 0)  # aligned
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_unlinked_is_no_spill_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would outlive the process."""
    monkeypatch.setenv("RANK", "3")
    silly = SillyRename(monkeypatch)

    def refused(path: Any, **options: Any) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "unlink", refused)
    with pytest.raises(OSError, match="Permission denied"):
        SpillFile(str(tmp_path))
    assert silly.opened
    for descriptor in silly.opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_what_a_killed_rank_has_left_is_removed(tmp_path: Path) -> None:
    """Only if it is old and empty: a rank that is about to open its file has an empty directory too."""
    now_s = time.time()
    for name, age_s, content in (
        ("ssdtrain-rank-0-killed", 2 * STALE_AFTER_S, None),
        ("ssdtrain-rank-1-starting", 0, None),
        ("ssdtrain-rank-2-using-it", 2 * STALE_AFTER_S, ".nfs0001"),
        ("of-the-user", 2 * STALE_AFTER_S, None),
    ):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / content).touch()
        os.utime(tmp_path / name, (now_s - age_s, now_s - age_s))
    with rank_directory(str(tmp_path), 5):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "of-the-user",
        "ssdtrain-rank-1-starting",
        "ssdtrain-rank-2-using-it",
    ]


def test_the_directory_of_a_rank_is_gone_before_the_disk_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done while it exists may be interrupted by ``kill -9``."""
    monkeypatch.setenv("RANK", "3")
    seen: list[list[Path]] = []
    real = os.pwrite

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        seen.append(list(tmp_path.iterdir()))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    SpillFile(str(tmp_path)).close()
    assert seen == [[]]
    assert rank.process_rank() == 3
