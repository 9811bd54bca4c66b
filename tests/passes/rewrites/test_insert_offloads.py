"""The rewrite: four nodes per storage at the planned positions, and backward reads the reloaded tensors."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Program, capture_toy_or_program, matrix, names, random_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, OPS, RELEASE, RELOAD, WAIT, find, site_of
from ssdtrain_fx.passes.planning.plan import Keep, Offload, Plan
from ssdtrain_fx.passes.rewrites.verify_offloads import verify_offloads
from ssdtrain_fx.testing import (
    TOYS,
    GraphAnalysis,
    analyse,
    assert_same_bits,
    calls,
    capture_step,
    capture_toy,
    changes,
    listing,
    named,
)

aten = torch.ops.aten


def two_layers() -> GraphAnalysis:
    """Saves the pre-activations h [4, 8] and the activations a [4, 8], 128 bytes each."""

    def function(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = x @ w1
        a = h * h.sigmoid()
        return (a @ w2).sum()

    return analyse(capture_step(function, torch.randn(4, 6), matrix(6, 8), matrix(8, 2)))


def fused_qkv(*, dynamic: bool = False) -> GraphAnalysis:
    """addmm [8, 12] -> split -> q, k, v [8, 4]: backward reads q, v and a transpose of k."""

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        q, k, v = torch.addmm(b, x, w).chunk(3, -1)
        return ((q @ k.t()) @ v).sum()

    return analyse(capture_step(function, matrix(8, 6), matrix(6, 12), matrix(12), dynamic=dynamic))


def only(plan: Plan, name: str) -> Plan:
    """``plan`` reduced to the offload of one storage."""
    storages = [
        saved if saved.name == name else dataclasses.replace(saved, decision=Keep("the test says so"))
        for saved in plan.storages
    ]
    return dataclasses.replace(plan, storages=tuple(storages))


def chains(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node, fx.Node, fx.Node]]:
    """(offload, release, reload, wait) of every offloaded storage."""
    found: list[tuple[fx.Node, fx.Node, fx.Node, fx.Node]] = []
    for offload in find(graph, OFFLOAD):
        (release,) = offload.users
        (reload,) = release.users
        (wait,) = reload.users
        assert [node.target for node in (release, reload, wait)] == [RELEASE, RELOAD, WAIT]
        found.append((offload, release, reload, wait))
    return found


def test_before() -> None:
    assert_expected_inline(
        listing(two_layers().joint.graph),
        """\
primals_1: f32[4, 6]
primals_2: f32[6, 8]
primals_3: f32[8, 2]
tangents_1: f32[]
mm: f32[4, 8] = mm(primals_1, primals_2)
sigmoid: f32[4, 8] = sigmoid(mm)
detach: f32[4, 8] = detach(sigmoid)
mul: f32[4, 8] = mul(mm, sigmoid)
mm_1: f32[4, 2] = mm(mul, primals_3)
sum_1: f32[] = sum(mm_1)
backward_starts()
expand: f32[4, 2] = expand(tangents_1, [4, 2])
t: f32[8, 4] = t(mul)
mm_2: f32[8, 2] = mm(t, expand)
t_1: f32[2, 8] = t(primals_3)
mm_3: f32[4, 8] = mm(expand, t_1)
mul_1: f32[4, 8] = mul(mm_3, mm)
mul_2: f32[4, 8] = mul(mm_3, sigmoid)
detach_1: f32[4, 8] = detach(detach)
sigmoid_backward: f32[4, 8] = sigmoid_backward(mul_1, detach_1)
add: f32[4, 8] = add(mul_2, sigmoid_backward)
t_2: f32[6, 4] = t(primals_1)
mm_4: f32[6, 8] = mm(t_2, add)
return ((sum_1), (None, mm_4, mm_2))""",
    )


def test_after() -> None:
    """The disk is as fast as compute: mm is released when mul is complete, and is reloaded when mul has been read."""
    analysis = two_layers()
    plan = only(analysis.plan(disk=128), "mm")
    assert_expected_inline(
        changes(listing(two_layers().joint.graph), listing(analysis.rewrite(plan).graph)),
        """\
