"""Reference rates of an SSD, to compare with a measured profile: what ``fio`` reaches in the same directories."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, cast

FIO_ENGINES = ("io_uring", "libaio")
"""Tried in this order: kernels and containers may refuse io_uring."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRates:
    """Sequential rates of one drive, or of several together. None: not known."""

    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None


def run_fio(directories: Sequence[str], *, seconds: int = 3, size_bytes: int = 512 << 20) -> ReferenceRates | None:
    """Let ``fio`` write, then read, one file in each directory, all directories at the same time and with direct I/O.

    None if ``fio`` is missing or fails.
    """
    fio = shutil.which("fio")
    if fio is None:
        return None
    with contextlib.ExitStack() as stack:
        folders = [
            stack.enter_context(tempfile.TemporaryDirectory(prefix="ssdtrain-fio-", dir=directory))
            for directory in directories
        ]
        write = _rate(fio, folders, "write", seconds, size_bytes)
        read = _rate(fio, folders, "read", seconds, size_bytes)
    return None if write is None and read is None else ReferenceRates(write_bytes_per_s=write, read_bytes_per_s=read)


def _rate(fio: str, folders: Sequence[str], direction: str, seconds: int, size_bytes: int) -> float | None:
    for engine in FIO_ENGINES:
        command = [fio, f"--rw={direction}", "--bs=2M", f"--ioengine={engine}", "--direct=1", "--iodepth=8"]
        command += [f"--size={size_bytes}", "--time_based", f"--runtime={seconds}", "--output-format=json"]
        for number, folder in enumerate(folders):
            command += [f"--name=probe{number}", f"--filename={_escaped(folder)}/probe"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60 + 10 * seconds)
            report = cast(dict[str, Any], json.loads(done.stdout[done.stdout.index("{") :]))
            rate = sum(float(job[direction]["bw_bytes"]) for job in report["jobs"])
        except (OSError, subprocess.SubprocessError, ValueError, KeyError):
            continue
        if rate > 0:
            return rate
    return None


def _escaped(path: str) -> str:
    """Escape colons: fio takes a colon as the end of a path."""
    return path.replace(":", "\\:")
