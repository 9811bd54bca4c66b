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

    It is removed as soon as the files exist: they no longer need it, and nothing is left after ``kill -9``.
    """
    if rank is None:
        yield directory
        return
    try:
        own = tempfile.mkdtemp(prefix=f"ssdtrain-rank-{rank}-", dir=directory)
    except OSError:  # a full disk must not stop training
        yield directory
        return
    try:
        yield own
    finally:
        Path(own).rmdir()
