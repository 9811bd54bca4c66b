"""The pipeline: from a partitioned training step to one that offloads saved activations.

    join -> passes_before_planning -> analyse -> choose a plan -> passes_of_plan -> split

Plans are compared: one without recomputation, and one for each proposed set of recomputations. A set changes the graph,
so its plan is made on a copy: insert_recomputations -> analyse -> pose_problem -> plan_offloads. If the user passes a
policy, apply_policy makes the only plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import math
from collections.abc import Generator, Sequence
from typing import Protocol

from torch import fx

from ssdtrain_fx.accelerators import find_accelerator
from ssdtrain_fx.errors import BudgetError
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.analysis.analyse import Analysis, analyse, with_candidates
from ssdtrain_fx.passes.analysis.chains import name_graph
from ssdtrain_fx.passes.analysis.describe_schedule import ScheduleDescriber, Timeline
from ssdtrain_fx.passes.analysis.find_recomputations import Recomputation
from ssdtrain_fx.passes.analysis.module_wishes import Modules, modules_of, unmatched_patterns
from ssdtrain_fx.passes.analysis.node_calls import CostSources, Times
from ssdtrain_fx.passes.analysis.pose_problem import pose_problem
from ssdtrain_fx.passes.decisions.apply_policy import apply_policy
from ssdtrain_fx.passes.decisions.explain_idle_plan import explain_idle_plan
from ssdtrain_fx.passes.decisions.plan_offloads import add_recomputations, plan_offloads
from ssdtrain_fx.passes.decisions.propose_recomputations import propose_recomputations, wished_recomputations
from ssdtrain_fx.passes.graph.joint_graph import JointPass, ScheduledJointGraph, join, split
from ssdtrain_fx.passes.planning.place_transfers import floor_bytes
from ssdtrain_fx.passes.planning.plan import Offload, Plan
from ssdtrain_fx.passes.planning.policy import Policy
from ssdtrain_fx.passes.planning.simulate import ROUNDING
from ssdtrain_fx.passes.planning.step_budget import StepBudget
from ssdtrain_fx.passes.planning.transfer_problem import HostTier, Placements, TransferProblem
from ssdtrain_fx.passes.rewrites.check_custom_pass import checked
from ssdtrain_fx.passes.rewrites.copy_out_views import copy_out_views
from ssdtrain_fx.passes.rewrites.insert_offloads import insert_offloads
from ssdtrain_fx.passes.rewrites.insert_recomputations import insert_recomputations
from ssdtrain_fx.passes.rewrites.sink_matrix_products import sink_matrix_products
from ssdtrain_fx.passes.rewrites.store_sums import store_sums
from ssdtrain_fx.passes.rewrites.verify_offloads import verify_offloads
from ssdtrain_fx.units import format_bytes, some_of

log = logging.getLogger(__name__)


class EngineOptions(Protocol):
    """What the ops are told about the engine."""

    def to_argument(self) -> str: ...


class Options(Protocol):
    """The options of a pipeline: the part of ``OffloadConfig`` that decides about graphs and plans."""

    @property
    def inner(self) -> str: ...
    @property
    def passes(self) -> Sequence[JointPass]: ...
    @property
    def policy(self) -> str | Policy: ...
    @property
    def module_wishes(self) -> Modules: ...
    @property
    def min_tensor_bytes(self) -> int: ...
    @property
    def recompute(self) -> bool: ...
    @property
    def max_slowdown(self) -> float: ...
    @property
    def forwards_in_flight(self) -> int: ...
    def host_tier(self, hardware: Hardware) -> HostTier | None: ...
    def engine_config(self) -> EngineOptions: ...


def keeps_kernels(options: Options, joint: ScheduledJointGraph) -> bool:
    """Whether the kernels must be those that Inductor chooses without offloading.

    On a GPU, Triton adds up in another order if anything else in a kernel changes, such as a result that is recomputed
    there, or one that another kernel stores.
    """
    values = (node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder"))
    return options.inner == "inductor" and find_accelerator(values) is not None


def passes_before_planning(options: Options, joint: ScheduledJointGraph) -> tuple[JointPass, ...]:
    """What changes the graph before it is analysed and planned."""
    passes = tuple(map(checked, options.passes))
    if keeps_kernels(options, joint):
        return passes
    return (
        *passes,
        *((sink_matrix_products, store_sums) if options.inner == "inductor" else ()),
        functools.partial(copy_out_views, min_tensor_bytes=options.min_tensor_bytes),
    )


def passes_of_plan(planned: PlannedStep, options: Options) -> tuple[JointPass, ...]:
    """What makes the graph execute its plan, and checks that it does."""
    analysis, problem = planned.analysis, planned.problem
    return (
        functools.partial(
            insert_offloads,
            alias_sets=analysis.alias_sets,
            plan=planned.plan,
            candidates=analysis.candidates,
            engine=options.engine_config().to_argument(),
            graph_name=name_graph(analysis.joint) if analysis.is_link else "",
            order_reloads=problem.hardware.has_host_tier,
        ),
        functools.partial(verify_offloads, host=problem.host, hardware=problem.hardware),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadedStep:
    """What the pipeline makes of one training step."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    plan: Plan
    problem: TransferProblem
    """The problem that the plan solves."""
    costs: CostSources
    """Where the seconds in ``problem`` come from."""
    timeline: Timeline | None
    """None unless ``describe`` is set."""
    joint_before: str
    """The scheduled joint graph as text, before and after the pipeline. Both are empty unless ``describe`` is set."""
    joint_after: str
    warning: str = ""
    """What is wrong if no plan stays within a budget that need not be met."""


