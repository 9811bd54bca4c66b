"""A joint graph with the results of the analysis passes, and a toy machine to plan for."""

from __future__ import annotations

import dataclasses
from typing import Any

from ssdtrain_fx.config import PolicyName
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.passes.analysis.analyse import Analysis
from ssdtrain_fx.passes.analysis.candidates import Candidate, find_candidates
from ssdtrain_fx.passes.analysis.liveness import find_live_intervals
from ssdtrain_fx.passes.analysis.pose_problem import pose_problem
from ssdtrain_fx.passes.decisions.apply_policy import apply_policy
from ssdtrain_fx.passes.decisions.plan_offloads import plan_offloads
from ssdtrain_fx.passes.graph.alias_sets import AliasSets, find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.planning.plan import Plan
from ssdtrain_fx.passes.planning.policy import Policy
from ssdtrain_fx.passes.planning.step_budget import StepBudget
from ssdtrain_fx.passes.planning.transfer_problem import HostTier
from ssdtrain_fx.passes.rewrites.insert_offloads import insert_offloads
from ssdtrain_fx.passes.rewrites.verify_offloads import verify_offloads
from ssdtrain_fx.testing.capture import CapturedStep

_ENGINE = ""
"""The engine with all defaults: its spill file is unnamed, in the temporary directory."""
_NO_LIMIT = 1e30
"""Bytes per second of a transfer that takes no time."""


def toy_hardware(disk_bytes_per_s: float = 1024, **changes: Any) -> Hardware:
    """A machine with a disk and no staging memory: a storage leaves memory once it is on disk. Copies take no time.

    Args:
        disk_bytes_per_s: read and write rate of the disk; each is half of it while both are busy.
        changes: other fields of ``Hardware``.
    """
    free = Channel(bytes_per_s=_NO_LIMIT)
    disk = Channel(bytes_per_s=min(disk_bytes_per_s, _NO_LIMIT))
    hardware = Hardware(
        device="cpu",
        flops_per_s={"float32": 1e12, "bfloat16": 1e12},
        memory_bytes_per_s=1e12,
        elements_per_s={"float32": 1e12, "bfloat16": 1e12},
        kernel_s=0.0,
        write=disk,
        read=disk,
        share_when_both=0.5,
        copy_out=free,
        copy_in=free,
        copies_block_compute=False,
        offload_s=0.0,
        reload_s=0.0,
        staging_bytes=0,
    )
    return dataclasses.replace(hardware, **changes)


@dataclasses.dataclass(frozen=True, slots=True)
class GraphAnalysis:
    """A joint graph and the results of the analysis passes."""

    joint: ScheduledJointGraph
    alias_sets: AliasSets
    candidates: tuple[Candidate, ...]

    def plan(
        self,
        *,
        policy: PolicyName | Policy = "all",
        disk: float = 1024,
        max_slowdown: float = 0.0,
        budget_bytes: int | None = None,
        host_bytes: int = 0,
    ) -> Plan:
        """Plan with ``policy`` for a machine where every node takes 1 s and the disk moves ``disk`` bytes/s each way.

        There are no copies, no staging and no recomputation. With ``host_bytes`` the machine is a GPU whose staging
        memory is a host tier of that size.

        Raises:
            PolicyError: a decision is not legal.
            BudgetError: ``budget_bytes`` cannot be met.
        """
        known = Analysis(
            joint=self.joint,
            alias_sets=self.alias_sets,
            candidates=self.candidates,
            intervals=find_live_intervals(self.joint.graph, self.alias_sets),
            node_s=(1.0,) * len(self.joint.graph.nodes),
        )
        hardware, host = toy_hardware(disk), None
        if host_bytes:
            hardware = dataclasses.replace(hardware, device="toy GPU", staging_bytes=host_bytes)
            host = HostTier(budget_bytes=host_bytes)
        problem = pose_problem(known, hardware=hardware, host=host)
        budget = None if budget_bytes is None else StepBudget(size_bytes=budget_bytes)
        if callable(policy):
            return apply_policy(policy, known, problem, max_slowdown=max_slowdown, budget=budget)
        return plan_offloads(
            known,
            problem,
            move_all=policy == "all",
            max_slowdown=max_slowdown,
            budget=budget,
        )

    def rewrite(self, plan: Plan) -> ScheduledJointGraph:
        """Apply the plan to ``joint`` in place, verify the rewritten graph and return it.

        Raises:
            InternalError: the plan does not belong to this graph, or the rewritten graph breaks an invariant.
        """
        on_gpu = bool(plan.on_host)
        insert_offloads(
            self.joint,
            alias_sets=self.alias_sets,
            plan=plan,
            candidates=self.candidates,
            engine=_ENGINE,
            order_reloads=on_gpu,
        )
        verify_offloads(self.joint, host=HostTier(budget_bytes=plan.host_peak_bytes) if on_gpu else None)
        return self.joint

    def candidate(self, name: str) -> Candidate:
        """Return the candidate that has a saved node of this name.

        Raises:
            KeyError: that node is not saved; the message lists the saved nodes.
        """
        for candidate in self.candidates:
            if name in [node.name for node in candidate.saved_nodes]:
                return candidate
        raise KeyError(
            f"{name} is not saved for backward; saved nodes: {', '.join(node.name for node in self.joint.saved)}"
        )


def analyse(step: CapturedStep | ScheduledJointGraph, *, min_tensor_bytes: int = 0) -> GraphAnalysis:
    """Find the storages of a joint graph and the candidates for offloading."""
    joint = step.join() if isinstance(step, CapturedStep) else step
    alias_sets = find_alias_sets(joint.graph)
    return GraphAnalysis(joint, alias_sets, find_candidates(joint, alias_sets, min_tensor_bytes=min_tensor_bytes))
