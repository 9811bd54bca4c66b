"""Files that exist completely or not at all."""

import stat
from pathlib import Path

import pytest

from ssdtrain_fx.whole_file import write_whole, written_beside


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    for text in ("old", "née\n"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_before_it_is_renamed_only_the_other_name_is_there(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    with written_beside(path, "text") as temporary:
        assert not path.exists()
        assert (temporary.parent, temporary.read_text()) == (tmp_path, "text")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half of it \udc80")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        write_whole(tmp_path / "none" / "notes.json", "text")
