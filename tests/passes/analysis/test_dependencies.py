"""The dependency graph, compared with runs of the graphs and with reachability in FX."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, cast

import networkx as nx
import pytest
from graphs import Program, capture_program, capture_toy_or_program, random_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from test_liveness import predict, token_bytes, without
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.passes.analysis.analyse import Analysis, analyse
from ssdtrain_fx.passes.analysis.dependencies import find_dependencies
from ssdtrain_fx.passes.analysis.describe_schedule import Schedule, describe_analysis
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, join
from ssdtrain_fx.passes.pipeline import offload_saved_tensors
from ssdtrain_fx.testing import TOYS, CapturedStep, capture_toy, toy_hardware


def analysed(joint: ScheduledJointGraph) -> Analysis:
    return analyse(joint, min_tensor_bytes=0, hardware=toy_hardware(), fused=False)


def of_kind(graph: nx.DiGraph[str], kind: str) -> list[str]:
    return [name for name, data in graph.nodes(data=True) if data["kind"] == kind]


def related(graph: nx.DiGraph[str], storage: str, *relations: str) -> set[str]:
    """The nodes that an edge with one of ``relations`` connects to ``storage``."""
    edges = itertools.chain(graph.in_edges(storage, data=True), graph.out_edges(storage, data=True))
    return {({one, other} - {storage}).pop() for one, other, data in edges if data["relation"] in relations}


def freed_by(graph: nx.DiGraph[str], storage: str) -> str:
    """The node on the storage's only edge with ``frees``."""
    edges = itertools.chain(graph.in_edges(storage, data=True), graph.out_edges(storage, data=True))
    (pair,) = [{one, other} for one, other, data in edges if data["frees"]]
    return (pair - {storage}).pop()


