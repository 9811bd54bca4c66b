"""How many ranks of a distributed run share this machine: its drives, and its host memory."""

from __future__ import annotations

import functools
import logging
import os

import torch

log = logging.getLogger(__name__)

COUNT_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Set by torchrun, Open MPI, and MPICH with its relatives, for each process that they start."""


def count_local_ranks() -> int:
    """The ranks on this machine, this process included, as its launcher says. 1 if it says nothing."""
    for variable in COUNT_VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return 1


def warn_of_unknown_ranks() -> None:
    """Warn, once, if this process is one of several ranks and no launcher says how many of them are here."""
    distributed = torch.distributed
    if any(os.environ.get(variable) for variable in COUNT_VARIABLES) or not distributed.is_available():
        return
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        _warn(distributed.get_world_size())


@functools.cache
def _warn(world_size: int) -> None:
    log.warning(
        "torch.distributed has %d ranks, but no launcher has set %s: plans assume that no other rank uses the drives "
        "of this machine. Set the option local_ranks to the number of ranks on it.",
        world_size,
        COUNT_VARIABLES[0],
    )
