"""join and split: one graph that computes what the two graphs did, and two graphs that AOTAutograd can call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import names
from torch import Tensor, fx, nn

from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, backward_starts, split
from ssdtrain_fx.testing import (
    TOYS,
    CapturedStep,
    Partition,
    analyse,
    assert_same_bits,
    calls,
    capture_step,
    capture_toy,
    listing,
    min_cut,
    named,
    run,
    save_all,
)

aten = torch.ops.aten


def results(graph: fx.Graph) -> Sequence[Any]:
    return graph.output_node().args[0]  # pyright: ignore[reportReturnType]


def placeholders(graph: fx.Graph) -> list[str]:
    return names(graph.find_nodes(op="placeholder"))


def assert_step_is_the_same(step: CapturedStep, joint: ScheduledJointGraph) -> None:
    """Run the original halves, the joint graph and its split halves on the same arguments."""
    originals = run(step.forward, step.forward_args)
    outputs, saved = originals[: step.num_forward_outputs], originals[step.num_forward_outputs :]
    by_name = dict(zip(placeholders(step.backward.graph), step.backward_args, strict=True))
    saved_names = names(results(step.forward.graph)[step.num_forward_outputs :])
    gradients = run(
        step.backward, [dict(zip(saved_names, saved, strict=True)).get(name, by_name[name]) for name in by_name]
    )

    assert_same_bits(step.run(joint), (tuple(outputs), tuple(gradients)), strides=True)

    forward, backward = split(joint)
    new = run(forward, step.forward_args)
    new_saved = dict(
        zip(names(results(forward.graph)[step.num_forward_outputs :]), new[step.num_forward_outputs :], strict=True)
    )
    assert_same_bits(new[: step.num_forward_outputs], outputs, strides=True)
    arguments = [new_saved[name] if name in new_saved else by_name[name] for name in placeholders(backward.graph)]
    assert_same_bits(run(backward, arguments), gradients, strides=True)


def assert_calling_convention(step: CapturedStep, joint: ScheduledJointGraph) -> None:
    """forward  (as before)                -> (outputs as before, saved tensors, saved symbols)
    backward (saved symbols, saved tensors, tangents as before) -> (gradients as before)
    """
    forward, backward = split(joint)
    assert placeholders(forward.graph) == placeholders(step.forward.graph)
    count = step.num_forward_outputs
    assert names(results(forward.graph)[:count]) == names(results(step.forward.graph)[:count])
    assert len(results(backward.graph)) == len(results(step.backward.graph))

    saved = results(forward.graph)[count:]
    is_tensor = [isinstance(node.meta["val"], Tensor) for node in saved]
    num_tensors = sum(is_tensor)
    assert is_tensor == [True] * num_tensors + [False] * (len(saved) - num_tensors), "tensors first, symbols last"
    own = names(joint.backward_inputs)
    assert placeholders(backward.graph) == [*names(saved[num_tensors:]), *names(saved[:num_tensors]), *own]
    assert own == [name for name in placeholders(step.backward.graph) if name not in names(joint.saved)]
    for graph in (forward.graph, backward.graph):
        assert len(graph.output_node().meta["desc"]) == len(results(graph))


def two_layers(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return ((x @ w1).tanh() @ w2).sum()


def capture_two_layers() -> CapturedStep:
    return capture_step(
        two_layers, torch.randn(4, 6), torch.randn(6, 8, requires_grad=True), torch.randn(8, 2, requires_grad=True)
    )


def test_text_of_a_tiny_joint_graph() -> None:
    """Forward computes tanh, and backward reads that node directly, without a placeholder."""
    assert_expected_inline(
        listing(capture_two_layers().join().graph),
        """\
