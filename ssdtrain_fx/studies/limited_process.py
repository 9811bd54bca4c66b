"""Processes under a memory limit that the kernel enforces.

    done = run_limited(PROGRAM, limit_bytes=200 << 20)
    if isinstance(done, NotEnforced): print(done.reason)

    with limit("cgroup v1", 900 << 20) as limited:
        subprocess.run([*limited.prefix, sys.executable, "train.py"])

A new cgroup holds the program: in cgroup v1 below the cgroup of this process, in cgroup v2 where the memory controller
is handed down. Swap is off in it unless some is allowed. Where no cgroup can be made, ``RLIMIT_DATA`` limits the
private memory of the process. A kind counts only if a trial shows that it stops a program above its limit and lets one
below it run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ssdtrain_fx.memory_limit import V1, V2, CgroupVersion, find_cgroups

TOUCH = "import sys\nmemory = bytearray(int(sys.argv[1]))\nmemory[::4096] = b'x' * len(memory[::4096])\n"
"""Touches as many bytes as its argument says."""
TRIAL_LIMIT_BYTES = 200 << 20
PEAK_FILES = {V1.name: "memory.max_usage_in_bytes", V2.name: "memory.peak"}


@dataclasses.dataclass(frozen=True, slots=True)
class LimitedRun:
    """A program that has ended."""

    kind: str
    """What has limited it: ``cgroup v1``, ``cgroup v2`` or ``RLIMIT_DATA``."""
    returncode: int
    stdout: str
    stderr: str

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed it, or refused it memory."""
        return self.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL) or "MemoryError" in self.stderr


@dataclasses.dataclass(frozen=True, slots=True)
class NotEnforced:
    """Nothing limits memory on this machine."""

    reason: str
    """What was tried, and how each attempt failed."""


@dataclasses.dataclass(frozen=True, slots=True)
class EnforcedLimit:
    """A limit that the kernel enforces, for all processes whose command begins with ``prefix``."""

    enter: str
    """Shell command by which a process puts itself under the limit."""
    cgroup: Path | None = None
    """None: the limit is that of a single process."""
    peak_file: str = ""

    @property
    def prefix(self) -> list[str]:
        return ["sh", "-c", f'{self.enter} && exec "$@"', "sh"]

    def peak_bytes(self) -> int | None:
        """The most that all processes held together, with page cache. None: nothing has counted it."""
        if self.cgroup is None or not (self.cgroup / self.peak_file).exists():
            return None
        return int((self.cgroup / self.peak_file).read_text())

    def kill(self) -> None:
        """Kill all processes in the cgroup."""
        if self.cgroup is not None:
            for line in (self.cgroup / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line), signal.SIGKILL)


Enter = Callable[[int, int], AbstractContextManager[EnforcedLimit]]
"""Prepares a limit of some bytes of memory, and of some bytes of swap."""


@contextlib.contextmanager
def limit(kind: str, limit_bytes: int, *, swap_bytes: int = 0) -> Generator[EnforcedLimit]:
    """A limit on memory, and on what may be swapped out. The processes must end within the block.

    Raises:
        OSError: there is no such limit here.
    """
    with KINDS[kind](limit_bytes, swap_bytes) as limited:
        yield limited


def run_limited(
    program: str, *arguments: str, limit_bytes: int, kind: str | None = None, timeout_s: float = 120
) -> LimitedRun | NotEnforced:
    """Run ``python -c program arguments`` under a limit.

    Args:
        kind: one of :data:`KINDS`. None: the first one that works here.
    """
    if kind is None:
        found = find_kind()
        if isinstance(found, NotEnforced):
            return found
        kind = found
    return _run(kind, program, arguments, limit_bytes, timeout_s)


@functools.cache
def find_kind() -> str | NotEnforced:
    """The first kind that a trial shows to work."""
    failures: list[str] = []
    for kind in KINDS:
        reason = why_not(kind)
        if reason is None:
            return kind
        failures.append(f"{kind}: {reason}")
    return NotEnforced(f"no memory limit is enforced here ({'; '.join(failures)})")


def why_not(kind: str) -> str | None:
    """Why this kind does not limit memory here. None: a trial shows that it does."""
    try:
        above, below = (
            _run(kind, TOUCH, [str(touched_bytes)], TRIAL_LIMIT_BYTES, 60)
            for touched_bytes in (TRIAL_LIMIT_BYTES + (100 << 20), TRIAL_LIMIT_BYTES // 4)
        )
    except OSError as error:
        return str(error)
    if not above.ran_out_of_memory:
        return "a program above its limit is not stopped"
    return None if below.returncode == 0 else f"a program below its limit does not run: {below.stderr}"


def _run(kind: str, program: str, arguments: Sequence[str], limit_bytes: int, timeout_s: float) -> LimitedRun:
    with limit(kind, limit_bytes) as limited:
        done = subprocess.run(
            [*limited.prefix, sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    return LimitedRun(kind, done.returncode, done.stdout, done.stderr)


def swap_is_on() -> bool:
    """Whether this machine swaps to anything."""
    try:
        return len(Path("/proc/swaps").read_text().splitlines()) > 1  # the first one is a head
    except OSError:
        return False


@contextlib.contextmanager
def _resource_limit(limit_bytes: int, swap_bytes: int) -> Generator[EnforcedLimit]:
    if swap_bytes:
        raise OSError("RLIMIT_DATA does not limit swap: a cgroup is needed")
    yield EnforcedLimit(f"ulimit -d {limit_bytes // 1024}")


@contextlib.contextmanager
def _cgroup(version: CgroupVersion, limit_bytes: int, swap_bytes: int) -> Generator[EnforcedLimit]:
    directory = _make_cgroup(version)
    limited = EnforcedLimit(f"echo $$ > '{directory}/cgroup.procs'", directory, PEAK_FILES[version.name])
    swap = {"memory.memsw.limit_in_bytes": limit_bytes + swap_bytes, "memory.swap.max": swap_bytes}
    try:
        (directory / version.limit).write_text(str(limit_bytes))
        present = [name for name in swap if (directory / name).exists()]
        if not present and (swap_bytes or swap_is_on()):
            raise OSError("this kernel does not limit the swap of a cgroup")
        for name in present:
            (directory / name).write_text(str(swap[name]))
        yield limited
    finally:
        _remove_cgroup(limited, directory)


def _make_cgroup(version: CgroupVersion) -> Path:
    reasons: list[str] = []
    for found, ancestors in find_cgroups():
        if found != version:
            continue
        # In v2, a cgroup that hands a controller down holds no processes, so a new one is made beside that of this
        # process.
        parents = ancestors[:1] if version == V1 else [one for one in ancestors[:2] if _hands_memory_down(one)]
        for parent in parents:
            directory = parent / f"ssdtrain-{uuid.uuid4().hex[:12]}"
            try:
                directory.mkdir()
            except OSError as error:
                reasons.append(str(error))
                continue
            if (directory / version.limit).exists():
                return directory
            directory.rmdir()
    raise OSError("; ".join(reasons) or "no hierarchy with a memory controller is mounted for this process")


def _hands_memory_down(directory: Path) -> bool:
    try:
        return "memory" in (directory / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _remove_cgroup(limited: EnforcedLimit, directory: Path) -> None:
    """Remove the cgroup, with what the program has left running in it. A cgroup is busy until the last one is gone."""
    deadline_s = time.monotonic() + 10
    while True:
        limited.kill()
        try:
            directory.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


KINDS: dict[str, Enter] = {
    V2.name: functools.partial(_cgroup, V2),
    V1.name: functools.partial(_cgroup, V1),
    "RLIMIT_DATA": _resource_limit,
}
