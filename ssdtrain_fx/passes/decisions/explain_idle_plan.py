"""Say why a plan offloads nothing, and which option would change that, with the peak that it would reach.

The figures come from further plans for the same graph. They are made only if nothing is offloaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.analysis.analyse import Analysis
from ssdtrain_fx.passes.analysis.pose_problem import pose_problem
from ssdtrain_fx.passes.decisions.plan_offloads import plan_offloads
from ssdtrain_fx.passes.planning.plan import PeakRole, Plan
from ssdtrain_fx.passes.planning.step_budget import StepBudget
from ssdtrain_fx.passes.planning.transfer_problem import TransferProblem
from ssdtrain_fx.units import format_bytes

NO_OPTION = "A smaller batch lowers it; no option does."
WHAT_LOWERS: Mapping[PeakRole, str] = {
    "logits": "The peak is the loss head; chunk_loss may lower it.",
    "chunk": "The peak is the loss of one chunk; more chunks lower it.",
    "gradients": NO_OPTION,
    "saved": NO_OPTION,
    "other": NO_OPTION,
}
"""What lowers a peak at which nothing can be offloaded, by its largest part."""
LARGER_SLOWDOWNS = (0.05, 0.2, 1.0)
"""Values of ``max_slowdown`` to try: few, because each takes a plan. Above these, the SSD is too slow to be of use."""


def explain_idle_plan(
    analysis: Analysis,
    problem: TransferProblem,
    plan: Plan,
    *,
    max_slowdown: float,
    min_tensor_bytes: int,
    budget: StepBudget | None,
    has_policy: bool,
    analyse_all: Callable[[], Analysis],
) -> str:
    """One line, or an empty one if the plan offloads something.

    Args:
        problem: the problem of ``analysis``. Neither knows about recomputations.
        plan: the plan that is executed.
        has_policy: the plan was made by a policy of the user.
        analyse_all: the analysis with ``min_tensor_bytes=0``.
    """
    if plan.offloaded:
        return ""
    if not any(not storage.is_input for storage in plan.storages):
        return (
            "backward reads nothing but inputs of the graph. "
            + _about_checkpointing(analysis)
            + "No option changes that."
        )
    if has_policy:
        return "the policy keeps every storage. policy='auto' would decide by the predicted peak."
    if budget is not None and plan.peak_before_bytes <= budget.peak_bytes:
        return (
            f"the step fits into memory_budget_bytes={budget.size_bytes} without offloading. A lower budget would "
            f"reach {format_bytes(plan.floor_bytes)} at least."
        )
    if plan.recomputed:
        return (
            f"recomputation alone lowers the peak to {format_bytes(plan.peak_after_bytes)}. "
            "recompute=False would leave that to offloading."
        )
    too_small = _if_small_storages_moved(analyse_all, problem.hardware, plan, max_slowdown, min_tensor_bytes)
    if not problem.movables:
        return f"{_why_none_may_move(plan)}. {too_small or 'No option changes that.'}"
    if not analysis.is_link and plan.floor_bytes >= plan.peak_before_bytes:
        peak = plan.peak_before
        largest = ", ".join(f"{name} {format_bytes(size_bytes)}" for name, size_bytes in peak.largest[:2])
        return (
            f"the peak of {format_bytes(peak.size_bytes)} is elsewhere: at {peak.node} in {peak.phase}, nothing that "
            f"may be offloaded is idle ({largest}). {_about_checkpointing(analysis)}"
            f"{too_small or WHAT_LOWERS[peak.parts[0].role if peak.parts else 'other']}"
        )
    slower = _if_slower(analysis, problem, plan, max_slowdown)
    return f"offloading takes more time than max_slowdown={max_slowdown:g} allows. {slower}"


def _why_none_may_move(plan: Plan) -> str:
    """The reasons why storages stay, those of most bytes first."""
    bytes_of: dict[str, int] = {}
    for storage in plan.storages:
        if not storage.is_input:
            reason = storage.decision.reason.partition(" bytes: ")[2] or storage.decision.reason
            bytes_of[reason] = bytes_of.get(reason, 0) + storage.size_bytes
    most = sorted(bytes_of.items(), key=lambda item: (-item[1], item[0]))[:2]
    return "no saved storage may be offloaded: " + "; ".join(f"{format_bytes(size)} {reason}" for reason, size in most)


def _about_checkpointing(analysis: Analysis) -> str:
    checkpointed = any(node.meta.get("recompute") is not None for node in analysis.joint.graph.nodes)
    return "Activation checkpointing recomputes what could be offloaded; without it, more would be. " * checkpointed


def _if_small_storages_moved(
    analyse_all: Callable[[], Analysis], hardware: Hardware, plan: Plan, max_slowdown: float, min_tensor_bytes: int
) -> str:
    """What ``min_tensor_bytes=0`` would reach; empty if no storage is too small."""
    small_bytes = sum(
        storage.size_bytes for storage in plan.storages if "below min_tensor_bytes" in storage.decision.reason
    )
    if not small_bytes:
        return ""
    analysis = analyse_all()
    other = plan_offloads(analysis, pose_problem(analysis, hardware=hardware), max_slowdown=max_slowdown)
    if not other.offloaded:
        return ""
    return (
        f"min_tensor_bytes=0 instead of {min_tensor_bytes} would offload {format_bytes(other.offloaded_bytes)} "
        f"and reach a peak of {format_bytes(other.peak_after_bytes)} instead of {format_bytes(plan.peak_before_bytes)}."
    )


def _if_slower(analysis: Analysis, problem: TransferProblem, plan: Plan, max_slowdown: float) -> str:
    """The least larger ``max_slowdown`` at which something moves, and what it reaches."""
    for slowdown in LARGER_SLOWDOWNS:
        if slowdown > max_slowdown:
            other = plan_offloads(analysis, dataclasses.replace(problem, host=None), max_slowdown=slowdown)
            if other.offloaded:
                return (
                    f"max_slowdown={slowdown:g} would offload {format_bytes(other.offloaded_bytes)} and reach a peak "
                    f"of {format_bytes(other.peak_after_bytes)} instead of {format_bytes(plan.peak_before_bytes)}."
                )
    return (
        f"The SSD is too slow: even max_slowdown={LARGER_SLOWDOWNS[-1]:g} moves nothing. memory_budget_bytes could "
        f"reach a peak of {format_bytes(plan.floor_bytes)}, at any cost in time."
    )