...
 mm: f32[4, 8] = mm(primals_1, primals_2)
+offload_default: i64[1] = offload(mm, [], 'name=mm;out_s=3.0;back_s=2.0|')
 sigmoid: f32[4, 8] = sigmoid(mm)
...
 mul: f32[4, 8] = mul(mm, sigmoid)
+release_default: i64[1] = release(offload_default, mm, exclusive=True)
 mm_1: f32[4, 2] = mm(mul, primals_3)
...
 mm_2: f32[8, 2] = mm(t, expand)
+reload_default: i64[1] = reload(release_default, [4, 8], [8, 1], torch.float32, cpu)
 t_1: f32[2, 8] = t(primals_3)
 mm_3: f32[4, 8] = mm(expand, t_1)
-mul_1: f32[4, 8] = mul(mm_3, mm)
+wait_default: f32[4, 8] = wait(reload_default, [4, 8], [8, 1], torch.float32, cpu)
+mul_1: f32[4, 8] = mul(mm_3, wait_default)
 mul_2: f32[4, 8] = mul(mm_3, sigmoid)""",
    )


def test_each_node_stands_right_before_the_one_at_its_planned_position() -> None:
    """Checked for each node: without the other inserted nodes, it is followed by the node that the plan names."""
    analysis = analyse(capture_toy("deep"))
    before = list(analysis.joint.graph.nodes)
    plan = analysis.plan(disk=2048)
    decisions = {saved.decision.representative: saved.decision for saved in plan.storages if _moves(saved.decision)}
    graph = analysis.rewrite(plan).graph
    erased = [node for node in before if node not in set(graph.nodes)]

    def planned(position: int) -> fx.Node:
        return next(node for node in before[position:] if node not in erased)

    def follower(node: fx.Node) -> fx.Node:
        return next(other for other in itertools.islice(_from(graph, node), 1, None) if other in before)

    assert len(chains(graph)) == 6
    for offload, release, reload, wait in chains(graph):
        decision = decisions[str(offload.args[0])]
        assert follower(offload) is planned(decision.offload)
        assert follower(release) is planned(decision.release)
        assert follower(reload) is planned(decision.reload)
        assert follower(wait) is planned(decision.wait)


def test_offloads_hand_on_what_the_plan_waits_for() -> None:
    analysis = analyse(capture_toy("deep"))
    plan = analysis.plan(policy="auto", disk=150, max_slowdown=1.0)
    planned = {saved.decision.representative: saved.decision for saved in plan.storages if _moves(saved.decision)}
    handed_on = {str(node.args[0]): site_of(node).stall_s for node in find(analysis.rewrite(plan).graph, OFFLOAD)}
    assert handed_on == {name: decision.stall_s for name, decision in planned.items()}
    assert sum(handed_on.values()) == pytest.approx(plan.stall_s, abs=1e-5)
    assert plan.stall_s > 1


def _moves(decision: object) -> bool:
    return isinstance(decision, Offload)


def _from(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    nodes = list(graph.nodes)
    return nodes[nodes.index(node) :]


def test_at_one_position_room_is_made_before_it_is_taken() -> None:
    """A release comes before the next offload, and a wait before the reload that it makes room for."""
    graph = (analysis := analyse(capture_toy("deep"))).rewrite(analysis.plan(disk=2048)).graph
    ours = [node.target for node in graph.nodes if node.target in OPS]
    layers = 6
    assert ours == [OFFLOAD, *[RELEASE, OFFLOAD] * (layers - 1), RELEASE, *[RELOAD, WAIT] * layers]


def test_query_key_and_value_come_back_as_one() -> None:
    """addmm -> split -> (q, k, v): one offload, one reload, and the views are taken again after the wait."""
    analysis = fused_qkv()
    graph = analysis.rewrite(only(analysis.plan(), "addmm")).graph
    ((offload, release, _, wait),) = chains(graph)
    addmm = named(graph, "addmm")
    assert offload.args[0] is release.args[1] is addmm
    (split,) = wait.users
    assert split.target is calls(graph, aten.split.Tensor)[0].target
    parts = {node.args[1]: node for node in split.users}
    assert sorted(parts) == [0, 1, 2]
    (transpose,) = parts[1].users
    assert transpose.target is aten.t.default
    positions = {node: position for position, node in enumerate(graph.nodes)}
    for part in (parts[0], transpose, parts[2]):
        assert part.users and all(positions[user] > positions[wait] for user in part.users)
    for member in find_alias_sets(graph).storages[_idx(graph, addmm)].members:
        assert all(positions[user] <= positions[release] for user in member.users)


def _idx(graph: fx.Graph, node: fx.Node) -> int:
    (idx,) = find_alias_sets(graph).by_node[node]
    return idx


def test_forward_views_that_only_backward_read_are_gone() -> None:
    """exp -> detach -> backward: the view would hold the storage to the end of forward, so it moves after the wait."""
    analysis = analyse(capture_step(lambda x: x.exp().sum(), matrix(4, 6)))
    (view,) = [node for node in analysis.joint.saved if node.target is aten.detach.default]
    assert all(
        analysis.joint.positions()[user] > analysis.joint.positions()[analysis.joint.marker] for user in view.users
    )
    joint = analysis.rewrite(analysis.plan())
    ((_, release, _, wait),) = chains(joint.graph)
    assert view not in set(joint.graph.nodes)
    (replica,) = wait.users
    assert replica.target is aten.detach.default
    assert release.args[1] is named(joint.graph, "exp")
    assert names(named(joint.graph, "exp").users) == ["sum_1", "offload_default", "release_default"]


def test_views_that_forward_reads_stay() -> None:
    analysis = fused_qkv()
    graph = analysis.rewrite(analysis.plan()).graph
    marker = analysis.joint.positions()[analysis.joint.marker]
    in_forward = [node.target for node, position in analysis.joint.positions().items() if position < marker]
    assert in_forward.count(aten.split.Tensor) == 1
    assert aten.t.default in in_forward
    assert len(calls(graph, aten.split.Tensor)) == 2


def test_a_plan_that_keeps_everything_changes_nothing() -> None:
    analysis = analyse(capture_toy("attention"), min_tensor_bytes=1 << 30)
    before = listing(analysis.joint.graph), list(analysis.joint.graph.nodes)
    plan = analysis.plan()
    assert not plan.offloaded
    joint = analysis.rewrite(plan)
    assert (listing(joint.graph), list(joint.graph.nodes)) == before


def test_a_plan_for_another_graph_is_refused() -> None:
    deep, attention = analyse(capture_toy("deep")), analyse(capture_toy("attention"))
    before = listing(deep.joint.graph)
    with pytest.raises(InternalError, match="the plan is for another graph"):
        deep.rewrite(attention.plan())
    assert listing(deep.joint.graph) == before


def test_a_plan_that_moves_another_node_is_refused() -> None:
    analysis = two_layers()
    plan = analysis.plan()
    (saved,) = [saved for saved in plan.storages if saved.name == "mm"]
    assert isinstance(saved.decision, Offload)
    other = dataclasses.replace(saved, decision=dataclasses.replace(saved.decision, representative="mul"))
    wrong = dataclasses.replace(plan, storages=tuple(other if one is saved else one for one in plan.storages))
    before = listing(analysis.joint.graph)
    with pytest.raises(InternalError, match="it offloads 'mul' for 'mm'"):
        analysis.rewrite(wrong)
    assert listing(analysis.joint.graph) == before, "refused before the graph was changed"


def test_symbolic_sizes_become_arguments() -> None:
    """Sizes are symbols that forward gets as inputs, or are read from the tensor, but never numbers from tracing."""
    analysis = analyse(capture_step(lambda x: x.exp().sum(), matrix(8, 9), dynamic=True))
    graph = analysis.rewrite(analysis.plan()).graph
    ((_, _, reload, wait),) = chains(graph)
    _, size, stride, _, _ = reload.args
    assert isinstance(size, (list, tuple)) and isinstance(stride, (list, tuple))
    assert all(isinstance(number, fx.Node) for number in size)
    assert {node.op for node in size if isinstance(node, fx.Node)} == {"placeholder"}
    assert [str(node.meta["val"]) for node in size if isinstance(node, fx.Node)] == [
        str(number) for number in wait.meta["val"].shape
    ]
    assert stride[0] is size[1] and stride[1] == 1
    assert wait.args[1:] == reload.args[1:]


def test_sizes_that_are_no_input_are_read_off_the_tensor() -> None:
    """cat makes 2 * s rows, and no placeholder has this value."""
    analysis = analyse(capture_step(lambda x: torch.cat([x, x]).exp().sum(), matrix(8, 9), dynamic=True))
    joint = analysis.rewrite(analysis.plan())
    ((offload, _, reload, _),) = chains(joint.graph)
    size = reload.args[1]
    assert isinstance(size, (list, tuple))
    read = size[0]
    assert isinstance(read, fx.Node)
    assert (read.target, read.args) == (aten.sym_size.int, (offload.args[0], 0))
    positions = joint.positions()
    assert positions[read] < positions[joint.marker]
    verify_offloads(joint)


def test_new_nodes_tell_where_they_come_from() -> None:
    analysis = two_layers()
    mm = named(analysis.joint.graph, "mm")
    graph = analysis.rewrite(only(analysis.plan(), "mm")).graph
    ((offload, release, reload, wait),) = chains(graph)
    assert "h = x @ w1" in mm.meta["stack_trace"]
    for node in (offload, release, reload, wait):
        assert node.meta["stack_trace"] == mm.meta["stack_trace"]
    for node in (offload, release, reload):
        value = node.meta["val"]
        assert (value.shape, value.dtype, value.device.type) == ((1,), torch.int64, "cpu")
    original, reloaded = mm.meta["val"], wait.meta["val"]
    assert (reloaded.shape, reloaded.stride()) == (original.shape, original.stride())
    assert (reloaded.dtype, reloaded.device) == (original.dtype, original.device)
    assert reloaded.untyped_storage()._cdata != original.untyped_storage()._cdata
    assert site_of(offload).name == "mm"


def test_views_behind_a_wait_lie_on_the_reloaded_storage() -> None:
    analysis = fused_qkv()
    graph = analysis.rewrite(only(analysis.plan(), "addmm")).graph
    ((_, _, _, wait),) = chains(graph)
    alias_sets = find_alias_sets(graph)
    (split,) = wait.users
    (transpose,) = [node for part in split.users for node in part.users if part.args[1] == 1]
    for view in (*split.users, transpose):
        assert alias_sets.by_node[view] == alias_sets.by_node[wait]
    assert transpose.meta["val"].stride() == (1, 12)


def test_views_that_backward_takes_lie_on_the_reloaded_storage() -> None:
    """wait -> detach (a replica) -> detach (already in backward): all three share one storage."""
    analysis = analyse(capture_step(lambda x: x.exp().sum(), matrix(4, 6)))
    graph = analysis.rewrite(analysis.plan()).graph
    ((_, _, _, wait),) = chains(graph)
    (replica,) = wait.users
    (of_backward,) = replica.users
    assert of_backward.target is aten.detach.default
    alias_sets = find_alias_sets(graph)
    assert alias_sets.by_node[replica] == alias_sets.by_node[wait]
    assert alias_sets.by_node[of_backward] == alias_sets.by_node[wait]


def assert_rewrite_changes_no_bit(name_or_program: str | Program, policy: str, disk: float) -> None:
    step = capture_toy_or_program(name_or_program)
    analysis = analyse(step)
    plan = analysis.plan(policy=policy, disk=disk)
    joint = analysis.rewrite(plan)
    verify_offloads(joint)
    assert len(chains(joint.graph)) == len(plan.offloaded)
    assert_same_bits(step.run(joint), step.run())


@pytest.mark.parametrize("disk", [1e9, 2048, 600, 1])
@pytest.mark.parametrize("name", TOYS)
def test_the_rewritten_step_computes_the_same_bits(name: str, disk: float) -> None:
    assert_rewrite_changes_no_bit(name, "all", disk)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(program=random_programs(), disk=st.sampled_from([1e9, 300, 100, 1]))
def test_rewritten_random_graphs_compute_the_same_bits(program: Program, disk: float) -> None:
    assert_rewrite_changes_no_bit(program, "all", disk)
