"""The pipeline, on one screen: from a partitioned training step to one that offloads.

join -> find_alias_sets -> find_candidates -> copy_out_views
     -> estimate_node_seconds, find_live_intervals -> pose_problem -> plan_offloads
     -> insert_offloads -> verify_offloads -> split
"""

from __future__ import annotations

import dataclasses
import logging

from torch import fx

from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.alias_sets import find_alias_sets
from ssdtrain_fx.passes.candidates import find_candidates
from ssdtrain_fx.passes.copy_out_views import copy_out_views
from ssdtrain_fx.passes.fuse_intervals import fuse_intervals
from ssdtrain_fx.passes.insert_offloads import insert_offloads
from ssdtrain_fx.passes.joint_graph import join, split
from ssdtrain_fx.passes.liveness import find_live_intervals
from ssdtrain_fx.passes.node_costs import estimate_node_seconds, find_fused_kernels
from ssdtrain_fx.passes.plan import Plan
from ssdtrain_fx.passes.plan_offloads import plan_offloads, pose_problem
from ssdtrain_fx.passes.transfer_problem import TransferProblem
from ssdtrain_fx.passes.verify_offloads import verify_offloads
from ssdtrain_fx.units import format_bytes

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadedStep:
    """What the pipeline makes of one training step."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    plan: Plan
    problem: TransferProblem
    """What the plan is an answer to."""
    joint_before: str
    joint_after: str


def offload_saved_tensors(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    num_forward_outputs: int,
    config: OffloadConfig,
    hardware: Hardware,
) -> OffloadedStep:
    """Rewrite a partitioned training step so that saved tensors leave memory between forward and backward.

    Args:
        forward, backward: as a partitioner of ``functorch.compile`` returns them; neither is changed.
        num_forward_outputs: how many results of ``forward`` are not saved for backward.
        hardware: what the plan is made for.

    Raises:
        BudgetError: ``memory_budget_bytes`` is out of reach.
        InternalError: the rewritten graph breaks an invariant.
    """
    joint = join(forward, backward, num_forward_outputs=num_forward_outputs)
    before = joint.text()
    alias_sets = find_alias_sets(joint.graph)
    candidates = find_candidates(joint, alias_sets, min_tensor_bytes=config.min_tensor_bytes)
    joint, unchanged = copy_out_views(joint, alias_sets, candidates), joint
    copied_out = joint is not unchanged
    if copied_out:
        alias_sets = find_alias_sets(joint.graph)
        candidates = find_candidates(joint, alias_sets, min_tensor_bytes=config.min_tensor_bytes)
    fused = config.inner == "inductor"
    node_s = estimate_node_seconds(joint, alias_sets, hardware, fused=fused)
    intervals = find_live_intervals(joint.graph, alias_sets)
    if fused:
        intervals = fuse_intervals(intervals, find_fused_kernels(joint, alias_sets), alias_sets)
    problem = pose_problem(joint, candidates, intervals, node_s=node_s, hardware=hardware)
    plan = plan_offloads(
        joint,
        alias_sets,
        candidates,
        problem,
        intervals,
        move_all=config.policy == "all",
        max_slowdown=config.max_slowdown,
        memory_budget_bytes=config.memory_budget_bytes,
    )
    log.info(
        "predicted activation peak %s -> %s, %+.1f %% of the step time, %s out and back in %d of %d saved storages",
        format_bytes(plan.peak_before_bytes),
        format_bytes(plan.peak_after_bytes),
        100 * plan.slowdown,
        format_bytes(plan.offloaded_bytes),
        len(plan.offloaded),
        len(plan.storages),
    )
    for storage in plan.storages:
        log.debug("%s %s%s: %s", storage.name, storage.dtype, list(storage.shape), storage.decision)
    if plan.offloaded:
        insert_offloads(joint, alias_sets, plan, candidates, engine=config.engine_config().to_argument())
        verify_offloads(joint)
    elif not copied_out:
        return OffloadedStep(forward, backward, plan, problem, before, before)
    after = joint.text()
    log.debug("scheduled joint graph with offloads:\n%s", after)
    new_forward, new_backward = split(joint)
    return OffloadedStep(new_forward, new_backward, plan, problem, before, after)
