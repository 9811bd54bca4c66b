"""Saved graphs: a graph that is read back prints the same and has the same analysis."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Program, capture_program, random_programs
from hypothesis import given, settings
from torch import Tensor, fx

from ssdtrain_fx._torch_private import FakeTensorMode
from ssdtrain_fx.compiler.save_graphs import save_joint_graphs, trace_joint_graphs
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.passes.analysis.analyse import Analysis
from ssdtrain_fx.passes.analysis.analyse import analyse as analyse_all
from ssdtrain_fx.passes.analysis.candidates import Candidate
from ssdtrain_fx.passes.analysis.pose_problem import pose_problem
from ssdtrain_fx.passes.decisions.plan_offloads import plan_offloads
from ssdtrain_fx.passes.graph.graph_json import from_json, to_json
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, backward_starts
from ssdtrain_fx.passes.planning.plan import Plan
from ssdtrain_fx.passes.rewrites.copy_out_views import copy_out_views
from ssdtrain_fx.passes.rewrites.verify_offloads import verify_offloads
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.testing import TOYS, analyse, capture_step, capture_toy, min_cut, toy_hardware


def facts(analysis: Analysis) -> dict[str, Any]:
    """Everything that the planner uses of a graph, as names and numbers."""

    def describe(candidate: Candidate) -> tuple[Any, ...]:
        saved = [node.name for node in candidate.saved_nodes]
        return candidate.storage.idx, saved, str(candidate.representative), candidate.reason_to_keep

    storages = analysis.alias_sets.storages
    return {
        "storages": [(one.idx, one.allocator.name, str(one.holders), one.size_bytes) for one in storages],
        "candidates": [describe(candidate) for candidate in analysis.candidates],
        "intervals": dict(analysis.intervals),
        "node_s": analysis.node_s,
    }


def without_result_numbers(plan: Plan) -> Plan:
    """Results have no numbers without descriptors, which JSON omits."""
    before, after = (dataclasses.replace(one, held_results=()) for one in (plan.chain_before, plan.chain_after))
    return dataclasses.replace(plan, chain_before=before, chain_after=after)


def assert_same(joint: ScheduledJointGraph, other: ScheduledJointGraph) -> None:
    """Text, aliases, candidates, intervals, costs and plan are equal, also after the rewriting passes."""
    assert other.text() == joint.text()
    analyses = [
        analyse_all(one, min_tensor_bytes=0, hardware=toy_hardware(1e9, kernel_s=1e-6), fused=True)
        for one in (joint, other)
    ]
    assert facts(analyses[1]) == facts(analyses[0])
    problems = [pose_problem(one, hardware=toy_hardware(1e9, kernel_s=1e-6)) for one in analyses]
    assert problems[1] == problems[0]
    plans = [plan_offloads(one, problem, max_slowdown=0.5) for one, problem in zip(analyses, problems, strict=True)]
    assert without_result_numbers(plans[1]).to_json() == without_result_numbers(plans[0]).to_json()
    rewritten = [copy_out_views(one.joint, min_tensor_bytes=0, min_saved_bytes=1) for one in analyses]
    for one in rewritten:
        analysis = analyse(one)
        analysis.rewrite(analysis.plan())
        verify_offloads(one)
    assert rewritten[1].text() == rewritten[0].text()


@pytest.mark.parametrize("name", TOYS)
def test_a_toy_comes_back(name: str) -> None:
    joint = capture_toy(name).join()
    text = to_json(joint)
    back = from_json(text)
    assert to_json(back) == text
    assert_same(joint, back)


@pytest.mark.parametrize("name", TOYS)
def test_a_graph_with_offloads_comes_back(name: str) -> None:
    analysis = analyse(capture_toy(name))
    joint = analysis.rewrite(analysis.plan())
    back = from_json(to_json(joint))
    verify_offloads(back)
    assert back.text() == joint.text()


@settings(max_examples=15, deadline=None)
@given(program=random_programs())
def test_a_random_program_comes_back(program: Program) -> None:
    joint = capture_program(program, partition=min_cut).join()
    assert_same(joint, from_json(to_json(joint)))


@pytest.mark.parametrize(
    ("model", "dropout"),
    [
        ("encoder", 0.1),
        *(
            pytest.param(model, dropout, marks=pytest.mark.slow)
            for model in zoo.MODELS
            for dropout in (0.0, 0.1)
            if (model, dropout) != ("encoder", 0.1)
        ),
    ],
)
def test_a_model_of_the_zoo_comes_back(model: str, dropout: float) -> None:
    """Graphs with Inductor's decompositions and from its partitioner."""
    module, make_batch = zoo.build(model, layers=2, hidden=64, batch=2, sequence=32, vocab=64, dropout=dropout)
    (joint,) = trace_joint_graphs(module, *make_batch(torch.Generator().manual_seed(0)))
    text = to_json(joint)
    back = from_json(text)
    assert to_json(back) == text
    assert_same(joint, back)


