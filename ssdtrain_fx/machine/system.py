"""What the system reports about this machine, for results and diagnostics."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BLOCK_DEVICES = Path("/sys/dev/block")


def cpu_model() -> str:
    """The processor, such as "AMD EPYC 9654 96-Core Processor"; "" if neither the kernel nor Python knows it."""
    try:
        info = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    return found[1].strip() if found else platform.processor()


def block_device(directory: str) -> str | None:
    """Kernel name of the disk or partition that holds a directory, such as "nvme0n1p2"; None if it has none."""
    number = Path(directory).stat().st_dev
    entry = BLOCK_DEVICES / f"{os.major(number)}:{os.minor(number)}"
    return entry.resolve().name if entry.exists() else None