class StorageWatcher(fx.Interpreter):
    """Records the nodes on each storage. It keeps all values, so that equal addresses mean the same storage."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.holders: dict[int, list[str]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            for address in dict.fromkeys(addresses(result)):
                self.holders.setdefault(address, []).append(n.name)
        return result


def addresses(value: Any) -> Iterator[int]:
    for leaf in cast("list[object]", pytree.tree_leaves(value)):
        if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes():
            yield leaf.untyped_storage().data_ptr()


def reachable(node: fx.Node) -> set[str]:
    """The nodes that depend on ``node``, found through FX users."""
    found: set[str] = set()
    rest = list(node.users)
    while rest:
        user = rest.pop()
        if user.name not in found:
            found.add(user.name)
            rest += user.users
    return found


def live_bytes(graph: nx.DiGraph[str], storages: Iterable[str]) -> list[int]:
    """Live bytes by position. A storage is live from the node that makes it to the one that frees it, inclusive."""
    total = [0] * len(of_kind(graph, "node"))
    for storage in storages:
        first, last = (graph.nodes[name]["position"] for name in (storage, freed_by(graph, storage)))
        for position in range(first, last + 1):
            total[position] += graph.nodes[storage]["size_bytes"]
    return total


def assert_order(graph: nx.DiGraph[str], schedule: Schedule) -> None:
    """The execution order is a topological order, with every storage directly after the node that makes it."""
    assert nx.is_directed_acyclic_graph(graph)

    def key(name: str) -> int:
        return graph.nodes[name]["position"]

    in_order = list(nx.lexicographical_topological_sort(graph, key=key))
    assert [name for name in in_order if graph.nodes[name]["kind"] == "node"] == [node.name for node in schedule.nodes]
    assert [key(name) for name in in_order] == sorted(map(key, in_order))
    for source, target, data in graph.edges(data=True):
        assert key(source) == key(target) if data["relation"] == "makes" else key(source) < key(target)
    for storage in of_kind(graph, "storage"):
        touching = related(graph, storage, "makes", "views", "reads")
        assert key(freed_by(graph, storage)) == max(map(key, touching))


def assert_dependencies(step: CapturedStep) -> None:
    joint = step.join()
    analysis = analysed(joint)
    schedule = describe_analysis(analysis)
    graph = find_dependencies(schedule)
    storages = of_kind(graph, "storage")
    assert_order(graph, schedule)

    for node in joint.graph.nodes:
        assert nx.descendants(graph, node.name) - set(storages) == reachable(node)

    watcher = StorageWatcher(joint.gm)
    watcher.run(*step.joint_args(joint))
    held = {frozenset(related(graph, storage, "makes", "views")) for storage in storages}
    assert held == {frozenset(holders) for holders in watcher.holders.values()}
    readers = {node.name: {user.name for user in node.users} for node in joint.graph.nodes}
    for storage in storages:
        holders = related(graph, storage, "makes", "views")
        reading = set[str]().union(*(readers[holder] for holder in holders))
        assert related(graph, storage, "reads") == reading - holders

    made = [storage for storage in storages if not graph.nodes[storage]["is_input"]]
    assert live_bytes(graph, made) == list(step.measure(joint).live_bytes)

    saved = {frozenset(related(graph, name, "makes", "views")) for name in storages if graph.nodes[name]["saved"]}
    assert saved == {frozenset(node.name for node in candidate.storage.holders) for candidate in analysis.candidates}


@pytest.mark.parametrize("name", TOYS)
def test_dependencies_of_toys(name: str) -> None:
    assert_dependencies(capture_toy(name))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(program=random_programs())
def test_dependencies_of_random_graphs(program: Program) -> None:
    assert_dependencies(capture_program(program))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(what=st.one_of(st.sampled_from(list(TOYS)), random_programs()))
def test_what_comes_back_is_another_storage(what: str | Program) -> None:
    """In the rewritten graph, the release frees the memory and the reload allocates it again.

    Live bytes are compared with those of liveness, which other tests compare with runs of these graphs.
    """
    step = capture_toy_or_program(what)
    rewritten = offload_saved_tensors(
        step.forward,
        step.backward,
        num_forward_outputs=step.num_forward_outputs,
        config=OffloadConfig(inner="aot_eager", min_tensor_bytes=0, policy="all"),
        hardware=toy_hardware(1e12),
        budget=None,
        describe=True,
    )
    assert rewritten.timeline is not None
    schedule = rewritten.timeline.after
    graph = find_dependencies(schedule)
    assert_order(graph, schedule)
    nodes, storages = graph.nodes, of_kind(graph, "storage")
    inserted = {
        (node.storage, node.op.split(".")[1]): node.name for node in schedule.nodes if node.op.startswith("ssdtrain.")
    }
    waits = {name for (_, op), name in inserted.items() if op == "wait"}
    for saved in rewritten.plan.offloaded:
        release, reload, wait = (inserted[saved.name, op] for op in ("release", "reload", "wait"))
        (away,) = (name for name in storages if saved.name in related(graph, name, "makes", "views"))
        (back,) = (name for name in storages if wait in related(graph, name, "views"))
        assert freed_by(graph, away) == release
        assert related(graph, back, "makes") == {reload}
        assert nodes[away]["size_bytes"] == nodes[back]["size_bytes"] == saved.size_bytes
        assert (nodes[away]["saved"], nx.has_path(graph, away, back)) == (False, True)

    def is_token(name: str) -> bool:
        (maker,) = related(graph, name, "makes")
        return maker in inserted.values() and not related(graph, name, "views") & waits

    counted = [name for name in storages if not nodes[name]["is_input"] and not is_token(name)]
    joint = join(rewritten.forward, rewritten.backward, num_forward_outputs=step.num_forward_outputs)
    existed = dict(
        zip(
            map(str, joint.graph.nodes), without(predict(joint.graph).live_bytes, token_bytes(joint.graph)), strict=True
        )
    )
    told = {node.name: size for node, size in zip(schedule.nodes, live_bytes(graph, counted), strict=True)}
    computed = [node.name for node in schedule.nodes if node.op != "placeholder"]
    assert [(name, told[name]) for name in computed] == [(name, existed[name]) for name in computed]
