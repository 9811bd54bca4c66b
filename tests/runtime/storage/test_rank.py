import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import ssdtrain_fx
from ssdtrain_fx.runtime.storage.rank import process_rank, rank_directory
from ssdtrain_fx.runtime.storage.spill_file import SpillFile


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)


def test_where_the_rank_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_rank() is None
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert process_rank() == 3
    monkeypatch.setenv("RANK", "nonsense")
    assert process_rank() == 3
    monkeypatch.setenv("RANK", "11")
    assert process_rank() == 11
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    assert process_rank() == 5


def test_each_rank_has_a_separate_directory_while_it_needs_one(tmp_path: Path) -> None:
    with rank_directory(str(tmp_path), 0) as first, rank_directory(str(tmp_path), 1) as second:
        assert first != second
        assert {Path(path).parent for path in (first, second)} == {tmp_path}
        assert Path(first).stat().st_mode & 0o777 == 0o700
    with rank_directory(str(tmp_path), None) as shared:
        assert shared == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with rank_directory(str(tmp_path), 0) as shared:
        assert shared == str(tmp_path)


def test_errors_name_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    file = SpillFile(str(tmp_path))
    assert file.path == f"{tmp_path}/(unnamed spill file of rank 2)"
    assert list(tmp_path.iterdir()) == []
    file.close()


WORKER = """
import os, sys
import torch
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine

rank = int(os.environ["RANK"])
with Engine(EngineConfig(ssd_dir=sys.argv[1])) as engine:
    x = torch.full((300_000,), rank)
    token = engine.release(engine.offload(x, "x"), x)
    engine.wait_until_idle()
    print("offloaded", flush=True)
    sys.stdin.readline()
    y = engine.reload(token, x.size(), x.stride(), x.dtype, x.device)
    engine.wait(y, token)
    print(torch.equal(y, torch.full_like(y, rank)), flush=True)
    sys.stdin.readline()
"""


def test_ranks_of_one_machine_do_not_meet_and_leave_nothing(tmp_path: Path) -> None:
    """Both ranks write before either of them reads; one is killed, the other exits normally."""
    root = str(Path(ssdtrain_fx.__file__).parent.parent)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": root, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "offloaded\n"
        spill_files: list[str] = []
        for number, process in enumerate(ranks):
            links = [str(entry.readlink()) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
            (link,) = (link for link in links if link.startswith(str(tmp_path)))
            assert link.startswith(f"{tmp_path}/ssdtrain-rank-{number}-")
            spill_files.append(link)
        assert len(set(spill_files)) == 2
        assert list(tmp_path.iterdir()) == []
        for process in ranks:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "True\n"
        ranks[0].kill()
        ranks[0].communicate(timeout=60)
        ranks[1].communicate("\n", timeout=60)
        assert ranks[1].returncode == 0
        assert list(tmp_path.iterdir()) == []
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
