"""The real KvikIO without a CUDA driver: a stub of the driver takes its place."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc")
NEEDS_KVIKIO = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler to build the stub of the CUDA driver"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("kvikio", "rapids_logger")),
        reason="KvikIO is not installed (`make test` installs it without its CUDA packages)",
    ),
]


def build(directory: Path) -> Path:
    """Build the stub in ``directory``. It has the name of the driver, also for what looks for a loaded library."""
    source = Path(__file__).parent / "lanes" / "stub_libcuda.c"
    library = directory / "libcuda.so.1"
    assert COMPILER is not None
    command = [COMPILER, "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library
