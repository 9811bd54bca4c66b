"""The planner: whatever plan it makes, these hold. They are recomputed here from the graph and the plan alone."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graphs import (
    TOYS,
    Analysis,
    Program,
    analyse,
    capture_program,
    capture_step,
    capture_toy,
    listing,
    named,
    names,
    random_programs,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from ssdtrain_fx.errors import BudgetError
from ssdtrain_fx.passes.candidates import Candidate
from ssdtrain_fx.passes.plan import Keep, Offload, Plan, SavedStorage
from ssdtrain_fx.passes.plan_offloads import KEPT_FITS, KEPT_SOON

WINDOWS = (None, 1, 600, 2048, 10_000)


@dataclasses.dataclass(frozen=True, slots=True)
class Reads:
    """Where a storage is really read, counting through views and tuples, but not the views that only backward reads."""

    last_in_forward: int
    first_in_backward: int


def reads_of(analysis: Analysis, candidate: Candidate) -> Reads:
    """An op reads a storage when an argument lies on it, unless all it makes is a view that backward alone reads."""
    positions = analysis.joint.positions()
    marker = positions[analysis.joint.marker]

    def on_storage(node: fx.Node) -> bool:
        return candidate.storage.idx in analysis.alias_sets.by_node[node]

    def used_in_forward(view: fx.Node) -> bool:
        """Is this view, or a view of it, read in forward by an op that is not a view of the storage?"""
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


def assert_plan_is_sound(analysis: Analysis, plan: Plan) -> None:
    """offload <= release <= backward_starts() < reload <= wait, and never more than the window on the way."""
    marker = analysis.joint.positions()[analysis.joint.marker]
    positions = analysis.joint.positions()
    moves: list[tuple[int, Offload, Reads]] = []
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
        moves.append((saved.size_bytes, decision, reads))
    for position in range(len(positions)):
        leaving = [
            size
            for size, decision, reads in moves
            if decision.offload <= position < decision.release and reads.last_in_forward < position
        ]
        returning = [size for size, decision, _ in moves if decision.reload <= position < decision.wait]
        assert sum(leaving) <= plan.in_flight_bytes or len(leaving) == 1, f"leaving at {position}: {leaving}"
        assert sum(returning) <= plan.in_flight_bytes or len(returning) == 1, f"returning at {position}: {returning}"
    assert plan.peak_after_bytes <= plan.peak_before_bytes
    assert plan.offloaded_bytes == sum(size for size, _, _ in moves)


@pytest.mark.parametrize("window_bytes", WINDOWS)
@pytest.mark.parametrize("policy", ["all", "auto"])
@pytest.mark.parametrize("name", TOYS)
def test_plans_are_sound(name: str, policy: str, window_bytes: int | None) -> None:
    analysis = analyse(capture_toy(name))
    plan = analysis.plan(policy=policy, window_bytes=window_bytes)
    assert_plan_is_sound(analysis, plan)
    if policy == "all":
        may_move = [candidate for candidate in analysis.candidates if candidate.representative is not None]
        assert len(plan.offloaded) == len(may_move) > 0
    if window_bytes is not None:
        assert plan.in_flight_bytes == window_bytes


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    program=random_programs(),
    window_bytes=st.sampled_from([None, 1, 100, 300]),
    policy=st.sampled_from(["all", "auto"]),
)
def test_plans_of_random_graphs_are_sound(program: Program, window_bytes: int | None, policy: str) -> None:
    analysis = analyse(capture_program(program))
    assert_plan_is_sound(analysis, analysis.plan(policy=policy, window_bytes=window_bytes))


def chain(x: Tensor) -> Tensor:
    """Four saved results of 256 bytes."""
    return x.exp().tanh().exp().tanh().sum()


def chain_analysis() -> Analysis:
    return analyse(capture_step(chain, torch.randn(8, 8, requires_grad=True)))


def test_a_release_makes_room_for_the_next_offload() -> None:
    """With a window of one storage, each is let go when the next one is complete; the last when forward ends.

    exp | offload exp | tanh | release exp, offload tanh | ...
    """
    analysis = chain_analysis()
    moves = [saved.decision for saved in analysis.plan(window_bytes=256).offloaded]
    assert len(moves) == 4
    for move, following in itertools.pairwise(moves):
        assert isinstance(move, Offload) and isinstance(following, Offload)
        assert move.release == following.offload
    last = moves[-1]
    assert isinstance(last, Offload)
    assert last.release == analysis.joint.positions()[analysis.joint.marker]


def test_a_reload_is_issued_when_the_one_before_is_read() -> None:
    analysis = chain_analysis()
    moves = [saved.decision for saved in analysis.plan(window_bytes=256).offloaded][::-1]
    first = moves[0]
    assert isinstance(first, Offload)
    assert first.reload == analysis.joint.positions()[analysis.joint.marker] + 1
    for move, following in itertools.pairwise(moves):
        assert isinstance(move, Offload) and isinstance(following, Offload)
        assert following.reload == move.wait


@pytest.mark.parametrize("storages_in_window", [1, 2, 3])
def test_a_wider_window_means_later_releases_and_earlier_reloads(storages_in_window: int) -> None:
    analysis = chain_analysis()
    narrow = analysis.plan(window_bytes=256 * storages_in_window).offloaded
    wide = analysis.plan(window_bytes=256 * (storages_in_window + 1)).offloaded
    for less, more in zip(narrow, wide, strict=True):
        assert isinstance(less.decision, Offload) and isinstance(more.decision, Offload)
        assert more.decision.release >= less.decision.release
        assert more.decision.reload <= less.decision.reload
    assert narrow != wide


def test_the_default_window_is_the_largest_storage() -> None:
    analysis = analyse(capture_toy("attention"))
    sizes = [candidate.storage.hint_bytes for candidate in analysis.candidates if candidate.representative]
    assert analysis.plan().in_flight_bytes == max(sizes)


def test_the_default_window_grows_with_the_number_of_storages() -> None:
    """70 storages of 256 bytes: a 48th of all is more than one of them."""

    def function(x: Tensor) -> Tensor:
        for _ in range(70):
            x = x.tanh()
        return x.sum()

    analysis = analyse(capture_step(function, torch.randn(8, 8, requires_grad=True)))
    assert analysis.plan().in_flight_bytes == 70 * 256 // 48


def test_auto_keeps_what_would_be_asked_for_at_once() -> None:
    """The last results of forward are the first that backward reads: within the window they would never be away."""
    analysis = chain_analysis()
    kept = [saved.name for saved in analysis.plan(policy="auto", window_bytes=256).storages]
    soon = {
        window: [s.name for s in analysis.plan(policy="auto", window_bytes=window).storages if _reason(s) == KEPT_SOON]
        for window in (256, 512, 768, 1024)
    }
    assert kept == ["exp", "tanh", "exp_1", "tanh_1"]
    assert soon == {256: kept[3:], 512: kept[2:], 768: kept[1:], 1024: kept}
    assert len(analysis.plan(policy="all", window_bytes=256).offloaded) == 4


def test_auto_keeps_what_does_not_lower_the_peak() -> None:
    """Two storages away are enough for the peak that three reach; the one that is needed last goes first."""
    analysis = chain_analysis()
    plan = analysis.plan(policy="auto", window_bytes=256)
    assert [saved.name for saved in plan.offloaded] == ["exp", "tanh"]
    assert [saved.name for saved in plan.storages if _reason(saved) == KEPT_FITS] == ["exp_1"]
    one_less = without_moving(analysis, {"tanh"}).plan(policy="auto", window_bytes=256)
    assert one_less.peak_after_bytes > plan.peak_after_bytes
    assert analysis.plan(policy="all", window_bytes=256).peak_after_bytes == plan.peak_after_bytes


def _reason(saved: SavedStorage) -> str:
    return saved.decision.reason


def test_auto_with_a_window_for_everything_keeps_everything() -> None:
    plan = chain_analysis().plan(policy="auto", window_bytes=4 * 256)
    assert not plan.offloaded
    assert plan.peak_after_bytes == plan.peak_before_bytes


def without_moving(analysis: Analysis, stay: set[str]) -> Analysis:
    """The same graph, where some storages must stay."""
    candidates = tuple(
        dataclasses.replace(candidate, representative=None, reason_to_keep="the test says so")
        if str(candidate.representative) in stay
        else candidate
        for candidate in analysis.candidates
    )
    return dataclasses.replace(analysis, candidates=candidates)


def latest_reuse_first(analysis: Analysis) -> list[str]:
    """Names of what may move, longest absence first."""

    def absence(candidate: Candidate) -> int:
        assert candidate.representative is not None
        complete = analysis.joint.positions()[candidate.representative] + 1
        return reads_of(analysis, candidate).first_in_backward - complete

    moving = [candidate for candidate in analysis.candidates if candidate.representative is not None]
    return [
        str(candidate.representative)
        for candidate in sorted(moving, key=lambda item: (-absence(item), item.storage.idx))
    ]


def assert_budget_is_met_with_as_few_as_possible(analysis: Analysis, window_bytes: int, budget_bytes: int) -> None:
    plan = analysis.plan(window_bytes=window_bytes, budget_bytes=budget_bytes)
    assert plan.peak_after_bytes <= budget_bytes
    assert_plan_is_sound(analysis, plan)
    order = latest_reuse_first(analysis)
    moved = {saved.name for saved in plan.offloaded}
    assert moved == set(order[: len(moved)]), "longest absence first"
    for count in range(len(moved)):
        fewer = without_moving(analysis, set(order[count:])).plan(window_bytes=window_bytes)
        assert len(fewer.offloaded) == count
        assert fewer.peak_after_bytes > budget_bytes, f"{count} storages would have been enough"
    for saved in plan.storages:
        if saved.name in order and saved.name not in moved:
            assert saved.decision == Keep(KEPT_FITS)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("name", ["deep", "convolutions", "norms"])
def test_a_budget_is_met_with_as_few_storages_as_possible(name: str, share: float) -> None:
    analysis = analyse(capture_toy(name))
    best = analysis.plan(window_bytes=1)
    assert best.peak_after_bytes < best.peak_before_bytes
    budget_bytes = round(best.peak_after_bytes + share * (best.peak_before_bytes - best.peak_after_bytes))
    assert_budget_is_met_with_as_few_as_possible(analysis, 1, budget_bytes)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(program=random_programs(), window_bytes=st.sampled_from([1, 100, 300]), share=st.floats(0, 1))
def test_budgets_on_random_graphs(program: Program, window_bytes: int, share: float) -> None:
    analysis = analyse(capture_program(program))
    best = analysis.plan(window_bytes=window_bytes)
    budget_bytes = round(best.peak_after_bytes + share * (best.peak_before_bytes - best.peak_after_bytes))
    assert_budget_is_met_with_as_few_as_possible(analysis, window_bytes, budget_bytes)


@pytest.mark.parametrize("policy", ["all", "auto"])
def test_a_step_that_fits_is_left_alone(policy: str) -> None:
    analysis = analyse(capture_toy("deep"))
    peak_bytes = analysis.plan().peak_before_bytes
    plan = analysis.plan(policy=policy, window_bytes=2048, budget_bytes=peak_bytes)
    assert not plan.offloaded
    assert plan.peak_after_bytes == peak_bytes
    assert analysis.plan(policy=policy, window_bytes=2048, budget_bytes=peak_bytes - 1).offloaded


@pytest.mark.parametrize("policy", ["all", "auto"])
def test_a_budget_out_of_reach_names_the_one_that_can_be_reached(policy: str) -> None:
    analysis = analyse(capture_toy("deep"))
    best = analysis.plan(policy=policy, window_bytes=2048)
    budget_bytes = best.peak_after_bytes - 1
    with pytest.raises(BudgetError) as raised:
        analysis.plan(policy=policy, window_bytes=2048, budget_bytes=budget_bytes)
    message = str(raised.value)
    assert f"memory_budget_bytes is {budget_bytes}," in message
    assert f"cannot get below {best.peak_after_bytes} bytes" in message
    assert f"(without offloading: {best.peak_before_bytes})" in message
    assert "Raise the budget" in message
    reached = analysis.plan(policy=policy, window_bytes=2048, budget_bytes=best.peak_after_bytes)
    assert reached.peak_after_bytes == best.peak_after_bytes


def test_a_budget_when_nothing_may_move() -> None:
    analysis = analyse(capture_toy("deep"), min_tensor_bytes=1 << 20)
    before = analysis.plan().peak_before_bytes
    with pytest.raises(BudgetError, match=f"cannot get below {before} bytes"):
        analysis.plan(budget_bytes=before - 1)


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
    assert softmax.source.startswith("graphs.py:") and "torch.softmax(q @ k" in softmax.source


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
from graphs import analyse, capture_toy
for name in ("attention", "convolutions"):
    print(analyse(capture_toy(name)).plan(policy="auto", window_bytes=600).to_json())
"""


def test_the_same_step_gets_the_same_plan_in_every_process() -> None:
    """Byte for byte, though sets and dicts of strings are ordered otherwise."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PRINT_PLANS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent)])},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert '"reload"' in first
    assert first == second
