"""Files that forked children do not hold.

Why: a child inherits all descriptors, and the space of a file without a name is free only once the last one is closed.
The worker of a data loader would hold gigabytes on the disk until it ends, long after its parent has freed them.

In the child, ``/dev/null`` takes the place of each descriptor of such a file. The numbers stay in use, because objects
that the child inherits, even those of other libraries, still contain them: a number that is free could become that of a
file of the child, and an inherited object could then write to it. In the parent, nothing changes.

A program that is started by ``exec`` inherits no descriptor at all (O_CLOEXEC).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_kept: set[tuple[int, int]] = set()
"""Device and inode number of each file."""


def keep_from_children(descriptor: int) -> None:
    """Let children that are forked from now on hold no descriptor of this file, neither this one nor another one."""
    _kept.add(_identity_of(descriptor))


def close_kept(descriptor: int) -> None:
    """Close the only descriptor of such a file."""
    identity = _identity_of(descriptor)
    try:
        os.close(descriptor)
    finally:
        _kept.discard(identity)


def _identity_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _replace_in_child() -> None:
    if not _kept:
        return
    with contextlib.suppress(OSError):  # no /proc, or no descriptor is left: the child holds the files until it ends
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
                if _identity_of(int(path.name)) in _kept:
                    os.dup2(null, int(path.name), inheritable=False)
        os.close(null)
    _kept.clear()


os.register_at_fork(after_in_child=_replace_in_child)
