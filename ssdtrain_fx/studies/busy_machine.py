"""Keeps processor, memory and disk busy, so that races show that a calm machine hides.

    with busy_machine(directory):
        ...     # whatever runs here is preempted, waits for pages and waits for the disk

Some processes compute in bursts, one touches and frees memory, one writes a file, syncs it and reads it back. They end
with the block, and by themselves if this process dies.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

PROCESSOR = """
import os, random, sys, time
while os.getppid() == int(sys.argv[1]):
    until_s = time.monotonic() + random.uniform(0.001, 0.05)
    while time.monotonic() < until_s:
        pass
    time.sleep(random.uniform(0, 0.005))
"""

MEMORY = """
import os, random, sys, time
while os.getppid() == int(sys.argv[1]):
    memory = bytearray(random.randint(1 << 20, int(sys.argv[2])))
    memory[::4096] = b"x" * len(memory[::4096])
    del memory
    time.sleep(random.uniform(0, 0.02))
"""

DISK = """
import os, sys, tempfile
block = os.urandom(1 << 20)
with tempfile.TemporaryFile(dir=sys.argv[3]) as file:
    while os.getppid() == int(sys.argv[1]):
        file.seek(0)
        for _ in range(int(sys.argv[2]) >> 20):
            file.write(block)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        while file.read(1 << 20):
            pass
"""


@contextlib.contextmanager
def busy_machine(
    directory: str | Path,
    *,
    processors: int | None = None,
    memory_bytes: int = 256 << 20,
    disk_bytes: int = 64 << 20,
) -> Generator[None]:
    """Load for a ``with`` block.

    Args:
        directory: where the file is written; it has no name.
        processors: processes that compute; by default one for each core.
        memory_bytes: most that is touched and freed at a time.
        disk_bytes: size of the file.
    """
    processors = len(os.sched_getaffinity(0)) if processors is None else processors
    commands = [
        *([PROCESSOR] for _ in range(processors)),
        [MEMORY, str(memory_bytes)],
        [DISK, str(disk_bytes), str(directory)],
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for program, *arguments in commands:
            running.append(subprocess.Popen([sys.executable, "-c", program, str(os.getpid()), *arguments]))
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
