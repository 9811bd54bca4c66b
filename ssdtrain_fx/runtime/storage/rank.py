"""Which process of a distributed run this is, and a directory of its own for each.

Why: ranks of one machine share the SSD. Spill files have no names, so they never meet; where a file system needs a name
for a moment, or keeps the files of one directory together on the drive (XFS does), ranks stay apart too.
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
    """The rank in ``torch.distributed`` where that is initialised, else what the launcher says; None where there is one
    process only."""
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
    """A directory within ``directory`` to make unnamed files in; ``directory`` itself without a rank.

    It is removed as soon as the files are there: they do not need it any more, and nothing is left after ``kill -9``.
    """
    if rank is None:
        yield directory
        return
    try:
        own = tempfile.mkdtemp(prefix=f"ssdtrain-rank-{rank}-", dir=directory)
    except OSError:  # a full disk: no reason to stop training
        yield directory
        return
    try:
        yield own
    finally:
        Path(own).rmdir()
