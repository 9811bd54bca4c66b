"""Helpers of the tests of the arena and of the memory of compiled steps."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import ssdtrain_fx

MIB = 1 << 20
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * MIB
ROOT = Path(ssdtrain_fx.__file__).parents[1]
HERE = Path(__file__).parent


def allocated_bytes() -> int:
    return ssdtrain_fx.memory_stats().allocated_bytes


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{HERE}:{HERE / 'memory'}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
