"""Live intervals and memory profiles: predictions equal the memory of a real run, to the byte."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

import pytest
import torch
import torch._dynamo
from graphs import Program, capture_program, random_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ssdtrain_fx.passes.analysis.liveness import find_live_intervals
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, RELEASE, RELOAD
from ssdtrain_fx.passes.planning.live_intervals import LiveInterval, MemoryProfile, memory_profile
from ssdtrain_fx.passes.planning.plan import Offload, Plan
from ssdtrain_fx.testing import (
    TOYS,
    CapturedStep,
    GraphAnalysis,
    Partition,
    analyse,
    capture_step,
    capture_toy,
    measure_memory,
    min_cut,
    named,
    save_all,
)

aten = torch.ops.aten


def predict(graph: fx.Graph) -> MemoryProfile:
    intervals = find_live_intervals(graph, find_alias_sets(graph))
    return memory_profile(intervals.values(), len(graph.nodes))


def token_bytes(graph: fx.Graph) -> tuple[int, ...]:
    """The predicted bytes of tokens and tickets only."""
    alias_sets = find_alias_sets(graph)
    intervals = find_live_intervals(graph, alias_sets)
    tokens = [storage for storage in alias_sets.storages if storage.allocator.target in (OFFLOAD, RELEASE, RELOAD)]
    return memory_profile([intervals[storage.idx] for storage in tokens], len(graph.nodes)).live_bytes


def without(total: Iterable[int], part: Iterable[int]) -> list[int]:
    return [one - other for one, other in zip(total, part, strict=True)]


def predict_plan(analysis: GraphAnalysis, plan: Plan) -> MemoryProfile:
    """The memory profile that a plan predicts, at the positions of the graph before it is rewritten."""
    intervals = find_live_intervals(analysis.joint.graph, analysis.alias_sets)
    parts: list[LiveInterval] = []
    for candidate, saved in zip(analysis.candidates, plan.storages, strict=True):
        if isinstance(saved.decision, Offload):
            interval = intervals.pop(candidate.storage.idx)
            parts += interval.without(saved.decision.release, saved.decision.reload)
    return memory_profile([*intervals.values(), *parts], len(analysis.joint.graph.nodes))


def assert_prediction_is_measured(step: CapturedStep) -> None:
    joint = step.join()
    assert predict(joint.graph).live_bytes == step.measure(joint).live_bytes


def assert_plan_is_measured(step: CapturedStep, *, policy: str, disk: float) -> Plan:
    """Rewrite and run the step, and compare at every node of the original graph. Tokens are not counted."""
    analysis = analyse(step)
    plan = analysis.plan(policy=policy, disk=disk)
    promised = predict_plan(analysis, plan)
    positions = analysis.joint.positions()
    joint = analysis.rewrite(plan)
    counter = step.measure(joint)
    measured = without(counter.live_bytes, counter.token_bytes)
    at = dict(zip(joint.graph.nodes, measured, strict=True))
    survivors = [node for node in positions if node in at]
    assert {str(node): at[node] for node in survivors} == {
        str(node): promised.live_bytes[positions[node]] for node in survivors
    }
    assert max(measured) == promised.peak_bytes == plan.peak_after_bytes
    return plan


def test_the_example_of_the_module() -> None:
    """0 a = mm(x, w);  1 b = relu(a);  2 c = add(a, b);  3 return (b, c)      8 MiB each"""
    mib = 1 << 20
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        x, y = torch.empty(1024, 2048), torch.empty(2048, 2048)
        x_node, w_node = graph.placeholder("x"), graph.placeholder("w")
        a = graph.call_function(torch.ops.aten.mm.default, (x_node, w_node))
        b = graph.call_function(torch.ops.aten.relu.default, (a,))
        c = graph.call_function(torch.ops.aten.add.Tensor, (a, b))
        graph.output((b, c))
        for node, value in ((x_node, x), (w_node, y), (a, x @ y), (b, x.relu()), (c, x + x)):
            node.meta["val"] = value
    alias_sets = find_alias_sets(graph)
    intervals = find_live_intervals(graph, alias_sets)
    shifted = {str(alias_sets.storages[idx].allocator): (i.start - 2, i.end - 2) for idx, i in intervals.items()}
    assert shifted == {"mm_default": (0, 3), "relu_default": (1, 4), "add_tensor": (2, 4)}, "inputs are not counted"
    profile = memory_profile(intervals.values(), len(graph.nodes))
    assert profile.live_bytes == (0, 0, 8 * mib, 16 * mib, 24 * mib, 16 * mib)
    assert (profile.peak_bytes, profile.peak_position) == (24 * mib, 4)


def test_intervals_are_half_open() -> None:
    """[0, 2) and [2, 3) do not overlap."""
    first, second = LiveInterval(0, 0, 2, 10), LiveInterval(1, 2, 3, 7)
    assert memory_profile([first, second], 4).live_bytes == (10, 10, 7, 0)


def test_an_interval_is_split_where_its_storage_is_away() -> None:
    before, after = LiveInterval(3, 1, 9, 10).without(4, 7)
    assert before == LiveInterval(3, 1, 4, 10)
    assert after == LiveInterval(3, 7, 9, 10)
    assert memory_profile([before, after], 10).live_bytes == (0, 10, 10, 10, 0, 0, 0, 10, 10, 0)


def test_an_empty_graph_has_no_peak() -> None:
    profile = memory_profile([], 0)
    assert (profile.live_bytes, profile.peak_bytes, profile.peak_position) == ((), 0, 0)


def test_a_result_that_nobody_reads_lives_for_one_position() -> None:
    """0 x;  1 exp (never read);  2 sin;  3 return sin"""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target in (torch.ops.aten.exp.default, torch.ops.aten.sin.default):
        last = graph.call_function(target, (x,))
    graph.output((last,))
    with FakeTensorMode():
        for node in graph.nodes:
            node.meta["val"] = torch.empty(4, 6)
    assert predict(graph).live_bytes == (0, 96, 96, 96)
    assert measure_memory(fx.GraphModule({}, graph), [torch.randn(4, 6)]).live_bytes == (0, 96, 96, 96)


def test_a_tuple_holds_all_its_parts_until_the_last_one_is_taken() -> None:
    """norm -> (out, mean, rstd): the op allocates out, not its getitem, and out is freed after its last reader."""
    step = capture_step(lambda x: torch.nn.functional.layer_norm(x, (6,)).sum(), torch.randn(4, 6, requires_grad=True))
    joint = step.join()
    alias_sets = find_alias_sets(joint.graph)
    intervals = find_live_intervals(joint.graph, alias_sets)
    positions = joint.positions()
    out = alias_sets.of(named(joint.graph, "getitem"))
    assert out is not None
    assert intervals[out.idx].start == positions[named(joint.graph, "native_layer_norm")]
    assert intervals[out.idx].end == positions[named(joint.graph, "sum_1")] + 1


def test_the_result_of_a_collective_counts_once() -> None:
    """wait_tensor returns its argument, but its fake tensor has another storage."""
    importlib.import_module("torch.distributed._functional_collectives")  # fake kernels of the ops
    graph = fx.Graph()
    node = graph.placeholder("x")
    with FakeTensorMode():
        value = node.meta["val"] = torch.empty(1024)
        for target in (aten.sin.default, torch.ops._c10d_functional.wait_tensor.default, aten.cos.default):
            node = graph.call_function(target, (node,))
            value = node.meta["val"] = target(value)
    graph.output((node,))
    measured = measure_memory(fx.GraphModule({}, graph), [torch.randn(1024)])
    assert max(measured.live_bytes) == 2 * 4096
    assert predict(graph).live_bytes == measured.live_bytes


def test_sizes_that_depend_on_data_are_left_out() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        step = capture_step(lambda x: x[x > 0].exp().sum(), torch.randn(4, 6, requires_grad=True))
    joint = step.join()
    alias_sets = find_alias_sets(joint.graph)
    intervals = find_live_intervals(joint.graph, alias_sets)
    exp, mask = alias_sets.of(named(joint.graph, "exp")), alias_sets.of(named(joint.graph, "gt"))
    assert exp is not None and mask is not None
    assert exp.idx not in intervals
    assert intervals[mask.idx].size_bytes == 24


@pytest.mark.parametrize("partition", [save_all, min_cut])
@pytest.mark.parametrize("name", TOYS)
def test_prediction_is_measurement(name: str, partition: Partition) -> None:
    assert_prediction_is_measured(capture_toy(name, partition=partition))


@pytest.mark.parametrize("name", ["attention", "deep"])
def test_prediction_is_measurement_with_symbolic_sizes(name: str) -> None:
    assert_prediction_is_measured(capture_toy(name, dynamic=True))


@pytest.mark.parametrize("disk", [1e9, 2048, 600, 1])
@pytest.mark.parametrize("policy", ["all", "auto"])
@pytest.mark.parametrize("name", TOYS)
def test_what_a_plan_promises_is_measured(name: str, policy: str, disk: float) -> None:
    assert_plan_is_measured(capture_toy(name), policy=policy, disk=disk)


def test_a_deep_step_really_holds_less() -> None:
    """Six activations of 2 KiB, and a disk that writes one while a node runs: forward never holds more than three."""
    plan = assert_plan_is_measured(capture_toy("deep"), policy="auto", disk=2048)
    assert plan.peak_before_bytes > 6 * 2048
    assert plan.peak_after_bytes < 5 * 2048


def test_symbolic_sizes_are_measured_as_promised() -> None:
    plan = assert_plan_is_measured(capture_toy("deep", dynamic=True), policy="all", disk=2048)
    assert plan.offloaded


@settings(max_examples=25, deadline=None, derandomize=True)
@given(program=random_programs(), disk=st.sampled_from([1e9, 1000, 300, 100, 1]))
def test_random_graphs(program: Program, disk: float) -> None:
    step = capture_program(program)
    assert_prediction_is_measured(step)
    assert_plan_is_measured(step, policy="all", disk=disk)


def test_views_of_merged_nodes_are_counted_once() -> None:
    """a = sin(x); b = sin(x); mm(b.t(), a): min_cut merges a and b, so b.t() becomes a view of a."""
    step = capture_step(
        lambda x: x.sin().square().sum() + (x.sin().t() @ x.sin()).sum(),
        torch.randn(4, 6, requires_grad=True),
        partition=min_cut,
    )
    assert_prediction_is_measured(step)


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "deep",
    ],
)
def test_the_rewritten_graph_predicts_itself(name: str) -> None:
    """The prediction for the rewritten graph, at its positions: a reloaded storage counts from its reload on."""
    step = capture_toy(name)
    analysis = analyse(step)
    joint = analysis.rewrite(analysis.plan(disk=600))
    counter = step.measure(joint)
    predicted = without(predict(joint.graph).live_bytes, token_bytes(joint.graph))
    assert predicted == without(counter.live_bytes, counter.token_bytes)
    assert max(counter.token_bytes) > 0
