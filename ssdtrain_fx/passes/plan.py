"""The plan: one decision for every storage that is saved for backward, as a plain value.

Nodes are given by name and places by position in the scheduled joint graph *before* rewriting, so a plan prints,
compares and serialises, and the same graph gets the same plan in every process.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """Leave the storage in memory."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Offload:
    """Move the storage out in forward and back in backward. All four positions mean "right before that node"."""

    representative: str
    """The node that is moved. Every saved view is rebuilt from it."""
    offload: int
    release: int
    reload: int
    wait: int
    reason: str


Decision = Keep | Offload


@dataclasses.dataclass(frozen=True, slots=True)
class SavedStorage:
    """What is known about one saved storage, and what happens to it."""

    name: str
    """Its allocator: the node, and for a multi-output op the one that exposes it."""
    saved_nodes: tuple[str, ...]
    """The saved tensors on this storage; several when views of it are saved."""
    op: str
    shape: tuple[str, ...]
    """Sizes as text, since they can be symbols."""
    dtype: str
    device: str
    size_bytes: int
    is_input: bool
    """A parameter, a buffer or data that the caller passes in."""
    source: str
    """Line of user code that made it, or an empty string."""
    decision: Decision


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Decisions for a training step and what they are predicted to do.

    Peaks count the storages that the joint graph itself allocates (no parameters, no inputs), unfused.
    """

    storages: tuple[SavedStorage, ...]
    in_flight_bytes: int
    """Most bytes that may be leaving, and most that may be returning early, at any position."""
    peak_before_bytes: int
    peak_after_bytes: int

    @property
    def offloaded(self) -> tuple[SavedStorage, ...]:
        return tuple(storage for storage in self.storages if isinstance(storage.decision, Offload))

    @property
    def offloaded_bytes(self) -> int:
        """Bytes written in forward; the same number is read in backward."""
        return sum(storage.size_bytes for storage in self.offloaded)

    def to_json(self) -> str:
        """Stable text: the same plan gives the same bytes."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of :meth:`to_json`."""
        raw: dict[str, Any] = json.loads(text)
        storages = tuple(_storage_from(entry) for entry in raw.pop("storages"))
        return cls(storages=storages, **raw)


def _storage_from(raw: dict[str, Any]) -> SavedStorage:
    decision = raw.pop("decision")
    for name in ("saved_nodes", "shape"):
        raw[name] = tuple(raw[name])
    return SavedStorage(**raw, decision=Offload(**decision) if "reload" in decision else Keep(**decision))
