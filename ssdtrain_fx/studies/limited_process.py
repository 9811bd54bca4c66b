"""Processes under a memory limit that the kernel enforces.

    done = run_limited(PROGRAM, limit_bytes=200 << 20)
    if isinstance(done, NotEnforced): print(done.reason)

    with limit("cgroup v1", 900 << 20) as prefix:
        subprocess.run([*prefix, sys.executable, "train.py"])

A new cgroup holds the program: in cgroup v1 below the cgroup of this process, in cgroup v2 where the memory controller
is handed down. Swap is off in it. Where no cgroup can be made, ``RLIMIT_DATA`` limits the private memory of the
process. A kind counts only if a trial shows that it stops a program above its limit and lets one below it run.
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


Enter = Callable[[int], AbstractContextManager[str]]
"""Prepares a limit of some bytes. Gives the shell command by which a process puts itself under it."""


@contextlib.contextmanager
def limit(kind: str, limit_bytes: int) -> Generator[list[str]]:
    """A limit for all processes whose command begins with the yielded words. They must end within the block.

    Raises:
        OSError: there is no such limit here.
    """
    with KINDS[kind](limit_bytes) as enter:
        yield ["sh", "-c", f'{enter} && exec "$@"', "sh"]


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
    with limit(kind, limit_bytes) as prefix:
        done = subprocess.run(
            [*prefix, sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    return LimitedRun(kind, done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def _resource_limit(limit_bytes: int) -> Generator[str]:
    yield f"ulimit -d {limit_bytes // 1024}"


@contextlib.contextmanager
def _cgroup(version: CgroupVersion, limit_bytes: int) -> Generator[str]:
    directory = _make_cgroup(version)
    try:
        (directory / version.limit).write_text(str(limit_bytes))
        for name, value in (("memory.memsw.limit_in_bytes", limit_bytes), ("memory.swap.max", 0)):
            if (directory / name).exists():
                (directory / name).write_text(str(value))
        yield f"echo $$ > '{directory}/cgroup.procs'"
    finally:
        _remove_cgroup(directory)


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


def _remove_cgroup(directory: Path) -> None:
    """Remove the cgroup, with what the program has left running in it. A cgroup is busy until the last one is gone."""
    deadline_s = time.monotonic() + 10
    while True:
        for line in (directory / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)
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