def offload_saved_tensors(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    num_forward_outputs: int,
    config: Options,
    hardware: Hardware,
    budget: StepBudget | None,
    times: Times | None = None,
    describe: bool = False,
    activation_inputs: frozenset[int] = frozenset(),
    is_final: bool = True,
) -> OffloadedStep:
    """Rewrite a partitioned training step so that saved tensors leave memory between forward and backward.

    Args:
        forward, backward: as a partitioner of ``functorch.compile`` returns them; neither is changed.
        num_forward_outputs: how many results of ``forward`` are not saved for backward.
        hardware: the hardware that the plan is made for.
        budget: what the step may add to the memory of the process. None: the plan is limited by ``max_slowdown``.
        times: measured times of nodes that are not fused. None: every time is a roofline estimate.
        describe: also return the timeline and the graph before and after as text. This takes seconds for thousands of
            nodes.
        activation_inputs: see :func:`~ssdtrain_fx.passes.analysis.chains.find_activation_inputs`.
        is_final: False if this step may not be compiled. The caller then logs ``warning`` of the one that is.

    Raises:
        BudgetError: no plan stays within a budget that must be met.
        PolicyError: the user's policy returned an illegal decision.
        PassError: a user's pass returned a graph that cannot be compiled.
        InternalError: the rewritten graph breaks an invariant.
    """
    with _garbage_left_for_later():
        joint = join(forward, backward, num_forward_outputs=num_forward_outputs, activation_inputs=activation_inputs)
        step = _offload(forward, backward, joint, config, hardware, budget, times, describe)
    if step.warning and is_final:
        log.warning("%s", step.warning)
    return step


