"""A full disk, and a disk that becomes full: what the spill file asks of it, and what it leaves to others."""

from __future__ import annotations

import collections
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runtime_fakes import fetch, no_aio, offload

from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.open_lanes import Parts
from ssdtrain_fx.runtime.storage.space import RETRY_AFTER_S, DiskSpace
from ssdtrain_fx.runtime.storage.spill_file import GROWTH_STEP_BYTES, SpillFile
from ssdtrain_fx.runtime.storage.striped_file import StripedFile

MIB = 1 << 20
GIB = 1 << 30


class FakeDisk:
    """Stands in for the system calls that reserve and count space. Files are real; the disk only seems small."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int, total_bytes: int = 1 << 40) -> None:
        self.free_bytes = free_bytes
        self.total_bytes = total_bytes
        self.quota_bytes: int | None = None
        """What ``statvfs`` does not tell."""
        self.now_s = 0.0
        self.calls: collections.Counter[str] = collections.Counter()
        self._truncate: Callable[[int, int], None] = os.ftruncate
        self._real_statvfs = os.statvfs
        for name in ("statvfs", "posix_fallocate", "ftruncate"):
            monkeypatch.setattr(os, name, getattr(self, name))

    def clock(self) -> float:
        return self.now_s

    def statvfs(self, file: int | str) -> os.statvfs_result:
        self.calls["statvfs"] += 1
        real = self._real_statvfs(file)
        return os.statvfs_result(
            (4096, 4096, self.total_bytes // 4096, self.free_bytes // 4096, self.free_bytes // 4096, *real[5:10])
        )

    def posix_fallocate(self, descriptor: int, offset: int, length: int) -> None:
        self.calls["posix_fallocate"] += 1
        for left_bytes, number in ((self.quota_bytes, errno.EDQUOT), (self.free_bytes, errno.ENOSPC)):
            if left_bytes is not None and length > left_bytes:
                raise OSError(number, os.strerror(number))
        self.free_bytes -= length
        self._truncate(descriptor, offset + length)

    def ftruncate(self, descriptor: int, length: int) -> None:
        self.calls["ftruncate"] += 1
        self.free_bytes += max(0, os.fstat(descriptor).st_size - length)
        self._truncate(descriptor, length)

    def file(self, directory: Path, reserve_bytes: int | None = 0) -> SpillFile:
        free_bytes = self.free_bytes
        file = SpillFile(str(directory), reserve_bytes, self.clock)
        self.free_bytes = free_bytes
        self.calls.clear()
        return file


def test_a_full_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk of every step finds the disk full. It does not ask again, and reserves nothing for a moment."""
    disk = FakeDisk(monkeypatch, free_bytes=0)
    file = SpillFile(str(tmp_path))
    disk.calls.clear()
    for _ in range(10):
        for chunk in range(1, 100):
            error = file.grow(chunk * MIB)
            assert error is not None
            assert error.errno == errno.ENOSPC
    assert disk.calls == {"statvfs": 1}
    file.close()


def test_a_quota_that_statvfs_does_not_tell_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk(monkeypatch, free_bytes=GIB)
    disk.quota_bytes = 0
    file = disk.file(tmp_path)
    for chunk in range(1, 100):
        error = file.grow(chunk * MIB)
        assert error is not None
        assert error.errno == errno.EDQUOT
    assert disk.calls == {"statvfs": 1, "posix_fallocate": 2, "ftruncate": 2}  # in large steps, then what is needed
    disk.now_s = RETRY_AFTER_S
    assert file.grow(100 * MIB) is not None
    assert file.grow(100 * MIB) is not None
    assert disk.calls == {"statvfs": 2, "posix_fallocate": 4, "ftruncate": 4}
    disk.now_s, disk.quota_bytes = 2 * RETRY_AFTER_S, None
    assert file.grow(100 * MIB) is None
    file.close()


def test_a_smaller_growth_is_tried_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk(monkeypatch, free_bytes=10 * MIB)
    file = disk.file(tmp_path)
    assert file.grow(20 * MIB) is not None
    assert file.grow(5 * MIB) is None
    assert file.size_bytes == 10 * MIB  # all that there is, at once
    assert file.grow(20 * MIB) is not None
    assert disk.calls == {"statvfs": 2, "posix_fallocate": 1}
    file.close()


def test_the_reserve_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk(monkeypatch, free_bytes=600 * MIB)
    file = disk.file(tmp_path, reserve_bytes=200 * MIB)
    for size_bytes in range(MIB, 400 * MIB + 1, MIB):
        assert file.grow(size_bytes) is None
    assert disk.free_bytes == 200 * MIB
    assert disk.calls == {"statvfs": 2, "posix_fallocate": 2}  # 256 MiB, then all that may be taken
    error = file.grow(400 * MIB + 4096)
    assert error is not None
    assert (error.errno, error.strerror) == (
        errno.ENOSPC,
        "its file system has 200.00 MiB left, and the option disk_reserve_bytes keeps 200.00 MiB free",
    )
    assert disk.free_bytes == 200 * MIB
    file.close()


