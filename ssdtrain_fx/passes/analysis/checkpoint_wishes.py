"""What the policies of selective checkpoints wish for the storages of their ops.

    MUST_CPU_OFFLOAD      the storage is offloaded, at any cost in time
    PREFER_CPU_OFFLOAD    the plan decides

If there is a host tier, it takes these storages before all others. Else they go to the SSD: torch means a place
outside of the memory of the device. ``MUST_SAVE`` says that a tensor is not recomputed, and it may be offloaded too.
"""

from __future__ import annotations

from collections.abc import Iterable

from ssdtrain_fx.passes.analysis.candidates import Candidate
from ssdtrain_fx.passes.analysis.module_wishes import Wish


def must_offload(candidates: Iterable[Candidate]) -> dict[int, Wish]:
    """The storages that the program says to offload, by index."""
    return {candidate.storage.idx: "offload" for candidate in candidates if _policy(candidate) == "MUST_CPU_OFFLOAD"}


def prefers_host(candidate: Candidate) -> bool:
    """Whether the program wishes to have the storage in host memory."""
    return _policy(candidate) in ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")


def _policy(candidate: Candidate) -> str:
    """The name of the ``CheckpointPolicy`` of the op that makes the storage, where torch leaves it for partitioners."""
    return getattr(candidate.storage.allocator.meta.get("recompute"), "name", "")
