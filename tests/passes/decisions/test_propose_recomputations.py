"""Plans that keep, offload and recompute."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from graphs import Program, capture_program, random_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import four_layers, machine
from test_liveness import without
from torch import Tensor

from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.errors import BudgetError
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes import pipeline
from ssdtrain_fx.passes.analysis.analyse import analyse
from ssdtrain_fx.passes.analysis.pose_problem import pose_problem
from ssdtrain_fx.passes.decisions.propose_recomputations import propose_recomputations
from ssdtrain_fx.passes.graph.joint_graph import join
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, find, site_of
from ssdtrain_fx.passes.pipeline import OffloadedStep, offload_saved_tensors
from ssdtrain_fx.passes.planning.plan import Keep, Offload, Plan, Recompute
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.testing import (
    TOYS,
    CapturedStep,
    assert_same_bits,
    capture_step,
    capture_toy,
    save_all,
    toy_hardware,
)


def rewrite(
    step: CapturedStep, *, disk: float = 1.0, hardware: Hardware | None = None, **options: Any
) -> OffloadedStep:
    config = OffloadConfig(inner="aot_eager", min_tensor_bytes=0, **{"max_slowdown": 1.0, **options})
    return offload_saved_tensors(
        step.forward,
        step.backward,
        num_forward_outputs=step.num_forward_outputs,
        config=config,
        hardware=hardware or machine(disk),
        budget=config.find_budget(),  # all of it for the plan
    )


def decisions(plan: Plan) -> dict[str, type]:
    return {storage.name: type(storage.decision) for storage in plan.storages if not storage.is_input}


def assert_sound(step: CapturedStep, rewritten: OffloadedStep) -> None:
    """Check that the bits are the same and the peak is the predicted one, counted on the storages of real tensors."""
    before = step.join()
    joint = join(rewritten.forward, rewritten.backward, num_forward_outputs=step.num_forward_outputs)
    for offload in find(joint.graph, OFFLOAD):
        # With this engine, no tensor stays in memory to save time, however slow the disk of the tests is.
        offload.update_arg(2, dataclasses.replace(site_of(offload), engine=EngineConfig().to_argument()).to_argument())
    counter = step.measure(joint)
    assert max(without(counter.live_bytes, counter.token_bytes)) == rewritten.plan.peak_after_bytes
    assert_same_bits(step.run(joint), step.run(before))
    assert max(step.measure(before).live_bytes) == rewritten.plan.peak_before_bytes


def test_a_disk_that_is_too_slow_leaves_recomputation() -> None:
    """At one byte per second nothing can be offloaded. Storages that can be recomputed are, and the rest stays."""
    rewritten = rewrite(four_layers())
    found = decisions(rewritten.plan)
    pairs = [(found[f"mm{suffix}"], found[f"mul{suffix}"]) for suffix in ("", "_1", "_2")]
    assert all(set(pair) == {Keep, Recompute} for pair in pairs), "each can be recomputed from the other; one is kept"
    made = rewritten.plan.recomputed[0].decision
    assert isinstance(made, Recompute) and len(made.nodes) == 1
    assert 0 < rewritten.plan.recompute_s == pytest.approx(rewritten.plan.exposed_s)
    assert_sound(four_layers(), rewritten)


def test_what_is_made_again_can_read_what_was_moved() -> None:
    rewritten = rewrite(four_layers(), disk=1e15)
    assert Offload in decisions(rewritten.plan).values()
    assert_sound(four_layers(), rewritten)


def test_recomputation_takes_part_in_the_limit() -> None:
    """An additional kernel takes more than a thousandth of this step."""
    assert Recompute not in decisions(rewrite(four_layers(), max_slowdown=1e-3).plan).values()


def test_what_lifts_the_floor_is_also_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    step = four_layers()
    analysis = analyse(step.join(), min_tensor_bytes=0, hardware=machine(1.0), fused=False)
    problem = pose_problem(analysis, hardware=machine(1.0))

    def proposals() -> list[set[int]]:
        found = propose_recomputations(analysis, problem, hardware=machine(1.0), fused=False, allowed_s=0.0)
        return [{one.storage_idx for one in those} for those in found]

    assert len(proposals()) == 1
    all_of_them = proposals()[0]
    lifting = min(all_of_them)
    monkeypatch.setattr(
        "ssdtrain_fx.passes.decisions.propose_recomputations.find_floor_raisers", lambda problem, sources: {lifting}
    )
    assert all_of_them in proposals()
    assert any(those and lifting not in those for those in proposals())


MIB, LOSS_BYTES = 1 << 20, 4


def twelve_layers() -> CapturedStep:
    """relu(x @ w), twelve times. Each layer saves 1 MiB, and takes 2.8 % of the step."""

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = torch.relu(x @ weight)
        return x.sum()

    weights = (torch.randn(256, 256, requires_grad=True) for _ in range(12))
    return capture_step(function, torch.randn(1024, 256, requires_grad=True), *weights, partition=save_all)


@pytest.mark.parametrize(("limit", "peak_mib"), [(0.0, 13.25), (0.05, 12.25), (0.1, 10.25), (0.15, 8.25)])
def test_as_much_is_made_again_as_the_time_allows(limit: float, peak_mib: float) -> None:
    """On a disk that moves nothing. All six layers that can be recomputed would take 17 % of the step."""
    plan = rewrite(twelve_layers(), max_slowdown=limit, hardware=toy_hardware(1.0)).plan
    assert plan.peak_before_bytes <= 13.3 * MIB
    assert plan.peak_after_bytes <= peak_mib * MIB + LOSS_BYTES
    assert plan.slowdown <= limit


def test_offloading_and_recomputation_share_the_work() -> None:
    """The disk moves a part in time. What it leaves is recomputed, so both together reach a lower peak."""
    disk_only = rewrite(twelve_layers(), max_slowdown=0.06, hardware=toy_hardware(2e9), recompute=False).plan
    both = rewrite(twelve_layers(), max_slowdown=0.06, hardware=toy_hardware(2e9)).plan
    no_disk = rewrite(twelve_layers(), max_slowdown=0.06, hardware=toy_hardware(1.0)).plan
    assert both.recomputed and both.offloaded
    assert both.peak_after_bytes < min(disk_only.peak_after_bytes, no_disk.peak_after_bytes)
    assert both.slowdown <= 0.06


def test_a_budget_takes_no_more_recomputation_than_it_needs() -> None:
    """With a budget of 11 MiB, two or three layers run again, not all six."""
    plan = rewrite(twelve_layers(), memory_budget_bytes=11 * MIB, hardware=toy_hardware(1.0)).plan
    assert plan.peak_after_bytes <= 11 * MIB
    assert 2 <= len(plan.recomputed) <= 3
    assert not plan.offloaded


def test_recomputation_can_be_switched_off() -> None:
    assert Recompute not in decisions(rewrite(four_layers(), recompute=False).plan).values()
    assert Recompute not in decisions(rewrite(four_layers(), policy="all").plan).values()


def test_a_budget_that_moving_cannot_meet() -> None:
    """Offloading alone would meet it too, with hours of disk time."""
    step = four_layers()
    peak = rewrite(step).plan.peak_after_bytes
    plan = rewrite(step, memory_budget_bytes=peak).plan
    assert plan.peak_after_bytes <= peak
    assert plan.recomputed and plan.exposed_s < 1


def test_a_budget_out_of_reach_of_both_names_the_lower_floor() -> None:
    step = four_layers()
    floor = min(rewrite(step, recompute=choice, disk=1e15).plan.floor_bytes for choice in (False, True))
    with pytest.raises(BudgetError, match=f"cannot get below {floor} bytes") as error:
        rewrite(step, memory_budget_bytes=1)
    assert error.value.floor_bytes == floor


@pytest.mark.parametrize("disk", [1.0, 1e6, 1e15])
@pytest.mark.parametrize("name", TOYS)
def test_plans_of_toys_are_sound(name: str, disk: float) -> None:
    step = capture_toy(name)
    mixed = rewrite(step, disk=disk)
    assert_sound(step, mixed)
    assert mixed.plan.slowdown <= 1.0
    assert mixed.plan.peak_after_bytes <= rewrite(step, disk=disk, recompute=False).plan.peak_after_bytes


@settings(max_examples=40, deadline=None, derandomize=True)
@given(program=random_programs(), disk=st.sampled_from([1.0, 1e8, 1e15]), limit=st.sampled_from([0.01, 0.3, 5.0]))
def test_plans_of_random_graphs_are_sound(program: Program, disk: float, limit: float) -> None:
    step = capture_program(program)
    rewritten = rewrite(step, disk=disk, max_slowdown=limit)
    assert_sound(step, rewritten)
    assert rewritten.plan.slowdown <= limit


def test_a_mixed_plan_survives_json() -> None:
    plan = rewrite(four_layers()).plan
    assert Plan.from_json(plan.to_json()) == plan


def test_a_mixed_plan_lists_every_storage_once() -> None:
    """Recomputed storages are no longer saved, but the plan lists them at their old place."""
    step = capture_toy("norms")
    mixed, plain = rewrite(step).plan, rewrite(step, recompute=False).plan
    assert mixed.recomputed
    names = [storage.name for storage in mixed.storages]
    assert len(set(names)) == len(names)
    assert {storage.name for storage in plain.storages} <= set(names)
    assert dataclasses.replace(mixed.peak_before, source="") == dataclasses.replace(plain.peak_before, source="")


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("options", [{"max_slowdown": 0.1}, {"max_slowdown": 5.0}, {"memory_budget_bytes": 1 << 13}])
@pytest.mark.parametrize("disk", [1.0, 1e4, 1e9])
def test_what_is_not_planned_for_could_not_have_won(
    name: str, options: dict[str, Any], disk: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is the same whether all proposals are planned or only those that may win."""

    def plan() -> str:
        try:
            return rewrite(capture_toy(name, partition=save_all), disk=disk, **options).plan.to_json()
        except BudgetError as error:
            return str(error)

    found = plan()

    def never(*arguments: object) -> bool:
        return False

    monkeypatch.setattr(pipeline, "_cannot_win", never)
    assert found == plan()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    """After a plan, and after an error."""
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        rewrite(capture_toy("mlp"))
        assert gc.isenabled() == enabled
        with pytest.raises(BudgetError):
            rewrite(capture_toy("mlp"), memory_budget_bytes=1)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