@contextlib.contextmanager
def _garbage_left_for_later() -> Generator[None]:
    """Disable the garbage collector while planning.

    A full collection walks the whole heap of a compilation, and graphs are many small objects: collections would take a
    quarter of the planning time. Garbage from planning is collected afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _offload(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    joint: ScheduledJointGraph,
    config: Options,
    hardware: Hardware,
    budget: StepBudget | None,
    times: Times | None,
    describe: bool,
) -> OffloadedStep:
    before, saved = joint.text() if describe else "", joint.saved
    joint = _run(passes_before_planning(config, joint), joint)
    is_original = joint.saved == saved and not config.passes
    analysis = _analyse(joint, config, hardware, times)
    _warn_of_unmatched(joint, config.module_wishes)
    problem = pose_problem(analysis, hardware=hardware, host=config.host_tier(hardware))
    planned, warning = _choose_within(analysis, problem, config, hardware, budget, times)
    joint, plan, costs = planned.analysis.joint, planned.plan, planned.analysis.cost_sources
    log.info(
        "predicted activation peak %s -> %s, %+.1f %% step time, %s offloaded in %d of %d saved storages "
        "(%d of them in the host tier), %d recomputed",
        format_bytes(plan.peak_before_bytes),
        format_bytes(plan.peak_after_bytes),
        100 * plan.slowdown,
        format_bytes(plan.offloaded_bytes),
        len(plan.offloaded),
        len(plan.storages),
        len(plan.on_host),
        len(plan.recomputed),
    )
    idle = explain_idle_plan(
        analysis,
        problem,
        plan,
        max_slowdown=config.max_slowdown,
        min_tensor_bytes=config.min_tensor_bytes,
        budget=budget,
        has_policy=callable(config.policy),
        analyse_all=lambda: with_candidates(analysis, min_tensor_bytes=0, modules=config.module_wishes),
    )
    if idle:
        log.info("nothing is offloaded: %s", idle)
        plan = dataclasses.replace(plan, why_nothing_moves=idle)
    log.info("%s", costs)
    for storage in plan.storages:
        log.debug("%s %s%s: %s", storage.name, storage.dtype, list(storage.shape), storage.decision)
    describer = ScheduleDescriber(analysis, planned.analysis, planned.problem, plan) if describe else None
    if not plan.offloaded and not plan.recomputed and is_original:
        timeline = describer.timeline() if describer else None
        return OffloadedStep(forward, backward, plan, planned.problem, costs, timeline, before, before, warning)
    if plan.offloaded:
        joint = _run(passes_of_plan(planned, config), joint)
    after = joint.text() if describe else ""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("scheduled joint graph with offloads:\n%s", after or joint.text())
    timeline = describer.timeline() if describer else None
    new_forward, new_backward = split(joint)
    return OffloadedStep(new_forward, new_backward, plan, planned.problem, costs, timeline, before, after, warning)


def _run(passes: Sequence[JointPass], joint: ScheduledJointGraph) -> ScheduledJointGraph:
    for run_pass in passes:
        joint = run_pass(joint)
    return joint


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, with the analysis and the problem it was made for."""

    analysis: Analysis
    problem: TransferProblem
    plan: Plan

    @property
    def left_behind_bytes(self) -> int:
        """Bytes that stay in memory between forward and backward."""
        movable_bytes = sum(movable.size_bytes for movable in self.problem.movables)
        return self.problem.fixed_live_bytes[self.problem.marker] + movable_bytes - self.plan.offloaded_bytes


def _analyse(joint: ScheduledJointGraph, config: Options, hardware: Hardware, times: Times | None) -> Analysis:
    return analyse(
        joint,
        min_tensor_bytes=config.min_tensor_bytes,
        hardware=hardware,
        fused=config.inner == "inductor",
        times=times,
        modules=config.module_wishes,
        in_flight=config.forwards_in_flight,
    )


def _warn_of_unmatched(joint: ScheduledJointGraph, modules: Modules) -> None:
    names = modules_of(joint.graph) if modules else []
    for pattern in unmatched_patterns(names, modules):
        log.warning(
            "option modules: no module of this graph matches %r. Expected a name of model.named_modules(), such as: "
            "%s. If another graph has it, all is well.",
            pattern,
            some_of([name for name in names if name]),
        )


def _choose_within(
    analysis: Analysis,
    problem: TransferProblem,
    config: Options,
    hardware: Hardware,
    budget: StepBudget | None,
    times: Times | None,
) -> tuple[PlannedStep, str]:
    """Return the best plan, and a warning if it does not stay within the budget.

    Raises:
        BudgetError: no plan meets a budget that must be met.
    """
    try:
        return _choose(analysis, problem, config, hardware, budget, times), ""
    except BudgetError as error:
        if budget is None or budget.limit is None:
            raise
        raised = budget.raised_to(error.reached_bytes)
        needed = format_bytes(raised.size_bytes)
        warning = (
            f"the step does not fit into memory: it needs {needed} at least, and memory_budget_bytes='auto' found room "
            f"for {format_bytes(budget.size_bytes)} ({budget.limit}). It is compiled for {needed}, and the process may "
            "run out of memory. Lower the batch size or min_tensor_bytes, or raise the limit. A higher max_slowdown "
            "does not help."
        )
        return _choose(analysis, problem, config, hardware, raised, times), warning


