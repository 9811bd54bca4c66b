"""The plan: one decision for every storage that is saved for backward, as a plain value.

A plan refers to nodes by name, and to places by position in the scheduled joint graph. That graph includes the plan's
recomputations, but not its offloads. A plan can therefore be printed, compared and serialised, and the same graph gets
the same plan in every process.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

from ssdtrain_fx.passes.planning.chain_memory import ChainMemory
from ssdtrain_fx.passes.planning.transfer_problem import Placement, Tier
from ssdtrain_fx.plain_values import from_plain


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """Leave the storage in memory."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Offload:
    """Offload the storage in forward and reload it in backward. Every position means "right before that node"."""

    representative: str
    """The node whose value is offloaded. Every saved view is rebuilt from it."""
    offload: int
    release: int
    reload: int
    wait: int
    out_s: float
    """Predicted time from offload to release, stalls included. The runtime keeps a storage in memory if it would take
    longer; the same holds for ``back_s``."""
    back_s: float
    """Predicted time from reload to wait, stalls included."""
    reason: str
    tier: Tier = "ssd"
    """Where the storage is kept in between: on the SSD, or in pinned host memory."""
    stall_s: float = 0.0
    """The part of ``out_s`` and ``back_s`` in which the compute stream stalls. The runtime allows this much, and little
    more."""
    lead_s: float = 0.0
    """In a chain of graphs: how long before this backward its read should begin; see ``read_ahead.AheadTimes``."""
    left_s: float = 0.0
    """In a chain of graphs: how much of this backward is left at the next wait."""

    @property
    def placement(self) -> Placement:
        """The part of the decision that the simulation takes."""
        return Placement(self.release, self.reload, self.tier, self.offload, self.wait)


@dataclasses.dataclass(frozen=True, slots=True)
class Recompute:
    """Free the storage in forward and recompute it in backward."""

    nodes: tuple[str, ...]
    """The nodes that run again."""
    sources: tuple[str, ...]
    """Names of the saved storages that these nodes read. Each of them is itself kept, offloaded or recomputed."""
    reason: str


PlannedDecision = Keep | Offload | Recompute
"""What a plan does with one storage. What a policy may return is ``policy.Decision``."""


@dataclasses.dataclass(frozen=True, slots=True)
class SavedStorage:
    """A storage that is saved for backward, and the decision about it."""

    name: str
    """The node that allocates it; for a multi-output op, the node that exposes it."""
    saved_nodes: tuple[str, ...]
    """The saved tensors on this storage. There are several if views of it are saved."""
    op: str
    shape: tuple[str, ...]
    """Sizes as text, because they can be symbols."""
    dtype: str
    device: str
    size_bytes: int
    is_input: bool
    """Whether it is a parameter, a buffer or data that the caller passes in."""
    source: str
    """The line of user code that created it, or an empty string."""
    decision: PlannedDecision


PeakRole = Literal["logits", "chunk", "gradients", "saved", "other"]
"""What memory at a peak is for. ``logits``: the logits and values of their size, such as their gradient. ``chunk``:
what the loss of one chunk needs besides its results. ``gradients``: those that backward returns. ``saved``: what
forward saves for backward. ``other``: intermediate results."""


@dataclasses.dataclass(frozen=True, slots=True)
class PeakPart:
    """The bytes at a peak with one role."""

    role: PeakRole
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """Where memory use peaks, and which storages are live there."""

    size_bytes: int
    position: int
    node: str
    """The node that runs there."""
    phase: Literal["forward", "backward"]
    source: str
    """The line of user code that the node comes from, or an empty string."""
    largest: tuple[tuple[str, int], ...]
    """The largest live storages: name and bytes, largest first."""
    parts: tuple[PeakPart, ...] = ()
    """All that is live, by its role, largest first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for a training step and their predicted effect.

    Peaks count the storages that the joint graph itself allocates, without parameters and inputs. Times are seconds per
    step on the hardware that the plan was made for.
    """

    storages: tuple[SavedStorage, ...]
    peak_before: Peak
    peak_after: Peak
    floor_bytes: int
    """The working-set floor: no choice or placement of offloads has a lower peak."""
    step_s: float
    """Time of the step without offloading and recomputation."""
    exposed_s: float
    """Time that offloading and recomputation add to the step."""
    recompute_s: float
    """The part of ``exposed_s`` that recomputation takes."""
    read_s: float
    """How long the SSD is busy with reads; ``write_s``: with writes."""
    write_s: float
    host_peak_bytes: int = 0
    """The most pinned host memory that the host tier holds."""
    stall_s: float = 0.0
    """The part of ``exposed_s`` in which the compute stream waits for the SSD, or for copies that run beside it."""
    loss_chunks: int = 0
    """How many chunks the loss is computed in (option ``chunk_loss``). 0: it is not computed in chunks."""
    why_nothing_moves: str = ""
    """If nothing is offloaded: why, and which option would change that. Otherwise empty."""
    chain_before: ChainMemory = dataclasses.field(default_factory=ChainMemory)
    """What this graph adds to the memory of a step of several graphs, without offloading and recomputation."""
    chain_after: ChainMemory = dataclasses.field(default_factory=ChainMemory)
    """The same with this plan."""

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
        """Bytes that are offloaded in forward and reloaded in backward."""
        return sum(storage.size_bytes for storage in self.offloaded)

    @property
    def on_host(self) -> tuple[SavedStorage, ...]:
        """The offloaded storages that stay in pinned host memory."""
        return tuple(
            storage
            for storage in self.storages
            if isinstance(storage.decision, Offload) and storage.decision.tier == "host"
        )

    @property
    def written_bytes(self) -> int:
        """Bytes written to the SSD in forward. As many are read in backward or served from staging."""
        return self.offloaded_bytes - sum(storage.size_bytes for storage in self.on_host)

    def to_json(self) -> str:
        """Serialise to JSON. Equal plans give equal bytes."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: the text is no plan.
        """
        return from_plain(cls, json.loads(text))
