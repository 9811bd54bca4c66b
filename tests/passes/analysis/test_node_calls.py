"""Which calls of a graph are measured, and how their times change its costs. Nothing runs: the times are invented."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from steps import four_layers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ssdtrain_fx.passes.analysis.analyse import Analysis, analyse
from ssdtrain_fx.passes.analysis.node_calls import (
    Call,
    CostSources,
    Seconds,
    TensorLayout,
    Unmeasured,
    describe_call,
    measure_nodes,
)
from ssdtrain_fx.passes.analysis.node_costs import estimate_node_seconds
from ssdtrain_fx.passes.analysis.pose_problem import pose_problem
from ssdtrain_fx.passes.decisions.propose_recomputations import propose_recomputations
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.testing import TOYS, capture_step, capture_toy, toy_hardware

aten = torch.ops.aten
HARDWARE = toy_hardware(kernel_s=1e-3)
LIBRARY_OPS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""The ops that Inductor runs as library kernels in these tests: a list that is independent of the code under test."""


class MadeUp:
    """Gives each call a different time. ``failing`` ops cannot be run."""

    def __init__(self, *failing: object) -> None:
        self.failing = failing
        self.asked: list[Call] = []

    def of(self, calls: Sequence[Call]) -> Mapping[str, Seconds]:
        self.asked += calls
        keys = sorted({call.key for call in calls})
        broken = {call.key for call in calls if call.target in self.failing}
        return {key: "it is broken" if key in broken else 7.0 + idx for idx, key in enumerate(keys)}


def priced(joint: ScheduledJointGraph, times: MadeUp, *, fused: bool = True) -> Analysis:
    return analyse(joint, min_tensor_bytes=0, hardware=HARDWARE, fused=fused, times=times)


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("fused", [True, False])
def test_what_is_measured_counts_and_all_else_stays_on_the_roofline(name: str, fused: bool) -> None:
    joint = capture_toy(name).join()
    roofline = estimate_node_seconds(joint, find_alias_sets(joint.graph), HARDWARE, fused=fused)
    analysis = priced(joint, MadeUp(), fused=fused)
    for node, before, after in zip(joint.graph.nodes, roofline, analysis.node_s, strict=True):
        tags = getattr(node.target, "tags", [])
        if node.target in LIBRARY_OPS or (before > 0 and not fused):
            assert after >= 7.0, node
        elif torch.Tag.pointwise in tags or torch.Tag.reduction in tags:
            assert after == before, node
    sources = analysis.cost_sources
    assert sources.measured == sum(seconds >= 7.0 for seconds in analysis.node_s) > 0
    assert sources.measured + sources.roofline == sum(seconds > 0 for seconds in roofline)
    assert sources.roofline == 0 or fused


def test_no_time_is_measured_unless_asked_for() -> None:
    joint = capture_toy("mlp").join()
    analysis = analyse(joint, min_tensor_bytes=0, hardware=HARDWARE, fused=True)
    assert analysis.node_s == estimate_node_seconds(joint, analysis.alias_sets, HARDWARE)
    assert analysis.cost_sources.measured == 0
    assert str(analysis.cost_sources) == f"seconds per node: 0 measured, {analysis.cost_sources.roofline} by roofline"


def test_equal_calls_have_one_key_and_others_have_others() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return ((x @ w @ w @ v.t()) @ v).sum()

    joint = capture_step(function, torch.randn(4, 4), torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)).join()
    forward = [node for node in joint.graph.nodes if node.target is aten.mm.default][:4]
    calls = [describe_call(node) for node in forward]
    keys = [call.key for call in calls if isinstance(call, Call)]
    plain, transposed, again = keys[0], keys[2], keys[3]
    assert keys[1] == plain and again == plain, "the same layouts"
    assert transposed != plain, "other strides"
    assert plain == ("aten.mm.default [float32[4, 4] strides [4, 1] on cpu, float32[4, 4] strides [4, 1] on cpu] {}")


