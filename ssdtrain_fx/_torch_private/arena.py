"""Builds and loads ``arena_cpp/``: memory for compiled steps on a CPU, through torch's C++ allocator interface.

The library is built once per installation of torch, with the compiler that Inductor needs on a CPU anyway, in about two
seconds. It is kept in ``$XDG_CACHE_HOME/ssdtrain_fx``, else in ``~/.cache/ssdtrain_fx``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

SOURCES = Path(__file__).with_name("arena_cpp")
BUILD_TIMEOUT_S = 300
MIN_BYTES = 64 << 10
"""Smaller tensors do not come from the arena. The same as in ``arena_cpp/range.h``."""


class ArenaUnavailableError(Exception):
    """The arena cannot be built or installed here; the message says why."""


class ArenaState(NamedTuple):
    """The numbers that ``ssdtrain_arena_describe`` writes, in their order."""

    allocated_bytes: int
    allocated_peak_bytes: int
    committed_bytes: int
    """From the start of the arena: in use, or free and mapped."""
    committed_peak_bytes: int
    end_peak_bytes: int
    """Highest end of a block."""
    blocks: int
    allocations: int


class ArenaLibrary:
    """The functions of ``arena_cpp/arena.cpp``. They keep the GIL, because they are shorter than passing it on."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if ``path`` cannot be loaded."""
        library = ctypes.PyDLL(str(path))
        self._install = library["ssdtrain_arena_install"]
        self._install.argtypes, self._install.restype = [ctypes.c_size_t], ctypes.c_bool
        self.enter = library["ssdtrain_arena_enter"]
        """Takes the number of a graph, or 0. Returns whether the thread was inside."""
        self.enter.argtypes, self.enter.restype = [ctypes.c_int64], ctypes.c_bool
        self.leave = library["ssdtrain_arena_leave"]
        """Takes what ``enter`` has returned."""
        self.leave.argtypes, self.leave.restype = [ctypes.c_bool], None
        self.trim = library["ssdtrain_arena_trim"]
        """Returns what is free to the system."""
        self.reset_peaks = library["ssdtrain_arena_reset_peaks"]
        for function in (self.trim, self.reset_peaks):
            function.argtypes, function.restype = [], None
        self.is_inside = library["ssdtrain_arena_is_inside"]
        self.is_inside.argtypes, self.is_inside.restype = [], ctypes.c_bool
        self._configure = library["ssdtrain_arena_configure"]
        self._configure.argtypes = [ctypes.c_size_t, ctypes.c_int64, ctypes.c_int64, ctypes.c_bool]
        self._configure.restype = None
        self._describe = library["ssdtrain_arena_describe"]
        self._describe.argtypes, self._describe.restype = [ctypes.c_void_p], None

    def install(self, reserve_bytes: int) -> None:
        """Make torch ask the arena for CPU memory. ``reserve_bytes`` of addresses are set aside; they take no memory.

        Raises:
            ArenaUnavailableError: there are not so many addresses, or another allocator has a higher priority.
        """
        if not self._install(reserve_bytes):
            raise ArenaUnavailableError(
                f"{reserve_bytes >> 30} GiB of addresses cannot be reserved (see `ulimit -v`), or another library has "
                "set torch's CPU allocator"
            )

    def configure(
        self,
        *,
        min_bytes: int = MIN_BYTES,
        unused_runs: int = 64,
        unused_milliseconds: int = 10_000,
        poison: bool = False,
    ) -> None:
        """Change ``Settings`` of ``arena_cpp/range.h``, which says what they mean. For tests."""
        self._configure(min_bytes, unused_runs, unused_milliseconds, poison)

    def describe(self) -> ArenaState:
        """What the arena holds now, and at most so far."""
        numbers = (ctypes.c_int64 * len(ArenaState._fields))()
        self._describe(ctypes.addressof(numbers))
        return ArenaState(*numbers)


def load_arena_library() -> ArenaLibrary:
    """Load the library; build it first if no process has done so on this machine.

    Raises:
        ArenaUnavailableError: there is no C++ compiler, or it fails.
    """
    root = Path(torch.__file__).parent
    command = [
        *_compiler(),
        "-std=c++20",
        "-O2",
        "-shared",
        "-fPIC",
        "-w",
        f"-I{root / 'include'}",
        str(SOURCES / "arena.cpp"),
    ]
    command += [f"-L{root / 'lib'}", "-lc10"]
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(repr((command, torch.__version__, platform.machine())).encode())
    try:
        directory = _cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"arena-{digest.hexdigest()[:16]}.so"
        if not path.exists() or path.stat().st_size == 0:  # empty after a power cut
            _build(command, path)
        return ArenaLibrary(path)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home directory
        raise ArenaUnavailableError(str(error)) from error


def _build(command: list[str], path: Path) -> None:
    """Compile under a temporary name, then rename: another process never sees half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".arena-") as directory:
        built = Path(directory) / path.name
        command = [*command, "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=BUILD_TIMEOUT_S)
        if done.returncode != 0:
            raise ArenaUnavailableError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-2000:]}")
        built.replace(path)


def _compiler() -> list[str]:
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        words = shlex.split(name)  # such as "ccache g++"
        if words and shutil.which(words[0]):
            return words
    raise ArenaUnavailableError("there is no C++ compiler (looked for $CXX, g++, clang++, c++)")


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ssdtrain_fx"
