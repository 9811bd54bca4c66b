"""The planner: properties of every plan. They are computed here from the graph and the plan alone."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graphs import Program, capture_program, names, random_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from ssdtrain_fx.errors import BudgetError
from ssdtrain_fx.passes.analysis.candidates import Candidate
from ssdtrain_fx.passes.decisions.plan_offloads import KEPT_ELSEWHERE, KEPT_FITS, KEPT_TIME
from ssdtrain_fx.passes.planning.plan import Keep, Offload, Plan
from ssdtrain_fx.testing import TOYS, GraphAnalysis, analyse, capture_step, capture_toy, listing, named

DISKS = (1, 60, 300, 2048, math.inf)
"""Bytes that are written or read while one node runs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reads:
    """Where a storage is read, through views and tuples too. Views that only backward reads do not count."""

    last_in_forward: int
    first_in_backward: int


def reads_of(analysis: GraphAnalysis, candidate: Candidate) -> Reads:
    """An op reads the storage of an argument, unless its only result is a view that backward alone reads."""
    positions = analysis.joint.positions()
    marker = positions[analysis.joint.marker]

    def on_storage(node: fx.Node) -> bool:
        return candidate.storage.idx in analysis.alias_sets.by_node[node]

    def used_in_forward(view: fx.Node) -> bool:
        """Whether an op in forward that is not itself a view of the storage reads this view, or a view of it."""
        return any(positions[user] < marker and (not on_storage(user) or used_in_forward(user)) for user in view.users)

    forward, backward = [positions[candidate.storage.allocator]], [len(positions)]
    for holder in positions:
        if on_storage(holder):
            for user in holder.users:
                if positions[user] > marker:
                    backward.append(positions[user])
                elif not on_storage(user) or used_in_forward(user):
                    forward.append(positions[user])
    return Reads(max(forward), min(backward))


def assert_plan_is_sound(analysis: GraphAnalysis, plan: Plan) -> None:
    """offload <= release <= backward_starts() < reload <= wait; storages that must stay in memory are kept."""
    marker = analysis.joint.positions()[analysis.joint.marker]
    positions = analysis.joint.positions()
    moved_bytes = 0
    for candidate, saved in zip(analysis.candidates, plan.storages, strict=True):
        decision = saved.decision
        assert decision.reason
        if isinstance(decision, Keep):
            continue
        assert not candidate.reason_to_keep
        assert decision.representative == str(candidate.representative)
        assert saved.size_bytes == candidate.storage.hint_bytes
        reads = reads_of(analysis, candidate)
        assert positions[named(analysis.joint.graph, decision.representative)] < decision.offload
        assert decision.offload <= decision.release <= marker < decision.reload <= decision.wait
        assert decision.release > reads.last_in_forward
        assert decision.wait == reads.first_in_backward
        moved_bytes += saved.size_bytes
    assert plan.floor_bytes <= plan.peak_after_bytes <= plan.peak_before_bytes
    assert plan.offloaded_bytes == moved_bytes
    assert sum(move.stall_s for move in moves_of(plan).values()) == pytest.approx(plan.stall_s, abs=1e-5)


@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("policy", ["all", "auto"])
@pytest.mark.parametrize("name", TOYS)
def test_plans_are_sound(name: str, policy: str, disk: float) -> None:
    analysis = analyse(capture_toy(name))
    plan = analysis.plan(policy=policy, disk=disk)
    assert_plan_is_sound(analysis, plan)
    if policy == "all":
        may_move = [candidate for candidate in analysis.candidates if candidate.representative is not None]
        assert len(plan.offloaded) == len(may_move) > 0
    else:
        assert plan.exposed_s == 0


@settings(max_examples=25, deadline=None, derandomize=True)
@given(program=random_programs(), disk=st.sampled_from(DISKS), policy=st.sampled_from(["all", "auto"]))
def test_plans_of_random_graphs_are_sound(program: Program, disk: float, policy: str) -> None:
    analysis = analyse(capture_program(program))
    assert_plan_is_sound(analysis, analysis.plan(policy=policy, disk=disk))


def chain(x: Tensor) -> Tensor:
    """Four saved results of 256 bytes."""
    return x.exp().tanh().exp().tanh().sum()


def chain_analysis() -> GraphAnalysis:
    return analyse(capture_step(chain, torch.randn(8, 8, requires_grad=True)))


def moves_of(plan: Plan) -> dict[str, Offload]:
    return {saved.name: saved.decision for saved in plan.offloaded if isinstance(saved.decision, Offload)}


