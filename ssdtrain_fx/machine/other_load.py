"""Processors that other programs use. What is measured beside them is too slow, and it does not show.

Why: a profile was measured while tests ran on both processors. Matrix products had a sixth of their rate, ``exp`` a
fortieth, and no single figure was impossible. Plans with it expected steps to take so long that the disk could write
everything. In training, most tensors then stayed in memory, which held eight times what was planned.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

STAT = Path("/proc/stat")
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
        """What other programs took of the processors that torch's threads needed, as text; empty if that is little."""
        began, now = self._began, self._read()
        if began is None or now is None or now[0] <= began[0]:
            return ""
        seconds, busy_s, own_s = (after - before for before, after in zip(began, now, strict=True))
        others = (busy_s - own_s) / seconds
        unused = len(self._cores) - torch.get_num_threads()
        if others - max(0, unused) <= MAX_PROCESSORS:
            return ""
        return f"Other programs use {others:.1f} of {len(self._cores)} processors"

    def _read(self) -> tuple[float, float, float] | None:
        """The time, and processor time of all programs and of this one, in seconds."""
        try:
            lines = [line.split() for line in self._stat.read_text(encoding="utf-8").splitlines()]
            ticks = sum(
                int(columns[1 + index])
                for columns in lines
                if columns and columns[0] in {f"cpu{core}" for core in self._cores}
                for index in _BUSY
            )
        except (OSError, ValueError, IndexError):
            return None
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()
