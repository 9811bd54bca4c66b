"""Processors that other programs use. What is measured beside them is too slow, and it does not show.

Why: a profile was measured while tests ran on both processors. Matrix products had a sixth of their rate, ``exp`` a
fortieth, and no single figure was impossible. Plans with it expected steps to take so long that the disk could write
everything. In training, most tensors then stayed in memory, which held eight times what was planned.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch

STAT = Path("/proc/stat")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
QUOTA_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
MAX_PROCESSORS = 0.25
"""What other programs may use of the processors that torch needs: the system itself needs some, and one of many threads
that shares its processor makes all others wait."""
_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of ``/proc/stat``: user, nice, system, irq, softirq, steal."""


class OtherLoad:
    """Counts from when it is made. Where the system does not count, there is no load."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._cores = os.sched_getaffinity(0)
        self._began = self._read()

    def describe(self) -> str:
        """What other programs took of the processors that torch's threads needed, as text; empty if that is little.

        Empty, too, in a container with a quota of processor time: the system counts processors that it may not use.
        """
        began, now = self._began, self._read()
        if began is None or now is None or now.at_s <= began.at_s or _has_quota():
            return ""
        seconds = now.at_s - began.at_s
        # A processor that was switched on or off in between counts from its start.
        busy_s = sum(now.busy_s[core] - began.busy_s[core] for core in now.busy_s.keys() & began.busy_s.keys())
        others = (busy_s - (now.own_s - began.own_s)) / seconds
        unused = len(self._cores) - torch.get_num_threads()
        if others - max(0, unused) <= MAX_PROCESSORS:
            return ""
        return f"Other programs use {others:.1f} of {len(self._cores)} processors"

    def _read(self) -> _Seen | None:
        names = {f"cpu{core}" for core in self._cores}
        try:
            lines = [line.split() for line in self._stat.read_text(encoding="utf-8").splitlines()]
            tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
            busy_s = {
                columns[0]: tick_s * sum(int(columns[1 + index]) for index in _BUSY)
                for columns in lines
                if columns and columns[0] in names
            }
        except (OSError, ValueError, IndexError):
            return None
        return _Seen(time.monotonic(), busy_s, time.process_time())


class _Seen(NamedTuple):
    at_s: float
    busy_s: dict[str, float]
    """Of all programs, by processor."""
    own_s: float
    """Of this one."""


def _has_quota() -> bool:
    """Whether a container may use only a part of the processors' time."""
    for path, unlimited in ((QUOTA, "max"), (QUOTA_V1, "-1")):
        with contextlib.suppress(OSError, IndexError):
            return path.read_text(encoding="utf-8").split()[0] != unlimited
    return False
