"""The timeline, compared with the plan and with the rewritten graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Program, capture_program, random_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import four_layers, machine
from test_liveness import predict, token_bytes, without
from torch import Tensor, nn

from ssdtrain_fx import OffloadConfig, _torch_private, explain
from ssdtrain_fx.passes.analysis.describe_schedule import Timeline
from ssdtrain_fx.passes.graph.joint_graph import join
from ssdtrain_fx.passes.pipeline import OffloadedStep, offload_saved_tensors
from ssdtrain_fx.passes.planning.plan import Offload
from ssdtrain_fx.report import GraphReport
from ssdtrain_fx.testing import TOYS, CapturedStep, capture_toy, toy_hardware
from ssdtrain_fx.testing.toys import MLP


def described(step: CapturedStep, *, disk: float, policy: str = "auto") -> tuple[OffloadedStep, Timeline]:
    rewritten = offload_saved_tensors(
        step.forward,
        step.backward,
        num_forward_outputs=step.num_forward_outputs,
        config=OffloadConfig(inner="aot_eager", min_tensor_bytes=0, max_slowdown=1.0, policy=policy),
        hardware=machine(disk),
        budget=None,
        describe=True,
    )
    assert rewritten.timeline is not None
    return rewritten, rewritten.timeline


class Views(nn.Module):
    """Backward reads two views of one storage. They are rebuilt after the wait."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, -1)
        y = left * right
        for _ in range(4):
            y = torch.tanh(self.second(y))
        return (y * left).sum()


def graph_report(model: nn.Module, width: int, **changes: Any) -> GraphReport:
    settings = {
        "inner": "aot_eager",
        "min_tensor_bytes": 64,
        "policy": "all",
        "hardware": toy_hardware(1e12),
        **changes,
    }
    (graph,) = explain(model, torch.randn(64, width), config=OffloadConfig(**settings)).graphs
    return graph


@pytest.fixture(params=["aot_eager", "inductor"])
def graph(request: pytest.FixtureRequest) -> GraphReport:
    return graph_report(Views(), 16, inner=request.param)


def test_the_peaks_are_those_of_the_plan(graph: GraphReport) -> None:
    before, after = graph.timeline.before, graph.timeline.after
    assert max(before.live_bytes) == graph.plan.peak_before_bytes
    assert max(after.live_bytes) == graph.plan.peak_after_bytes
    assert graph.plan.peak_after_bytes < graph.plan.peak_before_bytes
    assert before.nodes[graph.plan.peak_before.position].name == graph.plan.peak_before.node


def assert_memory_is_that_of_the_graph(step: CapturedStep, *, disk: float, policy: str = "auto") -> None:
    """At every node of both graphs, the timeline, made from the plan, agrees with liveness of the compiled graph.

    The tests of liveness compare it with the memory of real tensors.
    """
    rewritten, timeline = described(step, disk=disk, policy=policy)
    after = join(rewritten.forward, rewritten.backward, num_forward_outputs=step.num_forward_outputs)
    for graph, schedule in ((step.join().graph, timeline.before), (after.graph, timeline.after)):
        expected = without(predict(graph).live_bytes, token_bytes(graph))
        computed = [idx for idx, node in enumerate(graph.nodes) if node.op not in ("placeholder", "get_attr")]
        names = [node.name for node in graph.nodes]
        told = [
            (node.name, size)
            for node, size in zip(schedule.nodes, schedule.live_bytes, strict=True)
            if node.op not in ("placeholder", "get_attr")
        ]
        assert told == [(names[idx], expected[idx]) for idx in computed]
    assert max(timeline.before.live_bytes) == rewritten.plan.peak_before_bytes
    assert max(timeline.after.live_bytes) == rewritten.plan.peak_after_bytes


@pytest.mark.parametrize("disk", [1.0, 1e15])
@pytest.mark.parametrize("name", TOYS)
def test_memory_is_that_of_the_rewritten_graph(name: str, disk: float) -> None:
    assert_memory_is_that_of_the_graph(capture_toy(name), disk=disk)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(program=random_programs(), disk=st.sampled_from([1.0, 1e8, 1e15]), policy=st.sampled_from(["auto", "all"]))
