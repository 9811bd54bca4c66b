"""What else is known about an SSD, to compare a measured profile with: what ``fio`` reaches in the same directory."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import tempfile
from typing import Any, cast


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRates:
    """Sequential rates of a drive; None where nothing is known."""

    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None


def run_fio(directory: str, *, seconds: int = 3, size_bytes: int = 512 << 20) -> ReferenceRates | None:
    """Let ``fio`` write and read one file with direct I/O through io_uring; None where it is missing or fails."""
    fio = shutil.which("fio")
    if fio is None:
        return None
    with tempfile.TemporaryDirectory(prefix="ssdtrain-fio-", dir=directory) as folder:
        write = _rate(fio, folder, "write", seconds, size_bytes)
        read = _rate(fio, folder, "read", seconds, size_bytes)
    return None if write is None and read is None else ReferenceRates(write_bytes_per_s=write, read_bytes_per_s=read)


def _rate(fio: str, folder: str, direction: str, seconds: int, size_bytes: int) -> float | None:
    command = [fio, "--name=probe", f"--directory={folder}", "--filename=probe", f"--rw={direction}", "--bs=2M"]
    command += ["--ioengine=io_uring", "--direct=1", "--iodepth=8", f"--size={size_bytes}", "--time_based"]
    command += [f"--runtime={seconds}", "--output-format=json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60 + 10 * seconds)
        report = cast(dict[str, Any], json.loads(done.stdout[done.stdout.index("{") :]))
        rate = float(report["jobs"][0][direction]["bw_bytes"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError):
        return None
    return rate if rate > 0 else None