def test_dtypes_scalars_and_devices_are_in_the_key_and_numbers_of_devices_are_not() -> None:
    def key(dtype: torch.dtype, device: str, scalar: float) -> str:
        layout = TensorLayout(dtype, torch.device(device), (2,), (1,))
        return Call(aten.mul.Tensor, (layout, scalar), {"out": None}, torch.device(device)).key

    keys = {
        key(torch.float32, "cpu", 2),
        key(torch.bfloat16, "cpu", 2),
        key(torch.float32, "cuda:0", 2),
        key(torch.float32, "cpu", 2.0),
    }
    assert len(keys) == 4
    assert key(torch.float32, "cuda:1", 2) in keys


def test_symbolic_sizes_are_measured_by_their_hints() -> None:
    static, dynamic = (capture_toy("mlp", dynamic=dynamic).join() for dynamic in (False, True))
    keys = [{call.key for call in _asked(joint)} for joint in (static, dynamic)]
    assert keys[0] == keys[1]


def _asked(joint: ScheduledJointGraph) -> list[Call]:
    times = MadeUp()
    measure_nodes(joint, find_alias_sets(joint.graph), times, fused=True)
    return times.asked


def test_what_cannot_be_run_falls_back_and_is_listed() -> None:
    joint = capture_toy("mlp").join()
    roofline = estimate_node_seconds(joint, find_alias_sets(joint.graph), HARDWARE)
    analysis = priced(joint, MadeUp(aten.addmm.default))
    broken = [at for at, node in enumerate(joint.graph.nodes) if node.target is aten.addmm.default]
    assert broken
    assert all(analysis.node_s[at] == roofline[at] for at in broken)
    assert analysis.cost_sources.unmeasured == (Unmeasured("aten.addmm", "it is broken", len(broken)),)
    assert str(analysis.cost_sources).endswith(f"; not measured: {len(broken)} x aten.addmm (it is broken)")


@pytest.mark.parametrize(("slow", "again"), [(aten.mm.default, aten.mul.Tensor), (aten.mul.Tensor, aten.mm.default)])
def test_what_is_made_again_is_chosen_by_measured_times(slow: object, again: object) -> None:
    """x -> mm -> mul -> mm -> mul -> ...: by roofline, all take a millisecond. Measured, one op takes a second."""

    class Slow(MadeUp):
        def of(self, calls: Sequence[Call]) -> Mapping[str, Seconds]:
            return {call.key: 1.0 if call.target is slow else 1e-6 for call in calls}

    analysis = priced(four_layers().join(), Slow(), fused=False)
    problem = pose_problem(analysis, hardware=HARDWARE)
    proposed, *_ = propose_recomputations(analysis, problem, hardware=HARDWARE, fused=False, allowed_s=1.0)
    allocators = [analysis.alias_sets.storages[one.storage_idx].allocator for one in proposed]
    assert again in [node.target for node in allocators]
    assert slow not in [node.target for node in allocators]


def test_sizes_that_depend_on_data_are_not_measured() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        gm = make_fx(lambda x: x.nonzero() * 2)(torch.empty(4))
    reasons = {str(node.target): describe_call(node) for node in gm.graph.nodes if node.op == "call_function"}
    assert isinstance(reasons.pop("aten.nonzero.default"), Call), "its argument has a size"
    assert reasons["aten.mul.Tensor"] == "a size that depends on data"


@torch.library.custom_op("ssdtrain_tests::shout", mutates_args=())
def shout(x: Tensor) -> Tensor:
    """Has a side effect."""
    raise AssertionError("this op must not run")


@shout.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_ops_of_others_are_never_run() -> None:
    """A collective would wait for ranks that never join, and a custom op may do anything."""
    with FakeTensorMode():
        gm = make_fx(lambda x: shout(x))(torch.empty(4))
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.ssdtrain_tests.shout.default)
    assert describe_call(node) == "an op that may have side effects"


def test_the_line_for_people() -> None:
    unmeasured = (Unmeasured("aten.mm", "RuntimeError: no", 2), Unmeasured("my.op", "an op", 1))
    assert str(CostSources(3, 4, unmeasured)) == (
        "seconds per node: 3 measured, 4 by roofline; not measured: 2 x aten.mm (RuntimeError: no), 1 x my.op (an op)"
    )