def test_a_second_process_is_not_needed_to_see_that_no_number_is_written() -> None:
    """The graph has a constant. The values of a model's constants may be private."""
    secret = 1234567.0

    def function(x: Tensor) -> Tensor:
        return (x * torch.tensor([secret, secret])).sin().sum()

    joint = capture_step(function, torch.randn(2, requires_grad=True)).join()
    text = to_json(joint)
    assert "1234567" not in text
    assert from_json(text).text() == joint.text()


def test_tensors_that_share_a_storage_share_it_again() -> None:
    """Both halves of a product are saved."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        left, right = (x @ w).split(4, dim=1)
        return (left.sin() * right.cos()).sum()

    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    back = analyse(from_json(to_json(capture_step(function, x, w).join())))
    (shared,) = (candidate for candidate in back.candidates if len(candidate.saved_nodes) == 2)
    assert {back.alias_sets.of(node) for node in shared.saved_nodes} == {shared.storage}
    assert shared.storage.size_bytes == 8 * 8 * 4


def test_a_graph_of_another_device_needs_no_such_device() -> None:
    text = to_json(capture_toy("mlp").join()).replace('"cpu"', '"cuda:0"')
    back = from_json(text)
    (placeholder, *_) = back.graph.find_nodes(op="placeholder")
    assert placeholder.meta["val"].device == torch.device("cuda:0")
    assert to_json(back) == text
    analysis = analyse(back)
    assert analysis.plan().offloaded
    verify_offloads(analysis.rewrite(analysis.plan()))


# -- arguments ---------------------------------------------------------------------------------------------------------


def graph_of(build: Callable[[fx.Graph, fx.Node], Any], **sizes: Any) -> ScheduledJointGraph:
    """A graph with the input ``x``, the nodes that ``build`` adds and returns, and an empty backward."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(2, 3)
    result = build(graph, x)
    graph.call_function(backward_starts)
    graph.output(((result,), ()))
    return ScheduledJointGraph(gm=fx.GraphModule({}, graph), saved=(), backward_inputs=())


@pytest.mark.parametrize(
    "argument",
    [
        None,
        True,
        -3,
        1e-300,
        math.inf,
        -math.inf,
        1 + 2j,
        "mean",
        torch.bfloat16,
        torch.device("cuda", 1),
        torch.strided,
        torch.channels_last,
        slice(None, 3, None),
        (1, (2.0, "x"), ()),
        [1, [None], {"a": (1,)}],
    ],
    ids=repr,
)
def test_an_argument_comes_back_with_its_type(argument: Any) -> None:
    joint = graph_of(lambda graph, x: graph.call_function(operator.getitem, (x, argument), {}))
    (node,) = from_json(to_json(joint)).graph.find_nodes(op="call_function", target=operator.getitem)
    assert node.args[1] == argument
    assert repr(node.args[1]) == repr(joint.graph.find_nodes(op="call_function", target=operator.getitem)[0].args[1])


def test_nan_comes_back() -> None:
    joint = graph_of(lambda graph, x: graph.call_function(operator.mul, (x, math.nan)))
    text = to_json(joint)
    assert "NaN" not in text  # NaN is not valid JSON
    (node,) = from_json(text).graph.find_nodes(op="call_function", target=operator.mul)
    assert math.isnan(node.args[1])


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_symbolic_sizes_are_refused_with_the_node() -> None:
    joint = capture_toy("mlp", dynamic=True).join()
    with pytest.raises(ConfigError, match=r"node 'primals_\d+' has the symbolic \w+ s\d+; trace .* dynamic=False"):
        to_json(joint)


