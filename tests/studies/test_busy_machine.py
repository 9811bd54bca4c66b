"""The load that some benchmarks make ends with its block, whatever happens in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ssdtrain_fx.studies import busy_machine


def test_the_load_consists_of_processes_that_end_with_the_block(tmp_path: Path) -> None:
    def children() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if "getppid" in " ".join(child.cmdline())]

    before = children()
    started: list[psutil.Process] = []

    def interrupted() -> None:
        with busy_machine.busy_machine(tmp_path, processors=1, memory_bytes=2 << 20, disk_bytes=1 << 20):
            started.extend(child for child in children() if child not in before)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(started) == 3, "one that computes, one for memory, one for the disk"
    assert not [child for child in started if child.is_running()]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", [busy_machine.PROCESSOR, busy_machine.MEMORY, busy_machine.DISK])
def test_a_process_of_the_load_ends_if_its_parent_has_died(program: str, tmp_path: Path) -> None:
    arguments = ["0", str(2 << 20), str(tmp_path)]  # no process has the number 0
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