@pytest.mark.parametrize("seconds", [1, 2, 3])
def test_releases_follow_the_disk(seconds: int) -> None:
    """Every node takes a second and makes 256 bytes. The disk takes ``seconds`` to write these, so it falls behind.

    The plan keeps a quarter of the time in reserve: 1.25 * seconds.
    """
    analysis = chain_analysis()
    moves = moves_of(analysis.plan(disk=256 / seconds))
    marker = analysis.joint.positions()[analysis.joint.marker]
    written_s = 0.0
    for move in moves.values():
        written_s = max(written_s, move.offload) + 1.25 * seconds
        assert move.release == min(marker, math.ceil(written_s))


@pytest.mark.parametrize("seconds", [0.5, 1])
def test_reloads_are_as_late_as_the_disk_allows(seconds: float) -> None:
    analysis = chain_analysis()
    moves = moves_of(analysis.plan(disk=256 / seconds))
    marker = analysis.joint.positions()[analysis.joint.marker]
    begin_s = math.inf
    for move in moves.values():  # the first one in forward is the last one in backward
        begin_s = min(move.wait, begin_s) - 1.25 * seconds
        assert move.reload == max(marker + 1, math.floor(begin_s))


def test_a_faster_disk_never_means_a_higher_peak() -> None:
    analysis = analyse(capture_toy("deep"))
    peaks = [analysis.plan(policy="auto", disk=disk).peak_after_bytes for disk in sorted(DISKS)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[-1] == analysis.plan(disk=math.inf).floor_bytes


def test_auto_keeps_what_the_disk_cannot_take_in_time() -> None:
    plan = chain_analysis().plan(policy="auto", disk=1)
    assert not plan.offloaded
    assert plan.exposed_s == 0
    assert {saved.decision.reason for saved in plan.storages} == {KEPT_TIME}
    assert plan.peak_after == plan.peak_before


def test_auto_keeps_what_does_not_lower_the_peak() -> None:
    """The last result of forward is the first that backward reads, so it is away at no position that matters."""
    analysis = chain_analysis()
    plan = analysis.plan(policy="auto", disk=math.inf)
    assert plan.peak_after_bytes == plan.floor_bytes
    kept = [saved for saved in plan.storages if isinstance(saved.decision, Keep)]
    assert {saved.decision.reason for saved in kept} == {KEPT_ELSEWHERE}
    assert "tanh_1" in [saved.name for saved in kept]
    for saved in plan.offloaded:
        stay = {other.name for other in kept} | {saved.name}
        assert without_moving(analysis, stay).plan(disk=math.inf).peak_after_bytes > plan.peak_after_bytes, saved.name


def test_more_time_means_a_lower_peak_and_is_not_exceeded() -> None:
    analysis = analyse(capture_toy("deep"))
    plans = [analysis.plan(policy="auto", disk=150, max_slowdown=share) for share in (0.0, 0.1, 0.3, 1.0, 10.0)]
    peaks = [plan.peak_after_bytes for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[-1]
    for plan, share in zip(plans, (0.0, 0.1, 0.3, 1.0, 10.0), strict=True):
        assert plan.slowdown <= share + 1e-9


def test_every_storage_says_what_the_plan_waits_for_it() -> None:
    """The engine allows these stalls in advance. It would take any other stall for a slow disk."""
    plan = analyse(capture_toy("deep")).plan(policy="auto", disk=150, max_slowdown=1.0)
    waits = [move.stall_s for move in moves_of(plan).values()]
    assert plan.stall_s > 1
    assert sum(waits) == pytest.approx(plan.stall_s, abs=1e-5)
    assert len(set(waits)) > 1  # not spread evenly


def test_the_plan_says_where_the_peak_stands() -> None:
    """Six activations of 2 KiB are live when forward ends; with offloading, a few in the middle of backward."""
    plan = analyse(capture_toy("deep")).plan(policy="auto", disk=math.inf)
    before = plan.peak_before
    assert before.size_bytes == plan.peak_before_bytes
    assert before.largest[0] == ("tanh", 64 * 8 * 4)
    assert all(size == 64 * 8 * 4 for _, size in before.largest)
    assert plan.peak_after.size_bytes < before.size_bytes


def without_moving(analysis: GraphAnalysis, stay: set[str]) -> GraphAnalysis:
    """The same graph, in which the storages in ``stay`` must stay in memory."""
    candidates = tuple(
        dataclasses.replace(candidate, representative=None, reason_to_keep="the test says so")
        if str(candidate.representative) in stay
        else candidate
        for candidate in analysis.candidates
    )
    return dataclasses.replace(analysis, candidates=candidates)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("name", ["deep", "convolutions", "norms"])
def test_a_budget_is_met(name: str, disk: float, share: float) -> None:
    analysis = analyse(capture_toy(name))
    best = analysis.plan(disk=disk)
    assert best.floor_bytes < best.peak_before_bytes
    budget_bytes = round(best.floor_bytes + share * (best.peak_before_bytes - best.floor_bytes))
    plan = analysis.plan(disk=disk, policy="auto", budget_bytes=budget_bytes)
    assert plan.peak_after_bytes <= budget_bytes
    assert_plan_is_sound(analysis, plan)
    looser = analysis.plan(disk=disk, policy="auto", budget_bytes=budget_bytes + 4096)
    assert looser.exposed_s <= plan.exposed_s


@settings(max_examples=20, deadline=None, derandomize=True)
@given(program=random_programs(), disk=st.sampled_from(DISKS), share=st.floats(0, 1))
def test_budgets_on_random_graphs(program: Program, disk: float, share: float) -> None:
    analysis = analyse(capture_program(program))
    best = analysis.plan(disk=disk)
    budget_bytes = round(best.floor_bytes + share * (best.peak_before_bytes - best.floor_bytes))
    plan = analysis.plan(disk=disk, policy="auto", budget_bytes=budget_bytes)
    assert plan.peak_after_bytes <= budget_bytes
    assert_plan_is_sound(analysis, plan)


def test_a_step_that_fits_is_left_alone() -> None:
    analysis = analyse(capture_toy("deep"))
    peak_bytes = analysis.plan().peak_before_bytes
    plan = analysis.plan(policy="auto", budget_bytes=peak_bytes)
    assert not plan.offloaded
    assert plan.peak_after_bytes == peak_bytes
    assert {saved.decision.reason for saved in plan.storages if not saved.is_input} == {KEPT_FITS}
    assert analysis.plan(policy="auto", budget_bytes=peak_bytes - 1).offloaded


def test_a_budget_out_of_reach_names_the_one_that_can_be_reached() -> None:
    analysis = analyse(capture_toy("deep"))
    best = analysis.plan()
    budget_bytes = best.floor_bytes - 1
    with pytest.raises(BudgetError) as raised:
        analysis.plan(policy="auto", budget_bytes=budget_bytes)
    message = str(raised.value)
    assert f"memory_budget_bytes is {budget_bytes}," in message
    assert f"cannot get below {best.floor_bytes} bytes" in message
    assert f"(without offloading: {best.peak_before_bytes})" in message
    assert "Raise the budget" in message
    assert analysis.plan(policy="auto", budget_bytes=best.floor_bytes).peak_after_bytes == best.floor_bytes


def test_a_budget_when_nothing_may_move() -> None:
    analysis = analyse(capture_toy("deep"), min_tensor_bytes=1 << 20)
    before = analysis.plan().peak_before_bytes
    with pytest.raises(BudgetError, match=f"cannot get below {before} bytes"):
        analysis.plan(policy="auto", budget_bytes=before - 1)


def test_planning_changes_nothing() -> None:
    analysis = analyse(capture_toy("attention"))
    before = listing(analysis.joint.graph)
    assert analysis.plan() == analysis.plan()
    assert listing(analysis.joint.graph) == before


def test_a_plan_describes_every_candidate() -> None:
    analysis = analyse(capture_toy("attention"))
    plan = analysis.plan()
    assert [saved.saved_nodes for saved in plan.storages] == [
        tuple(names(candidate.saved_nodes)) for candidate in analysis.candidates
    ]
    (softmax,) = [saved for saved in plan.storages if saved.name == "_softmax"]
    assert softmax.op == "aten._softmax.default"
    assert softmax.shape == ("4", "2", "16", "16")
    assert (softmax.dtype, softmax.device, softmax.size_bytes) == ("float32", "cpu", 4 * 2 * 16 * 16 * 4)
    assert softmax.source.startswith("toys.py:") and "torch.softmax(q @ k" in softmax.source


def test_symbolic_sizes_are_shown_as_such() -> None:
    plan = analyse(capture_step(chain, torch.randn(8, 9, requires_grad=True), dynamic=True)).plan()
    assert all(size.startswith("s") for saved in plan.offloaded for size in saved.shape)
    assert {saved.size_bytes for saved in plan.offloaded} == {8 * 9 * 4}


@pytest.mark.parametrize("name", TOYS)
def test_plans_survive_json(name: str) -> None:
    plan = analyse(capture_toy(name), min_tensor_bytes=300).plan()
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    assert any(isinstance(saved.decision, Keep) for saved in plan.storages)
    assert plan.offloaded


_PRINT_PLANS = """
from ssdtrain_fx.testing import analyse, capture_toy
for name in ("attention", "convolutions"):
    print(analyse(capture_toy(name)).plan(policy="auto", disk=1e6).to_json())
"""


def test_the_same_step_gets_the_same_plan_in_every_process() -> None:
    """The plans are equal byte for byte, although each process orders sets of strings differently."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PRINT_PLANS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1])])},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert '"reload"' in first
    assert first == second