@pytest.mark.parametrize(
    ("total_bytes", "reserve_bytes"), [(100 * GIB, GIB), (20 * GIB, GIB), (GIB, GIB // 20), (MIB, MIB // 20)]
)
def test_the_default_fits_the_file_system(
    total_bytes: int, reserve_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FakeDisk(monkeypatch, free_bytes=total_bytes, total_bytes=total_bytes)
    file = disk.file(tmp_path, reserve_bytes=None)
    most_bytes = (total_bytes - reserve_bytes) // 4096 * 4096
    assert file.grow(most_bytes + 4096) is not None
    assert file.grow(most_bytes) is None
    assert file.size_bytes == most_bytes
    file.close()


def test_growth_begins_again_when_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk(monkeypatch, free_bytes=MIB)
    file = disk.file(tmp_path, reserve_bytes=MIB)
    assert file.grow(MIB) is not None
    disk.free_bytes = 2 * MIB
    disk.now_s = RETRY_AFTER_S - 0.001
    assert file.grow(MIB) is not None
    disk.now_s = RETRY_AFTER_S
    assert file.grow(MIB) is None
    assert disk.calls == {"statvfs": 2, "posix_fallocate": 1}
    file.close()


def test_a_file_system_that_reports_no_sizes_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk(monkeypatch, free_bytes=0, total_bytes=0)
    monkeypatch.setattr(os, "posix_fallocate", lambda descriptor, offset, length: None)
    file = disk.file(tmp_path, reserve_bytes=None)
    assert file.grow(MIB) is None
    assert file.size_bytes == GROWTH_STEP_BYTES
    file.close()


def test_a_disk_that_has_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(file: int) -> os.statvfs_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def grow_to(size_bytes: int) -> None:
        raise AssertionError("nothing is reserved on it")

    monkeypatch.setattr(os, "statvfs", gone)
    error = DiskSpace(0).grow(0, 1, 1, grow_to)
    assert error is not None
    assert (error.errno, error.__traceback__) == (errno.EIO, None)


def test_one_full_drive_of_several_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one would reserve space and free it again for every chunk."""
    disk = FakeDisk(monkeypatch, free_bytes=10 * GIB)
    folders = [tmp_path / name for name in ("roomy", "full")]
    for folder in folders:
        folder.mkdir()
    parts = [disk.file(folder, reserve_bytes) for folder, reserve_bytes in zip(folders, (0, 20 * GIB), strict=True)]
    file = StripedFile(parts, MIB)
    for chunk in range(1, 100):
        error = file.grow(chunk * MIB)
        assert error is not None
        assert error.filename == parts[1].path
    assert disk.calls == {"statvfs": 2, "posix_fallocate": 1, "ftruncate": 1}
    assert disk.free_bytes == 10 * GIB
    file.close()


@pytest.mark.parametrize("io", ["posix", "auto"])
def test_an_engine_leaves_the_reserve_and_resumes(
    io: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1. A checkpoint has filled the disk: tensors stay in memory. 2. It is deleted: tensors are written again."""
    disk = FakeDisk(monkeypatch, free_bytes=GIB)
    config = EngineConfig(ssd_dir=str(tmp_path), io=io)  # type: ignore[arg-type]
    open_aio = no_aio if io == "posix" else None
    original = torch.arange(300_000)
    with Engine(
        config, Parts(open_file=lambda _: disk.file(tmp_path, GIB), open_aio=open_aio, chunk_bytes=4096)
    ) as engine:
        for _ in range(3):
            token = offload(engine, original.clone())
            engine.wait_until_idle()
            assert torch.equal(fetch(engine, token, original), original)
            del token
        full = engine.statistics()
        assert (full.bytes_written, full.kept_bytes) == (0, 3 * original.nbytes)
        # Chunks may come out of order, and then less room is asked for again.
        threads = engine._lanes.by_type["cpu"]._ends.busy_with
        assert set(disk.calls) == {"statvfs"}
        assert disk.calls["statvfs"] <= threads
        (warning,) = [record.getMessage() for record in caplog.records]
        assert (
            "(unnamed spill file) (errno 28: its file system has 1.00 GiB left, and the option disk_reserve_bytes "
            "keeps 1.00 GiB free): tensors that cannot be written stay in memory."
        ) in warning
        assert "Free disk space" in warning

        disk.free_bytes, disk.now_s = 2 * GIB, RETRY_AFTER_S
        token = offload(engine, original.clone())
        engine.wait_until_idle()
        assert engine.statistics().since(full).bytes_written == original.nbytes
        assert torch.equal(fetch(engine, token, original), original)
        del token


def test_the_option_reaches_the_file(tmp_path: Path) -> None:
    config = OffloadConfig(ssd_dir=str(tmp_path), disk_reserve_bytes=1 << 60)
    assert config.cache_key() != OffloadConfig(ssd_dir=str(tmp_path)).cache_key()
    with Engine(EngineConfig.from_argument(config.engine_config().to_argument())) as engine:
        token = offload(engine, torch.arange(300_000))
        engine.wait_until_idle()
        statistics = engine.statistics()
        assert (statistics.bytes_written, statistics.kept_bytes) == (0, 2_400_000)
        assert statistics.file_bytes == 0
        del token