primals_1: f32[4, 6]
primals_2: f32[6, 8]
primals_3: f32[8, 2]
tangents_1: f32[]
mm: f32[4, 8] = mm(primals_1, primals_2)
tanh: f32[4, 8] = tanh(mm)
detach: f32[4, 8] = detach(tanh)
mm_1: f32[4, 2] = mm(tanh, primals_3)
sum_1: f32[] = sum(mm_1)
backward_starts()
expand: f32[4, 2] = expand(tangents_1, [4, 2])
t: f32[8, 4] = t(tanh)
mm_2: f32[8, 2] = mm(t, expand)
t_1: f32[2, 8] = t(primals_3)
mm_3: f32[4, 8] = mm(expand, t_1)
detach_1: f32[4, 8] = detach(detach)
tanh_backward: f32[4, 8] = tanh_backward(mm_3, detach_1)
t_2: f32[6, 4] = t(primals_1)
mm_4: f32[6, 8] = mm(t_2, tanh_backward)
return ((sum_1), (None, mm_4, mm_2))""",
    )


@pytest.mark.parametrize("partition", [save_all, min_cut])
@pytest.mark.parametrize("name", TOYS)
def test_joining_and_splitting_changes_no_bit(name: str, partition: Partition) -> None:
    step = capture_toy(name, partition=partition)
    assert_step_is_the_same(step, step.join())


@pytest.mark.parametrize("partition", [save_all, min_cut])
@pytest.mark.parametrize("name", TOYS)
def test_the_calling_convention_is_kept(name: str, partition: Partition) -> None:
    step = capture_toy(name, partition=partition)
    assert_calling_convention(step, step.join())


def test_unless_rewritten_the_saved_values_keep_their_order() -> None:
    step = capture_toy("attention")
    forward, backward = split(step.join())
    assert names(results(forward.graph)) == names(results(step.forward.graph))
    assert placeholders(backward.graph) == placeholders(step.backward.graph)


@pytest.mark.parametrize("name", ["attention", "mlp"])
def test_after_a_rewrite_both_still_hold(name: str) -> None:
    step = capture_toy(name)
    analysis = analyse(step)
    plan = analysis.plan()
    joint = analysis.rewrite(plan)
    assert_calling_convention(step, joint)
    assert_step_is_the_same(step, joint)
    forward, _ = split(joint)
    saved = results(forward.graph)[step.num_forward_outputs :]
    num_new = len(plan.offloaded)
    assert num_new > 0
    assert [node.meta["val"].dtype for node in saved[:num_new]] == [torch.int64] * num_new, "tokens come first"
    old = [name for name in names(joint.saved) if name in names(saved)]
    assert names(saved[num_new:]) == old, "what stays is in the partitioner's order"


def test_symbols_are_saved_last_and_come_back_first() -> None:
    step = capture_toy("attention", dynamic=True)
    joint = step.join()
    symbols = [node for node in joint.saved if isinstance(node.meta["val"], torch.SymInt)]
    assert symbols and symbols == list(joint.saved[-len(symbols) :])
    assert_calling_convention(step, joint)
    assert_step_is_the_same(step, joint)


def test_a_saved_symbol_that_no_node_reads_stays_saved() -> None:
    """It binds the size of another saved tensor, and AOTAutograd expects it among the arguments of backward."""
    step = capture_step(two_layers, *capture_two_layers_inputs(), dynamic=True)
    joint = step.join()
    symbols = [node for node in joint.saved if isinstance(node.meta["val"], torch.SymInt)]
    for symbol in symbols:
        for user in [user for user in symbol.users if joint.positions()[user] > joint.positions()[joint.marker]]:
            user.replace_input_with(symbol, 4)  # type: ignore[arg-type]
    _, backward = split(joint)
    assert symbols
    assert placeholders(backward.graph)[: len(symbols)] == names(symbols)
    assert all(not named(backward.graph, symbol.name).users for symbol in symbols)


def capture_two_layers_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(4, 6), torch.randn(6, 8, requires_grad=True), torch.randn(8, 2, requires_grad=True)


def test_what_backward_no_longer_reads_is_no_longer_saved() -> None:
    joint = capture_two_layers().join()
    (mm_of_x,) = [node for node in calls(joint.graph, aten.t.default) if node.all_input_nodes[0].name == "primals_1"]
    mm_of_x.replace_input_with(mm_of_x.all_input_nodes[0], named(joint.graph, "mm"))
    forward, backward = split(joint)
    saved = names(results(forward.graph)[1:])
    assert "primals_1" not in saved and "primals_1" not in placeholders(backward.graph)
    assert saved[0] == "mm", "newly read, so it comes before the partitioner's"


def test_a_recomputed_node_stands_once_in_each_half() -> None:
    """min_cut saves only x and recomputes sin:  forward sin -> cos;  backward sin -> sin' ..."""
    joint = capture_step(lambda x: x.sin().cos().sum(), torch.randn(4, 6, requires_grad=True), partition=min_cut).join()
    positions = joint.positions()
    marker = positions[joint.marker]
    sines = [node for node in calls(joint.graph, aten.sin.default) if node.args == (named(joint.graph, "primals_1"),)]
    assert [positions[node] > marker for node in sines] == [False, True]
    assert names(joint.saved) == ["primals_1"]


