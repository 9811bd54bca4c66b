"""The plan: one decision for every storage that is saved for backward, as a plain value.

Nodes are given by name and places by position in the scheduled joint graph without offloads (with the recomputations
that the plan decides on), so a plan prints, compares and serialises, and the same graph gets the same plan in every
process.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from ssdtrain_fx.passes.planning.transfer_problem import Placement, Tier


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
    out_s: float
    """Predicted time from offload to release ..."""
    back_s: float
    """... and from reload to wait, stalls included: the runtime keeps in memory what takes longer."""
    reason: str
    tier: Tier = "ssd"
    """Where it is in between: on the SSD, or in pinned host memory."""
    stall_s: float = 0.0
    """Of both, what the compute stream waits: the runtime allows as much, and little more."""
    idle_bytes: int | None = None
    """How much memory of earlier reloads may lie idle from this one to the next, without a higher peak. None: any."""

    @property
    def placement(self) -> Placement:
        """What of it the simulation asks for."""
        return Placement(self.release, self.reload, self.tier)


@dataclasses.dataclass(frozen=True, slots=True)
class Recompute:
    """Forget the storage in forward and make it again in backward."""

    nodes: tuple[str, ...]
    """What runs again."""
    sources: tuple[str, ...]
    """Saved storages that it reads, by name; these are kept, offloaded or made again themselves."""
    reason: str


PlannedDecision = Keep | Offload | Recompute
"""What a plan does with one storage. What a policy may return is ``policy.Decision``."""


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
    decision: PlannedDecision


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """Where memory is highest, and what lives there."""

    size_bytes: int
    position: int
    node: str
    """The node that runs there."""
    phase: Literal["forward", "backward"]
    source: str
    """Line of user code behind that node, or an empty string."""
    largest: tuple[tuple[str, int], ...]
    """The largest storages that live there: name and bytes, largest first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Decisions for a training step and what they are predicted to do.

    Peaks count the storages that the joint graph itself allocates: no parameters, no inputs. Times are seconds of one
    step on the hardware that the plan was made for.
    """

    storages: tuple[SavedStorage, ...]
    peak_before: Peak
    peak_after: Peak
    floor_bytes: int
    """Working-set floor: no choice and no placement of offloads has a lower peak."""
    step_s: float
    """Without offloading and recomputation."""
    exposed_s: float
    """What they add to it."""
    recompute_s: float
    """Of that, the time of what runs again."""
    read_s: float
    """How long the SSD is busy reading, and writing."""
    write_s: float
    host_peak_bytes: int = 0
    """Pinned host memory that the host tier holds at most."""
    stall_s: float = 0.0
    """Of ``exposed_s``, what the compute stream waits for the SSD, and for copies that run beside it."""

    @property
    def peak_before_bytes(self) -> int:
        return self.peak_before.size_bytes

    @property
    def peak_after_bytes(self) -> int:
        return self.peak_after.size_bytes

    @property
    def slowdown(self) -> float:
        """Exposed time as a share of the step."""
        return self.exposed_s / self.step_s if self.step_s else 0.0

    @property
    def offloaded(self) -> tuple[SavedStorage, ...]:
        return tuple(storage for storage in self.storages if isinstance(storage.decision, Offload))

    @property
    def recomputed(self) -> tuple[SavedStorage, ...]:
        return tuple(storage for storage in self.storages if isinstance(storage.decision, Recompute))

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that leave in forward; the same number comes back in backward."""
        return sum(storage.size_bytes for storage in self.offloaded)

    @property
    def on_host(self) -> tuple[SavedStorage, ...]:
        """Those of the offloaded storages that get no further than pinned host memory."""
        return tuple(
            storage
            for storage in self.storages
            if isinstance(storage.decision, Offload) and storage.decision.tier == "host"
        )

    @property
    def written_bytes(self) -> int:
        """Bytes written to the SSD in forward; as many are read in backward, or served from staging."""
        return self.offloaded_bytes - sum(storage.size_bytes for storage in self.on_host)

    def to_json(self) -> str:
        """Stable text: the same plan gives the same bytes."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of :meth:`to_json`."""
        raw: dict[str, Any] = json.loads(text)
        raw["storages"] = tuple(_storage_from(entry) for entry in raw["storages"])
        for name in ("peak_before", "peak_after"):
            largest = tuple((storage, size_bytes) for storage, size_bytes in raw[name].pop("largest"))
            raw[name] = Peak(**raw[name], largest=largest)
        return cls(**raw)


def _storage_from(raw: dict[str, Any]) -> SavedStorage:
    decision = raw.pop("decision")
    for name in ("saved_nodes", "shape"):
        raw[name] = tuple(raw[name])
    return SavedStorage(**raw, decision=_decision_from(decision))


def _decision_from(raw: dict[str, Any]) -> PlannedDecision:
    if "reload" in raw:
        return Offload(**raw)
    if "sources" in raw:
        return Recompute(nodes=tuple(raw["nodes"]), sources=tuple(raw["sources"]), reason=raw["reason"])
    return Keep(**raw)
