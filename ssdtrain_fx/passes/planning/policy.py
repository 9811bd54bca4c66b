"""What a policy gets and gives: a plain function that decides which saved storages leave memory.

    def move_the_largest(analysis: StepAnalysis, costs: Costs, budget: Budget) -> dict[str, Decision]:
        largest = sorted(analysis.movables, key=lambda name: -analysis.movables[name].size_bytes)
        return {**costs.place(largest[:3])}

    OffloadConfig(policy=move_the_largest)

It is called once per training graph, and sees names, positions, bytes and seconds: no graph that it could change. A
storage that it does not name stays in memory. What it returns is checked before anything is rewritten
(:mod:`ssdtrain_fx.passes.decisions.apply_policy`), and the rewritten graph is verified as always.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from ssdtrain_fx.passes.planning.place_transfers import HASTES, place
from ssdtrain_fx.passes.planning.plan import Keep, SavedStorage
from ssdtrain_fx.passes.planning.simulate import Simulation, simulate
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Placement, TransferProblem

__all__ = ["Budget", "Costs", "Decision", "Keep", "Placement", "Policy", "StepAnalysis"]

Decision = Keep | Placement
"""Stay in memory, or be released and reloaded right before the nodes at two positions."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepAnalysis:
    """One training step. All positions are those of ``nodes``; a decision at position p means "right before node p"."""

    storages: tuple[SavedStorage, ...]
    """Everything that is saved for backward, in the order of forward. The decision is ``Keep``, with the reason where a
    storage must stay."""
    movables: Mapping[str, Movable]
    """Those of them that may leave memory, by name: size, and between which positions each can be away."""
    nodes: tuple[str, ...]
    """Names of all nodes, forward and then backward."""
    marker: int
    """Where backward begins."""
    live_bytes: tuple[int, ...]
    """At every position, with everything in memory."""

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """What moving costs, by the prediction that ``policy="auto"`` uses too."""

    problem: TransferProblem
    """Seconds of every node, and the hardware."""
    movables: Mapping[str, Movable]

    @property
    def step_s(self) -> float:
        """Time of the step when nothing is moved."""
        return self.problem.step_s

    def compute_s(self, name: str) -> float:
        """Time of the compute stream that moving a storage out and back takes, stalls not included."""
        size_bytes = self.movables[name].size_bytes
        return self.problem.blocks_out_s(size_bytes) + self.problem.blocks_in_s(size_bytes)

    def disk_s(self, name: str) -> float:
        """Time of the SSD for it: a write and a read."""
        hardware, size_bytes = self.problem.hardware, self.movables[name].size_bytes
        return hardware.write.transfer_s(size_bytes) + hardware.read.transfer_s(size_bytes)

    def place(self, names: Iterable[str], *, haste: float = HASTES[0]) -> dict[str, Placement]:
        """Decisions to move ``names``: each release as early and each reload as late as the SSD allows.

        Args:
            haste: as if the SSD were so many times as fast as it is; below 1 leaves time in reserve.

        Raises:
            KeyError: a storage has no such name, or must stay.
        """
        chosen = {name: self.movables[name] for name in names}
        placements = place(self.problem, chosen.values(), haste)
        return {name: placements[movable.idx] for name, movable in chosen.items()}

    def simulate(self, decisions: Mapping[str, Decision]) -> Simulation:
        """Run the step on the clock: peak memory, exposed time, stalls."""
        return simulate(self.problem, self.placements(decisions))

    def placements(self, decisions: Mapping[str, Decision]) -> dict[int, Placement]:
        """The decisions to move, by :attr:`Movable.idx`."""
        return {
            self.movables[name].idx: decision for name, decision in decisions.items() if isinstance(decision, Placement)
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What the user allows."""

    max_slowdown: float
    """As a share of ``Costs.step_s``. A policy may take it as advice."""
    memory_budget_bytes: int | None
    """A plan with a higher peak is refused."""


Policy = Callable[[StepAnalysis, Costs, Budget], Mapping[str, Decision]]
"""Decisions by :attr:`SavedStorage.name`."""
