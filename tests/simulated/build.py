"""Builds ``device.cpp``, as the package builds its arena: once per source, torch and machine, in the user's cache."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch

from ssdtrain_fx._torch_private import arena

SOURCE = Path(__file__).with_name("device.cpp")
TORCH_VERSION = "2.13."
"""``device.cpp`` uses internals of torch. It was written for these versions and has run on no other."""


def build(device_type: str = "cuda") -> Path:
    """Build the library for ``cuda`` or another type, once per source, torch and machine.

    Raises ArenaUnavailableError, which says why it cannot.
    """
    if not torch.__version__.startswith(TORCH_VERSION):
        raise arena.ArenaUnavailableError(f"it needs torch {TORCH_VERSION}x, and this is {torch.__version__}")
    if torch.version.cuda is not None or torch.version.hip is not None:
        raise arena.ArenaUnavailableError(
            f"it takes the place of CUDA, so torch must be built for CPUs alone, and this is {torch.__version__}"
        )
    root = Path(torch.__file__).parent
    command = [*arena._compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", "-w"]
    command += [] if device_type == "cuda" else ["-DPRIVATE_USE"]
    command += [f"-I{root / 'include'}", f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}", str(SOURCE)]
    command += [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    key = SOURCE.read_bytes() + repr((command, torch.__version__, platform.machine())).encode()
    directory = arena._cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"simulated-device-{hashlib.sha256(key).hexdigest()[:16]}.so"
    if not path.exists() or path.stat().st_size == 0:
        arena._build(command, path)
    return path
