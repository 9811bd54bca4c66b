"""The peak of a step of several graphs: by hand, against a ledger of what is in memory, and against one whole graph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig, Report
from ssdtrain_fx.passes.planning.chain_memory import ChainMemory, Half, Stretch, in_a_row, peak_of_chain
from ssdtrain_fx.passes.planning.plan import Keep, Plan
from ssdtrain_fx.testing import toy_hardware


def test_the_example_of_the_module() -> None:
    graph = ChainMemory(forward_bytes=10, held_bytes=6, backward_bytes=9)
    assert peak_of_chain([graph, graph], in_a_row(2)) == 16
    assert in_a_row(2) == [Half(0, "forward"), Half(1, "forward"), Half(1, "backward"), Half(0, "backward")]


def test_gradients_stay_and_are_made_once_for_all_micro_batches() -> None:
    graph = ChainMemory(forward_bytes=1, backward_bytes=10, gradient_bytes=4)
    assert peak_of_chain([graph, graph], in_a_row(2)) == 14
    assert peak_of_chain([graph, graph], in_a_row(2), keep_gradients=False) == 10
    assert peak_of_chain([graph], 3 * in_a_row(1)) == 14


def test_a_stage_of_a_pipeline_holds_results() -> None:
    graph = ChainMemory(forward_bytes=5, held_bytes=2, backward_bytes=5, result_bytes=3)
    order = [Half(0, "forward"), Half(0, "forward"), Half(0, "backward"), Half(0, "backward")]
    assert peak_of_chain([graph], order) == 2 + 5
    assert peak_of_chain([graph], order, keep_results=True) == (2 + 3) + 3 + 5


def test_what_a_stage_has_sent_may_stay() -> None:
    graph = ChainMemory(forward_bytes=5, held_bytes=2, backward_bytes=5)
    order = [Half(0, "forward"), Half(0, "backward", 7), Half(0, "forward"), Half(0, "backward", 7)]
    assert peak_of_chain([graph], order) == 7 + 5


def test_an_input_that_another_graph_holds_counts_in_no_half() -> None:
    """Input 3 is in memory until the middle of backward, input 5 until the middle of forward."""
    stretches = (
        Stretch("forward", 20, ((3, 8), (5, 4))),
        Stretch("forward", 17, ((3, 8),)),
        Stretch("backward", 16, ((3, 8),)),
        Stretch("backward", 12, ()),
    )
    graph = ChainMemory(forward_bytes=20, held_bytes=10, backward_bytes=16, stretches=stretches)
    assert graph.held_inputs == {3: 8}
    without = graph.without_inputs([3, 7])
    assert (without.forward_bytes, without.held_bytes, without.backward_bytes) == (12, 2, 12)
    assert without.held_inputs == {}
    without = graph.without_inputs([5])
    assert (without.forward_bytes, without.held_bytes, without.backward_bytes) == (17, 10, 16)
    assert graph.without_inputs([7]) is graph


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[ChainMemory], list[Half]]:
    """Graphs, and an order in which each backward comes after a forward of the same graph."""
    number = st.integers(0, 8)
    kept = st.integers(0, 3)
    count = draw(st.integers(1, 3))
    graphs = [ChainMemory(*(draw(number) for _ in range(5))) for _ in range(count)]
    order: list[Half] = []
    open_runs: list[int] = []
    for graph in draw(st.lists(st.integers(0, count - 1), max_size=6)):
        while open_runs and draw(st.booleans()):
            order.append(Half(open_runs.pop(draw(st.integers(0, len(open_runs) - 1))), "backward", draw(kept)))
        order.append(Half(graph, "forward", draw(kept)))
        open_runs.append(graph)
    order += [Half(graph, "backward") for graph in draw(st.permutations(open_runs))]
    return graphs, order


@given(chains(), st.booleans(), st.booleans())
def test_the_peak_is_the_highest_sum_of_what_is_in_memory(
    chain: tuple[list[ChainMemory], list[Half]], keep_gradients: bool, keep_results: bool
) -> None:
    graphs, order = chain
    in_memory: list[tuple[str, int, int]] = []
    highest = 0
    for idx, phase, kept_bytes in order:
        graph = graphs[idx]
        if phase == "backward":
            in_memory.remove(("held", idx, graph.held_bytes))
        others = sum(size_bytes for _, _, size_bytes in in_memory)
        highest = max(highest, others + (graph.forward_bytes if phase == "forward" else graph.backward_bytes))
        in_memory.append(("kept", idx, kept_bytes))
        if phase == "forward":
            in_memory.append(("held", idx, graph.held_bytes))
            if keep_results:
                in_memory.append(("result", idx, graph.result_bytes))
            continue
        if keep_results:
            in_memory.remove(("result", idx, graph.result_bytes))
        if keep_gradients and ("gradient", idx, graph.gradient_bytes) not in in_memory:
            in_memory.append(("gradient", idx, graph.gradient_bytes))
    assert peak_of_chain(graphs, order, keep_gradients=keep_gradients, keep_results=keep_results) == highest


class Cut(nn.Module):
    """Layers of different widths with a graph break between them, and a loss in the last graph.

    The backward of a layer reads its tanh. With ``adds``, that is not what the next layer reads.
    """

    def __init__(self, widths: Sequence[int], is_cut: bool, adds: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))
        self.is_cut = is_cut
        self.adds = adds

    def layer(self, number: int, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[number](x))
        return x + 1 if self.adds else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(0, x)
        if self.is_cut:
            torch._dynamo.graph_break()
        x = self.layer(1, x)
        if self.is_cut:
            torch._dynamo.graph_break()
        x = self.layer(2, x)
        return x.square().sum()


def explain_cut(widths: Sequence[int], is_cut: bool, adds: bool = True, **options: Any) -> Report:
    torch._dynamo.reset()
    hardware = toy_hardware(disk_bytes_per_s=1e9, kernel_s=1e-3)
    config: Any = {"inner": "aot_eager", "min_tensor_bytes": 0, "hardware": hardware, **options}
    model = Cut(widths, is_cut, adds)
    return ssdtrain_fx.explain(model, torch.zeros(64, widths[0]), config=OffloadConfig(**config))


WIDTHS = [[64, 64, 64, 64], [16, 256, 32, 64], [64, 32, 256, 16], [256, 16, 16, 256]]


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("widths", WIDTHS)
def test_cut_into_graphs_a_step_has_the_peak_of_the_whole_graph(widths: list[int], adds: bool) -> None:
    """The oracle is the live intervals of the whole graph, in which no value crosses from one graph to another."""
    whole, cut = explain_cut(widths, False, adds), explain_cut(widths, True, adds)
    assert (len(whole.graphs), len(cut.graphs)) == (1, 3)
    assert cut.step_peak_bytes[0] == pytest.approx(whole.step_peak_bytes[0], abs=4)  # the loss


class ReadTwice(nn.Module):
    """``x`` is a result of the first graph, whose backward does not read it. The backwards of the other two do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.readers = nn.ModuleList(nn.Linear(256, 16) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.first(inputs)
        torch._dynamo.graph_break()
        y = torch.tanh(self.readers[0](x))
        torch._dynamo.graph_break()
        return (y + torch.tanh(self.readers[1](x))).square().sum()


def test_an_input_that_two_graphs_hold_counts_in_the_first_one() -> None:
    torch._dynamo.reset()
    config = OffloadConfig(inner="aot_eager", min_tensor_bytes=0, hardware=toy_hardware())
    report = ssdtrain_fx.explain(ReadTwice(), torch.zeros(64, 64), config=config)
    x_bytes, tanh_bytes = 64 * 256 * 4, 64 * 16 * 4
    assert [graph.plan.chain_before.held_bytes for graph in report.graphs] == [0, x_bytes + tanh_bytes, tanh_bytes]


@pytest.mark.parametrize("adds", [True, False])
def test_a_plan_that_moves_nothing_leaves_the_peak_of_the_step(adds: bool) -> None:
    slow = toy_hardware(disk_bytes_per_s=1, kernel_s=1e-3)
    report = explain_cut([64] * 4, True, adds, hardware=slow, recompute=False)
    assert not any(graph.plan.offloaded for graph in report.graphs)
    assert report.step_peak_bytes[1] == report.step_peak_bytes[0]


def test_what_is_measured_is_compared_with_the_plan_of_the_whole_step(tmp_path: Path) -> None:
    hardware = toy_hardware(disk_bytes_per_s=1e9, kernel_s=1e-3)
    config = OffloadConfig(inner="aot_eager", policy="all", min_tensor_bytes=0, hardware=hardware, ssd_dir=tmp_path)
    model = Cut([64] * 4, True)
    torch._dynamo.reset()
    ssdtrain_fx.reset_peak_memory_stats()
    torch.compile(model, backend=ssdtrain_fx.backend(config))(torch.zeros(64, 64)).backward()
    report = ssdtrain_fx.explain(model, torch.zeros(64, 64), config=config)
    assert report.measured is not None
    assert report.measured.planned_bytes == report.step_peak_bytes[1] > ssdtrain_fx.memory_stats().planned_peak_bytes


def test_a_report_on_several_graphs_begins_with_the_step() -> None:
    report = explain_cut([64] * 4, True, policy="all")
    before, after = report.step_peak_bytes
    assert max(graph.plan.chain_after.backward_bytes for graph in report.graphs) <= after < before
    assert str(report).startswith("a step runs 3 graphs; predicted activation peak of the step ")
    assert explain_cut([64] * 4, False).step_summary() == ""
    again = Report.from_json(report.to_json())
    assert again.step_peak_bytes == report.step_peak_bytes
    plan = report.graphs[1].plan
    assert Plan.from_json(plan.to_json()) == plan


def test_what_moves_is_not_held() -> None:
    plan = explain_cut([64] * 4, True, policy="all").graphs[1].plan
    assert plan.chain_before.held_bytes - plan.chain_after.held_bytes == plan.offloaded_bytes > 0
    assert plan.chain_after.gradient_bytes == 64 * 64 * 4 + 64 * 4


def test_what_each_half_needs_by_hand() -> None:
    """tanh(x @ w + b) + 1, with values of 64 x 64: backward reads the tanh and the input, which other graphs make."""
    value, gradients = 64 * 64 * 4, 64 * 64 * 4 + 64 * 4
    first, second, _ = (graph.plan.chain_before for graph in explain_cut([64] * 4, True).graphs)
    # Forward: the tanh and the sum. Backward: the tanh, the gradient that comes in, and that of the product.
    stretches = (Stretch("forward", 2 * value, ()), Stretch("backward", 3 * value, ()))
    assert first == ChainMemory(2 * value, value, 3 * value, value, gradients, stretches)
    # The input comes in addition. It counts from the beginning, and backward reads it.
    assert second == ChainMemory(3 * value, 2 * value, 4 * value, value, gradients, second.stretches)
    assert second.held_inputs == {2: value}
    # Without it, the most is at the end: the gradients of the product, the weight, the input and the bias.
    without = second.without_inputs([2])
    assert (without.forward_bytes, without.held_bytes) == (2 * value, value)
    assert without.backward_bytes == 3 * value + 64 * 4


def test_what_is_read_ahead_counts_in_the_backward_before() -> None:
    slow = toy_hardware(disk_bytes_per_s=1e3, kernel_s=1e-3)
    plan = explain_cut([64] * 4, True, policy="all", hardware=slow).graphs[1].plan
    assert plan.chain_after.backward_bytes == plan.chain_before.backward_bytes + 64 * 64 * 4


def explain_stage(inner: str, **options: Any) -> Plan:
    """Two layers of a transformer as a stage of a pipeline, whose input is data."""
    layers = (nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2))
    hardware = toy_hardware(disk_bytes_per_s=1e6, kernel_s=1e-3)
    config: Any = {"inner": inner, "min_tensor_bytes": 0, "hardware": hardware, "forwards_in_flight": 4, **options}
    return ssdtrain_fx.explain(nn.Sequential(*layers), torch.zeros(4, 16, 32), config=OffloadConfig(**config)).plan


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_stage_holds_what_its_plan_keeps(inner: str) -> None:
    """The last kernel of a fused forward stands at its end; what only it reads is not held."""
    plan = explain_stage(inner)
    kept = [one.size_bytes for one in plan.storages if isinstance(one.decision, Keep) and not one.is_input]
    assert plan.chain_after.held_bytes == sum(kept) > 0
    assert plan.chain_after.result_bytes == 4 * 16 * 32 * 4


def test_before_the_plan_nothing_is_recomputed() -> None:
    plan = explain_stage("inductor", max_slowdown=1.0)
    assert plan.recomputed
    assert plan.chain_before == explain_stage("inductor", recompute=False).chain_before
