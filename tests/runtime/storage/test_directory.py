import os
import tempfile
from pathlib import Path

import pytest

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.runtime.storage import directory
from ssdtrain_fx.runtime.storage.directory import check_directories, file_system_type


def test_order_of_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.setenv("SSDTRAIN_DIR", str(second))
    assert check_directories(str(first)) == (str(first),)
    assert check_directories(None) == (str(second),)
    monkeypatch.delenv("SSDTRAIN_DIR")
    assert check_directories(None) == (tempfile.gettempdir(),)


def test_several_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    for path in (first, second):
        Path(path).mkdir()
    assert check_directories([first, second]) == (first, second)
    monkeypatch.setenv("SSDTRAIN_DIR", f"{second}::{first}:")
    assert check_directories(None) == (second, first)


def test_one_of_several_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine, missing = str(tmp_path), str(tmp_path / "nowhere")
    with pytest.raises(
        ConfigError, match=r"directory 2 of 2 in ssd_dir is '.*nowhere', which does not exist\. Create it"
    ):
        check_directories([fine, missing])
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"directory 2 of 2 in ssd_dir is '.*link', which was named before"):
        check_directories([fine, str(tmp_path / "link")])
    with pytest.raises(ConfigError, match="ssd_dir names no directory"):
        check_directories([])
    monkeypatch.setenv("SSDTRAIN_DIR", f"{missing}:{fine}")
    with pytest.raises(ConfigError, match="directory 1 of 2 in the environment variable SSDTRAIN_DIR is"):
        check_directories(None)


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_directories(".") == (str(tmp_path),)


def test_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ssd_dir is '.*nowhere', which does not exist\. Create it"):
        check_directories(str(tmp_path / "nowhere"))
    monkeypatch.setenv("SSDTRAIN_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="the environment variable SSDTRAIN_DIR is"):
        check_directories(None)


@pytest.mark.parametrize("named", ["", [""], ["{tmp}", ""]])
def test_an_empty_path_is_not_the_working_directory(named: str | list[str], tmp_path: Path) -> None:
    paths = named if isinstance(named, str) else [path.format(tmp=tmp_path) for path in named]
    with pytest.raises(ConfigError, match=r"ssd_dir names no directory\. Name at least one"):
        check_directories(paths)


def test_a_path_that_the_system_refuses_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"where no file can be created: File name too long\."):
        check_directories(str(tmp_path / ("x" * 300)))


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="which is not a directory"):
        check_directories(str(tmp_path / "file"))


def test_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(ConfigError, match=r"where no file can be created: Permission denied\. Make it writable"):
        check_directories(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_really_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="where no file can be created"):
        check_directories(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tmpfs", "in memory (tmpfs): offloading there frees no memory"),
        ("ramfs", "in memory (ramfs)"),
        ("nfs4", "network or user-space file system (nfs4): transfers there are slow"),
        ("cifs", "(cifs)"),
        ("fuse.sshfs", "(fuse.sshfs)"),
        ("ext4", None),
        ("fuseblk", None),
        (None, None),
    ],
)
def test_an_unfit_file_system_is_warned_of_once(
    kind: str | None,
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(directory, "file_system_type", lambda path: kind)
    assert check_directories(str(tmp_path)) == check_directories(str(tmp_path))
    assert [message in record.message for record in caplog.records] == ([] if message is None else [True])


@pytest.mark.skipif(not Path("/proc/self/mounts").exists(), reason="the system has no /proc")
def test_file_system_type() -> None:
    assert file_system_type("/proc/self") == "proc"
    assert file_system_type("/") is not None


def test_the_longest_and_latest_mount_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = "a / ext4 rw 0 0\nb /fast xfs rw 0 0\nc /fast\\040disk tmpfs rw 0 0\nd /fast btrfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **options: mounts)
    assert file_system_type("/fast/x") == "btrfs"
    assert file_system_type("/faster") == "ext4"
    assert file_system_type("/fast disk/x") == "tmpfs"
