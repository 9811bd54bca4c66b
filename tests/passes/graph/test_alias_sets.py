"""Alias sets: nodes are in one set exactly if their tensors share memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from graphs import matrix, names
from torch import Tensor, fx

from ssdtrain_fx.passes.graph.alias_sets import AliasSets, Storage, find_alias_sets
from ssdtrain_fx.testing import TOYS, Partition, analyse, calls, capture_step, capture_toy, min_cut, named, save_all

aten = torch.ops.aten


def graph_of(function: object, *inputs: Tensor, partition: Partition = save_all) -> fx.Graph:
    return capture_step(function, *inputs, partition=partition).join().graph  # type: ignore[arg-type]


def storage_of(graph: fx.Graph, target: object) -> Storage:
    """The storage of the first call of ``target``."""
    storage = find_alias_sets(graph).of(calls(graph, target)[0])
    assert storage is not None
    return storage


def test_views_share_the_storage_of_their_base() -> None:
    """exp [4, 6] -> view [24] -> view [8, 3]: one storage of 96 bytes, allocated by exp."""
    graph = graph_of(lambda x: x.exp().view(24).view(8, 3).sin().sum(), matrix())
    storage = storage_of(graph, aten.exp.default)
    assert [node for node in storage.members if node.target is aten.view.default][:2] == calls(
        graph, aten.view.default
    )[:2]
    assert storage.allocator.target is aten.exp.default
    assert storage.size_bytes == storage.hint_bytes == 4 * 6 * 4
    assert storage_of(graph, aten.sin.default).idx != storage.idx


@pytest.mark.parametrize(
    ("view", "target"),
    [
        (lambda a: a.t(), aten.t.default),
        (lambda a: a.transpose(0, 1), aten.transpose.int),
        (lambda a: a[1:3], aten.slice.Tensor),
        (lambda a: a[1], aten.select.int),
        (lambda a: a.expand(5, 4, 6), aten.expand.default),
        (lambda a: a.as_strided((3, 3), (6, 1), 2), aten.as_strided.default),
        (lambda a: a.unsqueeze(0), aten.unsqueeze.default),
    ],
)
def test_every_kind_of_view_shares_and_its_size_is_that_of_the_base(view: object, target: object) -> None:
    """A view may be smaller (slice) or larger (expand) than its base. The storage has the size of the base."""
    graph = graph_of(lambda x: view(x.exp()).sin().sum(), matrix())  # type: ignore[operator]
    storage = storage_of(graph, target)
    assert storage.allocator.target is aten.exp.default
    assert storage.size_bytes == 96


def test_a_copy_does_not_share() -> None:
    graph = graph_of(lambda x: x.exp().t().contiguous().sin().sum(), matrix())
    copy = storage_of(graph, aten.clone.default)
    assert copy.idx != storage_of(graph, aten.exp.default).idx
    assert copy.allocator.target is aten.clone.default


@pytest.mark.parametrize("parts", [lambda a: a.chunk(3, -1), lambda a: a.split(2, -1), lambda a: a.unbind(-1)])
def test_the_parts_of_a_tensor_share_one_storage(parts: object) -> None:
    """exp -> split -> (getitem, getitem, ...): the tuple holds one storage, and every part is a member of it."""
    graph = graph_of(lambda x: sum(part.sin().sum() for part in parts(x.exp())), matrix())  # type: ignore[operator]
    storage = storage_of(graph, aten.exp.default)
    (tuple_node,) = [
        node for node in graph.nodes if isinstance(node.meta.get("val"), (tuple, list)) and node.op == "call_function"
    ]
    getitems = list(tuple_node.users)
    assert len(getitems) in (3, 6)
    alias_sets = find_alias_sets(graph)
    assert alias_sets.by_node[tuple_node] == (storage.idx,)
    assert alias_sets.of(tuple_node) is None, "a tuple is not one tensor"
    assert {alias_sets.by_node[node] for node in getitems} == {(storage.idx,)}
    assert tuple_node not in storage.members
    assert set(getitems) <= set(storage.members)


def test_the_results_of_one_op_are_separate_storages() -> None:
    """native_layer_norm -> (out [4, 6], mean [4, 1], rstd [4, 1]): three storages, all allocated by the op."""
    graph = graph_of(lambda x: torch.nn.functional.layer_norm(x, (6,)).sin().sum(), matrix())
    (norm,) = calls(graph, aten.native_layer_norm.default)
    alias_sets = find_alias_sets(graph)
    storages = [alias_sets.storages[idx] for idx in alias_sets.by_node[norm]]
    assert [storage.allocator for storage in storages] == [norm] * 3
    assert [storage.size_bytes for storage in storages] == [96, 16, 16]
    assert [names(storage.members)[0] for storage in storages] == ["getitem", "getitem_1", "getitem_2"]


def test_a_recomputed_node_makes_a_new_storage() -> None:
    """Both calls of sin have the same FakeTensor, but at run time each call allocates a storage."""
    graph = graph_of(lambda x: x.sin().cos().sum(), matrix(), partition=min_cut)
    original, recomputed = calls(graph, aten.sin.default)[:2]
    assert original.meta["val"] is recomputed.meta["val"], "precondition of this test"
    alias_sets = find_alias_sets(graph)
    first, second = alias_sets.of(original), alias_sets.of(recomputed)
    assert first is not None and second is not None
    assert first.idx != second.idx
    assert (first.members, second.members) == ((original,), (recomputed,))


def test_a_view_of_a_merged_node_shares_its_storage() -> None:
    """min_cut merges the two calls of sin. The remaining view was traced on the deleted call.

    a = sin(x); b = sin(x); mm(b.t(), a)   ->   a = sin(x); mm(a.t(), a)      the FakeTensor of a.t() views that of b
    """
    graph = graph_of(lambda x: x.sin().square().sum() + (x.sin().t() @ x.sin()).sum(), matrix(), partition=min_cut)
    (sin,) = calls(graph, aten.sin.default)
    alias_sets = find_alias_sets(graph)
    transposes = [node for node in calls(graph, aten.t.default) if node.args == (sin,)]
    assert transposes
    assert {alias_sets.by_node[node] for node in transposes} == {alias_sets.by_node[sin]}


def test_views_of_inputs_are_inputs() -> None:
    graph = graph_of(lambda x, w: (x.t() @ w).sum(), matrix(), torch.randn(4, 2, requires_grad=True))
    storage = storage_of(graph, aten.t.default)
    assert storage.is_input
    assert storage.allocator.op == "placeholder"


def test_an_output_that_views_an_input_is_an_input() -> None:
    graph = graph_of(lambda x, w: (x.view(24), (x * w).sum()), matrix(), matrix())
    alias_sets = find_alias_sets(graph)
    outputs = [node for node in graph.output_node().args[0][0] if isinstance(node, fx.Node)]  # type: ignore[index,union-attr]
    of_outputs = [alias_sets.of(node) for node in outputs]
    assert [storage is not None and storage.is_input for storage in of_outputs] == [True, False]


def test_symbolic_sizes_stay_symbolic_and_have_a_hint() -> None:
    graph = capture_step(lambda x: x.exp().sum(), matrix(), dynamic=True).join().graph
    storage = storage_of(graph, aten.exp.default)
    assert isinstance(storage.size_bytes, torch.SymInt)
    assert storage.hint_bytes == 96


def test_symbols_hold_no_storage() -> None:
    graph = capture_step(lambda x: x.exp().sum(), matrix(), dynamic=True).join().graph
    alias_sets = find_alias_sets(graph)
    symbols = [node for node in graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    assert symbols
    assert {alias_sets.by_node[node] for node in symbols} == {()}
    assert {alias_sets.of(node) for node in symbols} == {None}


@pytest.mark.parametrize("partition", [save_all, min_cut])
@pytest.mark.parametrize("name", TOYS)
def test_storages_partition_the_tensors_of_a_graph(name: str, partition: Partition) -> None:
    """Every tensor is a member of one storage. Indices follow the order of allocators. The allocator comes first."""
    analysis = analyse(capture_toy(name, partition=partition))
    alias_sets: AliasSets = analysis.alias_sets
    positions = analysis.joint.positions()
    tensors = [node for node in analysis.joint.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    members = [node for storage in alias_sets.storages for node in storage.members]
    assert len(tensors) > 10
    assert sorted(names(members)) == sorted(names(tensors))
    assert [storage.idx for storage in alias_sets.storages] == list(range(len(alias_sets.storages)))
    starts = [positions[storage.allocator] for storage in alias_sets.storages]
    assert starts == sorted(starts)
    for storage in alias_sets.storages:
        assert all(positions[storage.allocator] <= positions[node] for node in storage.members)
    assert named(analysis.joint.graph, "primals_1").op == "placeholder"


@pytest.mark.parametrize("name", TOYS)
def test_a_copy_has_the_same_alias_sets(name: str) -> None:
    """Mapping the alias sets to a copy gives the same result as finding them in the copy."""
    joint = capture_toy(name).join()
    copy, copy_of = joint.copy()
    carried, found = find_alias_sets(joint.graph).of_copy(copy_of), find_alias_sets(copy.graph)
    assert carried.by_node == found.by_node
    for one, other in zip(carried.storages, found.storages, strict=True):
        assert all(getattr(one, field.name) == getattr(other, field.name) for field in dataclasses.fields(one))
