"""The interface of a policy: a plain function that decides which saved storages are offloaded.

    def move_the_largest(analysis: StepAnalysis, costs: Costs, budget: Budget) -> dict[str, Decision]:
        largest = sorted(analysis.movables, key=lambda name: -analysis.movables[name].size_bytes)
        return {**costs.place(largest[:3])}

    OffloadConfig(policy=move_the_largest)

A policy is called once per training graph. It sees names, positions, bytes and seconds, but not the graph. A storage
that it does not name stays in memory. Its decisions are checked before the graph is rewritten
(:mod:`ssdtrain_fx.passes.decisions.apply_policy`), and the rewritten graph is verified as for any other plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from ssdtrain_fx.passes.planning.place_transfers import SSD_SPEEDUPS, place
from ssdtrain_fx.passes.planning.plan import Keep, SavedStorage
from ssdtrain_fx.passes.planning.simulate import Simulation, simulate
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Placement, TransferProblem

__all__ = ["Budget", "Costs", "Decision", "Keep", "Placement", "Policy", "StepAnalysis"]

Decision = Keep | Placement
"""Keep the storage in memory, or release and reload it right before the nodes at two positions."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepAnalysis:
    """One training step. Positions are indices into ``nodes``; position p means "right before node p"."""

    storages: tuple[SavedStorage, ...]
    """All storages that are saved for backward, in the order of forward. Their decision is ``Keep``, with the reason if
    a storage must stay in memory."""
    movables: Mapping[str, Movable]
    """The storages that may be offloaded, by name: their sizes, and the positions between which they can be away."""
    nodes: tuple[str, ...]
    """Names of all nodes, forward and then backward."""
    marker: int
    """Where backward begins."""
    live_bytes: tuple[int, ...]
    """Live bytes at every position without offloading."""

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """What offloading costs, by the prediction that ``policy="auto"`` uses."""

    problem: TransferProblem
    """Contains the time of every node and the hardware profile."""
    movables: Mapping[str, Movable]

    @property
    def step_s(self) -> float:
        """Time of the step without offloading."""
        return self.problem.step_s

    def compute_s(self, name: str) -> float:
        """Compute-stream time that offloading and reloading a storage takes, without stalls."""
        size_bytes = self.movables[name].size_bytes
        return self.problem.blocks_out_s(size_bytes) + self.problem.blocks_in_s(size_bytes)

    def disk_s(self, name: str) -> float:
        """SSD time that offloading and reloading a storage takes: one write and one read."""
        hardware, size_bytes = self.problem.hardware, self.movables[name].size_bytes
        return hardware.write.transfer_s(size_bytes) + hardware.read.transfer_s(size_bytes)

    def place(self, names: Iterable[str], *, ssd_speedup: float = SSD_SPEEDUPS[0]) -> dict[str, Placement]:
        """Decisions to offload ``names``, with each release as early and each reload as late as the SSD allows.

        Args:
            ssd_speedup: place as if the SSD were this many times as fast; below 1 leaves time in reserve.

        Raises:
            KeyError: no storage has this name, or it must stay in memory.
        """
        chosen = {name: self.movables[name] for name in names}
        placements = place(self.problem, chosen.values(), ssd_speedup)
        return {name: placements[movable.idx] for name, movable in chosen.items()}

    def simulate(self, decisions: Mapping[str, Decision]) -> Simulation:
        """Simulate the step with these decisions: peak memory, exposed time, stalls."""
        return simulate(self.problem, self.placements(decisions))

    def placements(self, decisions: Mapping[str, Decision]) -> dict[int, Placement]:
        """The decisions to offload, keyed by :attr:`Movable.idx`."""
        return {
            self.movables[name].idx: decision for name, decision in decisions.items() if isinstance(decision, Placement)
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The limits that the user sets."""

    max_slowdown: float
    """A share of ``Costs.step_s``. It is advice: a plan that exceeds it is accepted."""
    memory_budget_bytes: int | None
    """What the user's budget leaves for the peak of the plan. A plan with a higher peak is rejected."""


Policy = Callable[[StepAnalysis, Costs, Budget], Mapping[str, Decision]]
"""Returns decisions, keyed by :attr:`SavedStorage.name`."""