def _choose(
    analysis: Analysis,
    problem: TransferProblem,
    config: Options,
    hardware: Hardware,
    budget: StepBudget | None,
    times: Times | None,
) -> PlannedStep:
    """Return the best plan, with or without recomputation. On a tie, the plan without recomputation wins.

    Raises:
        BudgetError: no plan meets the budget.
    """
    if callable(config.policy):
        plan = apply_policy(config.policy, analysis, problem, max_slowdown=config.max_slowdown, budget=budget)
        return PlannedStep(analysis, problem, plan)
    found: list[PlannedStep] = []
    errors: list[BudgetError] = []
    original, wished = analysis, wished_recomputations(analysis, fused=config.inner == "inductor")
    analysis, problem = _recompute(original, problem, wished, config, hardware, times)

    def try_plan(recomputations: Sequence[Recomputation]) -> None:
        rewritten, posed = _recompute(analysis, problem, recomputations, config, hardware, times)
        if recomputations and _cannot_win(rewritten, posed, found, config, budget):
            return
        try:
            found.append(_plan(analysis, rewritten, posed, recomputations, config, budget))
        except BudgetError as error:
            errors.append(error)

    try_plan(())
    if config.recompute and config.policy == "auto" and not keeps_kernels(config, analysis.joint):
        for recomputations in propose_recomputations(
            analysis,
            problem,
            hardware=hardware,
            fused=config.inner == "inductor",
            allowed_s=math.inf if budget is not None else config.max_slowdown * problem.step_s,
            goal_bytes=0 if budget is None else budget.peak_bytes,
            moved=_offloads(analysis, found[0].plan) if found else None,
            exposed_s=found[0].plan.exposed_s if found else 0.0,
        ):
            try_plan(recomputations)
    if not found:
        raise min(errors, key=lambda error: error.floor_bytes)
    best = _best(found, config, budget)
    return dataclasses.replace(best, plan=add_recomputations(best.plan, original, wished)) if wished else best


def _best(found: Sequence[PlannedStep], config: Options, budget: StepBudget | None) -> PlannedStep:
    """The best plan, or on a tie the first one. If none is fast enough, the first: it has the fewest recomputations."""
    if budget is not None:
        return min(found, key=lambda one: (one.plan.exposed_s, one.plan.peak_after_bytes))
    allowed = [one for one in found if one.plan.slowdown <= config.max_slowdown] or found[:1]
    if found[0].analysis.is_link:
        return min(allowed, key=lambda one: (one.left_behind_bytes, one.plan.exposed_s))
    return min(allowed, key=lambda one: (one.plan.peak_after_bytes, one.plan.exposed_s))


def _offloads(analysis: Analysis, plan: Plan) -> Placements:
    """The offloads of a plan without recomputations, by storage."""
    return {
        candidate.storage.idx: storage.decision.placement
        for candidate, storage in zip(analysis.candidates, plan.storages, strict=True)
        if isinstance(storage.decision, Offload)
    }


def _recompute(
    analysis: Analysis,
    problem: TransferProblem,
    recomputations: Sequence[Recomputation],
    config: Options,
    hardware: Hardware,
    times: Times | None,
) -> tuple[Analysis, TransferProblem]:
    """Insert ``recomputations`` into a copy of the graph. Return its analysis and the problem that is left to plan."""
    if not recomputations:
        return analysis, problem
    joint, copy_of = analysis.joint.copy()
    copied = [dataclasses.replace(one, nodes=tuple(copy_of[node] for node in one.nodes)) for one in recomputations]
    joint = insert_recomputations(joint, alias_sets=analysis.alias_sets.of_copy(copy_of), recomputations=copied)
    rewritten = _analyse(joint, config, hardware, times)
    return rewritten, pose_problem(rewritten, hardware=hardware, step_s=problem.step_s, host=problem.host)


def _cannot_win(
    analysis: Analysis,
    problem: TransferProblem,
    found: Sequence[PlannedStep],
    config: Options,
    budget: StepBudget | None,
) -> bool:
    """Whether a plan in ``found`` is already better than any plan for ``problem``, or none would be allowed.

    The check saves the time of planning. A plan exposes at least the time of its recomputations, and its peak is never
    below the floor.
    """
    least_s = problem.recompute_s - ROUNDING * problem.step_s
    if budget is not None:
        return any(one.plan.exposed_s < least_s for one in found)
    if least_s > config.max_slowdown * problem.step_s:
        return True
    if analysis.is_link:
        return False
    least = (floor_bytes(problem), least_s)
    return any(
        (one.plan.peak_after_bytes, one.plan.exposed_s) <= least
        for one in found
        if one.plan.slowdown <= config.max_slowdown
    )


def _plan(
    analysis: Analysis,
    rewritten: Analysis,
    problem: TransferProblem,
    recomputations: Sequence[Recomputation],
    config: Options,
    budget: StepBudget | None,
) -> PlannedStep:
    """Plan the offloads that remain after :func:`_recompute`."""
    plan = plan_offloads(
        rewritten,
        problem,
        move_all=config.policy == "all",
        max_slowdown=config.max_slowdown,
        budget=budget,
    )
    if recomputations:
        plan = add_recomputations(plan, analysis, recomputations)
    return PlannedStep(rewritten, problem, plan)
