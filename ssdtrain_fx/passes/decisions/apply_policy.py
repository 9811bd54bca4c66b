"""Call a policy, check every decision, and predict the effect of the plan.

A decision is legal if the rewritten graph computes the same bits. Whatever a policy returns, the plan is either as safe
as the planner's own, or an error is raised. The checks are:

- the name:     the storage is saved, and is not held outside the graph
- the release:  after the last read in forward, and no later than where backward begins
- the reload:   in backward, and no later than the first read there
- the offload:  after the node that makes it, and no later than the release; the wait: the same in backward
- the tier:     it exists, and it can hold all storages that are assigned to it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, cast

from ssdtrain_fx.errors import BudgetError, PolicyError
from ssdtrain_fx.function_names import display_name
from ssdtrain_fx.passes.analysis.analyse import Analysis
from ssdtrain_fx.passes.decisions.plan_offloads import describe_plan, describe_storage
from ssdtrain_fx.passes.planning.place_transfers import Choice
from ssdtrain_fx.passes.planning.plan import Keep, Plan
from ssdtrain_fx.passes.planning.policy import Budget, Costs, Decision, Policy, StepAnalysis
from ssdtrain_fx.passes.planning.simulate import live_bytes, simulate
from ssdtrain_fx.passes.planning.step_budget import StepBudget
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Placement, Placements, TransferProblem

KEPT_BY_POLICY = "the policy does not offload it"


def apply_policy(
    policy: Policy,
    analysis: Analysis,
    problem: TransferProblem,
    *,
    max_slowdown: float,
    budget: StepBudget | None = None,
) -> Plan:
    """Make the plan that ``policy`` decides on.

    Args:
        problem: the result of ``pose_problem`` for the same analysis.

    Raises:
        PolicyError: a decision is illegal. The message names the storage and the reason.
        BudgetError: the plan's peak is above the budget.
    """
    step = _describe_step(analysis, problem)
    costs = Costs(problem, step.movables)
    peak_bytes = None if budget is None else budget.peak_bytes
    limits = Budget(max_slowdown=max_slowdown, memory_budget_bytes=peak_bytes)
    decisions = _check(policy, step, policy(step, costs, limits))
    placements = costs.placements(decisions)
    _check_host_tier(policy, problem, step.movables, placements)
    choice = Choice(placements, simulate(problem, placements), ssd_speedup=1.0)
    reasons = {name: decision.reason for name, decision in decisions.items() if isinstance(decision, Keep)}
    plan = describe_plan(analysis, problem, choice, reason_not_moved=KEPT_BY_POLICY, reasons=reasons)
    if budget is not None and plan.peak_after_bytes > budget.peak_bytes:
        raise BudgetError(
            plan.floor_bytes,
            f"memory_budget_bytes is {budget.size_bytes}, but the predicted activation peak with policy "
            f"{display_name(policy)} is {plan.peak_after_bytes} bytes. Raise the budget to "
            f"{budget.size_for(plan.peak_after_bytes)} bytes, or let the policy offload more: offloading everything "
            f"reaches a peak of {plan.floor_bytes} bytes.",
            reached_bytes=plan.peak_after_bytes,
        )
    return plan


def _describe_step(analysis: Analysis, problem: TransferProblem) -> StepAnalysis:
    by_idx = {movable.idx: movable for movable in problem.movables}
    storages = tuple(
        describe_storage(candidate, analysis, Keep(candidate.reason_to_keep)) for candidate in analysis.candidates
    )
    return StepAnalysis(
        storages=storages,
        movables={
            storage.name: by_idx[candidate.storage.idx]
            for candidate, storage in zip(analysis.candidates, storages, strict=True)
            if candidate.storage.idx in by_idx
        },
        nodes=tuple(node.name for node in analysis.joint.graph.nodes),
        marker=problem.marker,
        live_bytes=live_bytes(problem, {}),
    )


def _check(policy: Policy, step: StepAnalysis, decisions: object) -> dict[str, Decision]:
    if not isinstance(decisions, Mapping):
        raise PolicyError(
            f"Policy {display_name(policy)} returned {decisions!r}; expected a mapping from storage names to decisions."
        )
    checked: dict[str, Decision] = {}
    reasons = {storage.name: storage.decision.reason for storage in step.storages}
    for name, decision in cast("Mapping[object, object]", decisions).items():
        if not isinstance(name, str) or name not in reasons:
            _refuse(policy, name, decision, f"no such storage is saved; expected one of {', '.join(reasons)}")
        if not isinstance(decision, (Keep, Placement)):
            _refuse(policy, name, decision, "expected Keep(...) or Placement(...)")
        if isinstance(decision, Placement):
            if name not in step.movables:
                _refuse(policy, name, decision, f"it must stay in memory: {reasons[name]}")
            _check_positions(policy, name, decision, step.movables[name], step.marker)
        checked[name] = decision
    return checked


def _check_positions(policy: Policy, name: str, decision: Placement, movable: Movable, marker: int) -> None:
    first_release = max(movable.offload, movable.earliest_release)
    offload, wait = decision.offload_of(movable), decision.wait_of(movable)
    for field, found, first, last, reason in (
        ("release", decision.release, first_release, marker, "after the last read in forward, before backward begins"),
        ("reload", decision.reload, marker + 1, movable.wait, "in backward, before the first read there"),
        ("offload", offload, movable.offload, decision.release, "after the node that makes it, before the release"),
        ("wait", wait, decision.reload, movable.wait, "after the reload, before the first read in backward"),
    ):
        if type(found) is not int or not first <= found <= last:  # pyright: ignore[reportUnnecessaryComparison]
            _refuse(policy, name, decision, f"{field} is {found!r}; expected {first} to {last} ({reason})")


def _check_host_tier(
    policy: Policy, problem: TransferProblem, movables: Mapping[str, Movable], placements: Placements
) -> None:
    left_bytes = 0 if problem.host is None else problem.host.budget_bytes
    for name, movable in movables.items():
        placement = placements.get(movable.idx)
        if placement is None or placement.tier == "ssd":
            continue
        if placement.tier != "host":  # pyright: ignore[reportUnnecessaryComparison]
            _refuse(policy, name, placement, "expected tier 'ssd' or 'host'")
        if problem.host is None:
            _refuse(policy, name, placement, "there is no host tier here; only a GPU has one")
        left_bytes -= problem.hardware.staged_bytes(movable.size_bytes)
        if left_bytes < 0:
            _refuse(
                policy,
                name,
                placement,
                f"the host tier holds at most {problem.host.budget_bytes} bytes; this exceeds it by {-left_bytes}",
            )


def _refuse(policy: Policy, name: object, decision: object, reason: str) -> NoReturn:
    raise PolicyError(
        f"Policy {display_name(policy)} decides {decision} for storage {name!r}: {reason}. "
        "Start from Costs.place(names), whose decisions are legal."
    )