def test_constants_go_to_the_halves_that_read_them() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * torch.tensor([1.0, 2.0, 3.0])).sin().sum()

    step = capture_step(function, torch.randn(4, 3, requires_grad=True), partition=min_cut)
    joint = step.join()
    (constant,) = joint.graph.find_nodes(op="get_attr")[:1]
    assert torch.equal(getattr(joint.gm, str(constant.target)), torch.tensor([1.0, 2.0, 3.0]))
    assert_step_is_the_same(step, joint)
    for gm, original in zip(split(joint), (step.forward, step.backward), strict=True):
        assert len(gm.graph.find_nodes(op="get_attr")) == len(original.graph.find_nodes(op="get_attr"))


def test_constants_that_disagree_are_refused() -> None:
    step = capture_two_layers()
    for gm, value in ((step.forward, 1.0), (step.backward, 2.0)):
        gm.register_buffer("constant", torch.full((2,), value))
        with gm.graph.inserting_before(next(node for node in gm.graph.nodes if node.op != "placeholder")):
            gm.graph.get_attr("constant")
    with pytest.raises(InternalError, match=r"both have an attribute 'constant', with different values"):
        step.join()


def test_an_output_that_is_also_saved_is_one_node() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = x.exp()
        return logits.sum(), logits

    step = capture_step(function, torch.randn(4, 3, requires_grad=True))
    joint = step.join()
    (exp,) = calls(joint.graph, aten.exp.default)
    assert exp in joint.forward_outputs
    assert_calling_convention(step, joint)
    assert_step_is_the_same(step, joint)


def test_neither_join_nor_split_touches_the_graphs_they_read() -> None:
    step = capture_two_layers()
    before = listing(step.forward.graph), listing(step.backward.graph)
    joint = step.join()
    for node in joint.graph.nodes:
        node.meta["mark"] = "mine"
    text = listing(joint.graph)
    halves = split(joint)
    assert (listing(step.forward.graph), listing(step.backward.graph)) == before
    assert listing(joint.graph) == text
    assert not any("mark" in node.meta for gm in (step.forward, step.backward) for node in gm.graph.nodes)
    for gm in halves:
        for node in gm.graph.nodes:
            node.meta["mark"] = "another"
    assert {node.meta["mark"] for node in joint.graph.nodes} == {"mine"}


def test_nodes_of_backward_are_marked_as_such() -> None:
    """Inductor uses this mark. AOTAutograd sets it on its nodes; the inserted nodes, such as reload, need it too."""
    analysis = analyse(capture_two_layers())
    forward, backward = split(analysis.rewrite(analysis.plan()))
    for gm, expected in ((forward, False), (backward, True)):
        marks = {bool(node.meta.get("autograd_backward")) for node in gm.graph.nodes if node.op == "call_function"}
        assert marks == {expected}


def test_a_parameter_without_gradient_returns_none() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.trained = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.frozen * self.trained).sum()

    joint = capture_step(Frozen(), torch.randn(4, 3)).join()
    assert [gradient is None for gradient in joint.gradients].count(False) == 1
    assert len(joint.gradients) == 3
    assert len(calls(joint.graph, backward_starts)) == 1