def test_memory_is_that_of_random_graphs(program: Program, disk: float, policy: str) -> None:
    assert_memory_is_that_of_the_graph(capture_program(program), disk=disk, policy=policy)


def test_what_is_made_again_is_told_with_its_nodes_and_its_time() -> None:
    """On a disk this slow nothing moves. The storage is live in forward, and again where it is recomputed."""
    rewritten, timeline = described(four_layers(), disk=1e-9)
    made = rewritten.plan.recomputed
    after, activities = timeline.after, timeline.activities
    names_before = {node.name for node in timeline.before.nodes}
    assert made
    for saved in made:
        (position,) = (position for position, node in enumerate(after.nodes) if node.storage == saved.name)
        node = after.nodes[position]
        assert (node.op, position > after.marker) == (saved.op, True)
        assert node.name not in names_before
        first, again = (span for span in after.live if span.storage == saved.name)
        assert first.end <= after.marker < again.start == position
        (activity,) = (one for one in activities if one.storage == saved.name)
        assert (activity.kind, activity.begin_s) == ("recompute", node.start_s)
    assert sum(one.end_s - one.begin_s for one in activities) == pytest.approx(rewritten.plan.recompute_s)
    assert after.step_s == pytest.approx(rewritten.plan.step_s + rewritten.plan.exposed_s)


def test_the_four_nodes_stand_where_the_plan_has_them(graph: GraphReport) -> None:
    before = [node.name for node in graph.timeline.before.nodes]
    after = graph.timeline.after
    position_of = {node.name: position for position, node in enumerate(after.nodes)}
    for saved in graph.plan.offloaded:
        decision = saved.decision
        assert isinstance(decision, Offload)
        steps = [position for position, node in enumerate(after.nodes) if node.storage == saved.name]
        ops = [after.nodes[position].op for position in steps]
        assert ops == [f"ssdtrain.{op}.default" for op in ("offload", "release", "reload", "wait")]
        for position, planned in zip(
            steps, (decision.offload, decision.release, decision.reload, decision.wait), strict=True
        ):
            behind = next(position_of[name] for name in before[planned:] if name in position_of)
            assert position < behind
            assert all(node.name not in before for node in after.nodes[position:behind]), "right before that node"
        spans = [(span.start, span.end) for span in after.live if span.storage == saved.name]
        (made, gone), (back, _) = spans
        assert (gone, back) == (steps[1] + 1, steps[2])
        assert made < steps[0]


def test_time_goes_forward_and_ends_with_the_step(graph: GraphReport) -> None:
    plan = graph.plan
    for schedule, step_s in (
        (graph.timeline.before, plan.step_s),
        (graph.timeline.after, plan.step_s + plan.exposed_s),
    ):
        starts = [node.start_s for node in schedule.nodes]
        assert starts == sorted(starts)
        assert starts[-1] <= schedule.step_s * (1 + 1e-9)
        assert schedule.step_s == pytest.approx(step_s)


def test_every_transfer_is_told(graph: GraphReport) -> None:
    moved = sorted(saved.name for saved in graph.plan.offloaded)
    activities = graph.timeline.activities
    assert sorted(one.storage for one in activities if one.kind == "write") == moved
    assert sorted(one.storage for one in activities if one.kind in ("read", "staging")) == moved
    stalled_s = sum(one.end_s - one.begin_s for one in activities if one.kind in ("stall", "copy"))
    assert stalled_s == pytest.approx(graph.plan.exposed_s)


def assert_modules_are_named(graph: GraphReport) -> None:
    assert {"first", "second"} <= {node.module for node in graph.timeline.before.nodes}


def test_nodes_name_their_modules(graph: GraphReport) -> None:
    assert_modules_are_named(graph)


def test_nodes_name_their_modules_on_older_versions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_private, "_can_isolate_recompiles", lambda: False)
    assert_modules_are_named(graph_report(MLP(), 16))


def test_a_plan_that_keeps_everything_has_one_schedule() -> None:
    graph = graph_report(MLP(), 16, min_tensor_bytes=1 << 30)
    assert graph.timeline.after == graph.timeline.before
    assert graph.timeline.activities == ()
