"""The rank of this process in a distributed run, and a separate directory for each rank.

Why: the ranks on one machine share the SSD. Spill files have no names, so they never collide. With a separate directory
ranks stay apart even where the file system needs a temporary name, or keeps the files of one directory together on the
drive (as XFS does).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import torch

RANK_VARIABLES = ("RANK", "LOCAL_RANK")
STALE_AFTER_S = 3600.0
_PREFIX = "ssdtrain-rank-"


def process_rank() -> int | None:
    """The rank in ``torch.distributed`` if that is initialised, else the rank that the launcher set; None if there is
    only one process."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    for variable in RANK_VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdecimal():
            return int(value)
    return None


@contextlib.contextmanager
def rank_directory(directory: str, rank: int | None) -> Generator[str]:
    """Create a directory within ``directory`` for unnamed files. Without a rank, yields ``directory`` itself.

    It is removed as soon as the files exist: they no longer need it, and nothing is left after ``kill -9``. If it
    cannot be removed, because on NFS an unlinked file has a name until it is closed, it stays; call
    :func:`remove_if_empty` after that. What a killed process has left is removed when the next rank comes.
    """
    if rank is None:
        yield directory
        return
    try:
        own = tempfile.mkdtemp(prefix=f"{_PREFIX}{rank}-", dir=directory)
    except OSError:  # a full disk must not stop training
        yield directory
        return
    try:
        yield own
        _remove_stale(directory, own)
    finally:
        remove_if_empty(own)


def remove_if_empty(directory: str) -> None:
    """Remove ``directory``. If it holds a file, or is gone already, nothing happens."""
    with contextlib.suppress(OSError):
        Path(directory).rmdir()


def _remove_stale(directory: str, own: str) -> None:
    """Remove the empty directories of ranks that were killed before they could. The directory of a live process is
    empty too, but only for the time that it takes to open a file.

    ``own`` has just been created, so it tells the time of the file system's clock, which may be on another machine.
    """
    with contextlib.suppress(OSError):  # another rank may be faster
        now_s = Path(own).stat().st_mtime
        for entry in Path(directory).glob(f"{_PREFIX}*"):
            if now_s - entry.stat().st_mtime > STALE_AFTER_S:
                remove_if_empty(str(entry))