def test_a_function_that_is_no_op_is_refused_with_the_node() -> None:
    joint = graph_of(lambda graph, x: graph.call_function(math.sqrt, (x,)))
    with pytest.raises(ConfigError, match=r"node 'sqrt' calls .*neither a torch op nor a function of Python's"):
        to_json(joint)
    joint = graph_of(lambda graph, x: graph.call_function(operator.getitem, (x, range(3))))
    with pytest.raises(ConfigError, match="node 'getitem' has an argument of type range"):
        to_json(joint)


def test_a_sparse_value_is_refused_with_the_node() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        node = graph.call_function(torch.ops.aten.relu.default, (x,))
        node.meta["val"] = torch.eye(2).to_sparse()
        return node

    with pytest.raises(ConfigError, match="node 'relu_default' is a tensor subclass Tensor"):
        to_json(graph_of(build))


def changed(change: Callable[[dict[str, Any]], None]) -> str:
    content = json.loads(to_json(capture_toy("mlp").join()))
    change(content)
    return json.dumps(content)


def call(content: dict[str, Any], target: str) -> None:
    next(node for node in content["nodes"] if node["op"] == "call_function")["target"] = target


def keyword(content: dict[str, Any], name: str) -> None:
    next(node for node in content["nodes"] if node["op"] == "call_function")["kwargs"] = {name: 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(version=2), "version 2, expected 1. Save it again"),
        (lambda content: content.update(kind="something"), "expected an object with kind"),
        (lambda content: content.pop("saved"), "damaged: KeyError: 'saved'"),
        (lambda content: content["saved"].append("nobody"), "damaged: KeyError: 'nobody'"),
        (lambda content: content["nodes"].append(content["nodes"][0]), "the node name 'primals_.* is used twice"),
        (lambda content: content["nodes"][0].update(op="call_method"), "has the unsupported op 'call_method'"),
        (lambda content: call(content, "mylib::fused.default"), "calls mylib::fused.default.*Import the library"),
        (lambda content: call(content, "aten::mm.nonsense"), "calls aten::mm.nonsense, which this process does not"),
        (lambda content: call(content, "os.system"), "os.system"),
        (lambda content: call(content, "operator.__import__"), "operator.__import__"),
        (lambda content: call(content, "operator.attrgetter"), "operator.attrgetter"),
        (lambda content: call(content, "operator.call"), "operator.call"),
        (lambda content: content["nodes"][0].update(target="x=print('run')"), "is not an identifier"),
        (lambda content: content["nodes"][0].update(op="get_attr", target="x.y z"), "is not an identifier"),
        (lambda content: keyword(content, "x=print('run'), y"), "is not an identifier"),
        (lambda content: content["nodes"][0]["value"]["tensor"].update(dtype="nn"), "torch has no dtype 'nn'"),
        (lambda content: content["storage_bytes"].clear(), "damaged: IndexError"),
        (
            lambda content: content["nodes"].remove(
                next(node for node in content["nodes"] if node["target"] == "backward_starts")
            ),
            "it has no backward_starts node",
        ),
    ],
)
def test_a_file_that_is_no_saved_graph_is_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_json(changed(change))


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON.*truncated"), ("[]", "not a saved graph")])
def test_a_text_that_is_no_object_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_json(text)


# -- models ------------------------------------------------------------------------------------------------------------


def test_every_graph_of_a_broken_one_gets_a_file(tmp_path: Path) -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        y = (x @ weight).sin()
        torch._dynamo.graph_break()
        return (y @ weight).cos().sum()

    paths = save_joint_graphs(tmp_path / "graph.json", function, torch.randn(4, 4))
    assert paths == [tmp_path / "graph-0.json", tmp_path / "graph-1.json"]
    assert [len(from_json(path.read_text()).gradients) > 0 for path in paths] == [True, True]
