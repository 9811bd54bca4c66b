"""Describe what runs when and what is in memory then, as plain values that outlive the graph. Used by reports.

    before   the scheduled joint graph that the partitioner returned
    after    the rewritten graph that the compiler receives, with recomputed nodes and the offload ops

Live spans follow the plan, not the rewritten graph. Values that Inductor fuses never reach memory, so neither schedule
has spans for them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from torch import fx

from ssdtrain_fx.passes.analysis.analyse import Analysis
from ssdtrain_fx.passes.graph.alias_sets import AliasSets, Storage, find_alias_sets
from ssdtrain_fx.passes.graph.copy_nodes import COPY_OF
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.graph.module_paths import module_path
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, OPS, WAIT
from ssdtrain_fx.passes.graph.source_lines import source_line
from ssdtrain_fx.passes.planning.plan import Offload, Plan
from ssdtrain_fx.passes.planning.simulate import Simulation, simulate
from ssdtrain_fx.passes.planning.transfer_problem import TransferProblem, add_up


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledNode:
    """One node of the graph."""

    name: str
    op: str
    inputs: tuple[str, ...]
    """The names of the nodes that it reads."""
    module: str
    """Path of the module whose forward or backward it belongs to; empty if unknown."""
    source: str
    """The line of user code that it comes from, or an empty string."""
    start_s: float
    """When it starts, from the beginning of the step."""
    storage: str
    """The saved storage that this node was inserted for, either to move it (one of the four ops) or to recompute it.
    Empty for other nodes."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledStorage:
    """A storage of values of this graph, even if the compiled code never allocates it."""

    name: str
    """The node that makes it and a number, because a node may make several: ``addmm_3.0``."""
    size_bytes: int
    """0 if it depends on data."""
    holders: tuple[str, ...]
    """The nodes whose value is on it, in order. The first one makes it: for an input, the placeholder; for a reloaded
    storage, the reload, which allocates it although its value is only the ticket."""
    saved: bool
    """True if it is in memory when backward begins, and backward reads it."""


@dataclasses.dataclass(frozen=True, slots=True)
class LiveSpan:
    """A storage is in memory while the nodes at positions ``start <= position < end`` run."""

    storage: str
    size_bytes: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """One order of execution."""

    nodes: tuple[ScheduledNode, ...]
    marker: int
    """Position where forward ends."""
    step_s: float
    storages: tuple[ScheduledStorage, ...]
    """From the alias sets of this graph: an offloaded storage and the reloaded one are two."""
    live: tuple[LiveSpan, ...]
    """The storages that the graph allocates. A storage that is offloaded and reloaded has two spans."""

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """The live bytes at every position."""
        change = [0] * (len(self.nodes) + 1)
        for span in self.live:
            change[span.start] += span.size_bytes
            change[span.end] -= span.size_bytes
        return tuple(itertools.accumulate(change))[: len(self.nodes)]


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """An activity besides the nodes' own work: a transfer on a channel, or the compute stream's time for a storage."""

    storage: str
    kind: Literal["write", "read", "staging", "copy_out", "copy_in", "copy", "stall", "recompute"]
    """``staging``: a reload of a storage that never reached the SSD. ``copy_out`` and ``copy_in``: to the host tier and
    back. The last three occupy the compute stream."""
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """The predicted schedule of a step before and after rewriting."""

    before: Schedule
    after: Schedule
    activities: tuple[Activity, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """A live span by its first and last node, both included. Nodes stay the same when positions change."""

    storage: str
    size_bytes: int
    first: fx.Node
    last: fx.Node


class ScheduleDescriber:
    """Records the graphs before offloads are inserted, and describes them afterwards."""

    def __init__(self, before: Analysis, planned: Analysis, problem: TransferProblem, plan: Plan) -> None:
        """
        Args:
            before: the graph before any rewrite.
            planned: the same graph, or a copy with the plan's recomputations.
            problem: the transfer problem of ``planned``.
        """
        self._problem = problem
        self._placements = {
            one.name: one.decision.placement for one in plan.storages if isinstance(one.decision, Offload)
        }
        self._name_of_first = _name_firsts(before)
        self._before = describe_analysis(before)
        self._joint = planned.joint
        self._nodes = list(planned.joint.graph.nodes)
        self._names = _name_storages(planned, self._name_of_first)
        self._spans = _find_spans(planned, self._names)

    def timeline(self) -> Timeline:
        """The schedules before and after. The planned graph may have been rewritten in place since."""
        placements = {idx: self._placements[name] for idx, name in self._names.items() if name in self._placements}
        simulation = simulate(self._problem, placements, record=True)
        inserted = _find_inserted(self._joint.graph)
        start_s = dict(zip(self._nodes, simulation.start_s, strict=True))
        for event in simulation.events:
            op = event.step.name.removesuffix("_AT_ONCE").lower()
            start_s[inserted[self._names[event.idx], op]] = event.begin_s
        spans: list[_Span] = []
        for span in self._spans:
            if span.storage in self._placements:
                release, reload = (inserted[span.storage, op] for op in ("release", "reload"))
                spans += [dataclasses.replace(span, last=release), dataclasses.replace(span, first=reload)]
            else:
                spans.append(span)
        after = _describe(
            self._joint,
            self._nodes,
            start_s,
            simulation.step_s,
            spans,
            alias_sets=find_alias_sets(self._joint.graph),
            name_of_first=self._name_of_first,
        )
        return Timeline(self._before, after, tuple(self._activities(simulation, start_s)))

    def _activities(self, simulation: Simulation, start_s: Mapping[fx.Node, float]) -> Iterator[Activity]:
        for transfer in simulation.transfers:
            yield Activity(self._names[transfer.idx], transfer.channel, transfer.begin_s, transfer.end_s)
        for event in simulation.events:
            if event.end_s > event.begin_s:
                stalls = event.step.name.startswith(("RELEASE", "WAIT"))
                yield Activity(self._names[event.idx], "stall" if stalls else "copy", event.begin_s, event.end_s)
        for node, node_s in zip(self._nodes, self._problem.node_s, strict=True):
            if COPY_OF in node.meta and node_s > 0:
                _, made = node.meta[COPY_OF]
                begin_s = start_s[node]
                yield Activity(self._name_of_first[made], "recompute", begin_s, begin_s + node_s)


def describe_analysis(analysis: Analysis) -> Schedule:
    """The schedule of the graph without transfers and waits."""
    started = itertools.accumulate(analysis.node_s, initial=0.0)
    start_s = dict(zip(analysis.joint.graph.nodes, started, strict=False))
    return _describe(
        analysis.joint,
        list(start_s),
        start_s,
        add_up(analysis.node_s),
        _find_spans(analysis, _name_storages(analysis)),
        alias_sets=analysis.alias_sets,
        name_of_first=_name_firsts(analysis),
    )


def _describe(
    joint: ScheduledJointGraph,
    planned_nodes: Sequence[fx.Node],
    start_s: Mapping[fx.Node, float],
    step_s: float,
    spans: Iterable[_Span],
    *,
    alias_sets: AliasSets,
    name_of_first: Mapping[str, str],
) -> Schedule:
    positions = joint.positions()
    storage_of = {node: storage for (storage, _), node in _find_inserted(joint.graph).items()}
    nodes: list[ScheduledNode] = []
    now = 0.0
    for node in positions:
        now = start_s.get(node, now)  # a rebuilt view takes no time
        storage = storage_of.get(node, "")
        if COPY_OF in node.meta:
            _, made = node.meta[COPY_OF]
            storage = name_of_first[made]
        nodes.append(_describe_node(node, now, storage))
    # A view that only backward reads is rebuilt there, so it is no longer in forward.
    last_before: dict[fx.Node, int] = {}
    last = 0
    for node in planned_nodes:
        last = positions.get(node, last)
        last_before[node] = last
    live = (
        LiveSpan(
            span.storage,
            span.size_bytes,
            positions[span.first],
            (positions[span.last] if span.last in positions else last_before[span.last]) + 1,
        )
        for span in spans
    )
    storages = tuple(_describe_storages(joint, alias_sets))
    return Schedule(tuple(nodes), positions[joint.marker], step_s, storages, tuple(live))


def _describe_storages(joint: ScheduledJointGraph, alias_sets: AliasSets) -> Iterator[ScheduledStorage]:
    positions = joint.positions()
    marker = positions[joint.marker]
    given_to_backward = set(joint.backward_inputs)
    made: collections.Counter[str] = collections.Counter()
    for storage in alias_sets.storages:
        maker, holders = storage.allocator, storage.holders
        if maker.target is WAIT:
            maker = maker.all_input_nodes[0]
            holders = (maker, *holders)
        try:
            size_bytes = storage.hint_bytes
        except ValueError:
            size_bytes = 0
        readers = (user for holder in holders for user in holder.users if user.op != "output")
        yield ScheduledStorage(
            name=f"{maker.name}.{made[maker.name]}",
            size_bytes=size_bytes,
            holders=tuple(node.name for node in holders),
            saved=positions[maker] < marker
            and maker not in given_to_backward
            and any(positions[reader] > marker for reader in readers),
        )
        made[maker.name] += 1


def _name_firsts(analysis: Analysis) -> dict[str, str]:
    """The names of all storages by the name of their first node, which is the same in a copy of the graph."""
    names = _name_storages(analysis)
    return {_first(storage).name: names[storage.idx] for storage in analysis.alias_sets.storages}


def _name_storages(analysis: Analysis, known: Mapping[str, str] | None = None) -> dict[int, str]:
    """The names of all storages by index: as in the plan for a saved storage, else the name of the first node.

    Args:
        known: names before recomputations were inserted, by first node. A recomputed storage has the name of its
            original, and a storage that is no longer saved keeps its name.
    """
    known = {} if known is None else known
    names: dict[int, str] = {}
    for storage in analysis.alias_sets.storages:
        first = _first(storage)
        original, made = first.meta.get(COPY_OF, (first.name, first.name))
        names[storage.idx] = known.get(original, first.name) if original == made else first.name
    return names | {
        candidate.storage.idx: (candidate.representative or candidate.saved_nodes[0]).name
        for candidate in analysis.candidates
    }


def _first(storage: Storage) -> fx.Node:
    """The first member, which differs between the outputs of a multi-output op; the op itself if there is no member."""
    return storage.members[0] if storage.members else storage.allocator


def _find_spans(analysis: Analysis, names: Mapping[int, str]) -> list[_Span]:
    nodes = list(analysis.joint.graph.nodes)
    return [
        *(
            _Span(names[idx], one.size_bytes, nodes[one.start], nodes[one.end - 1])
            for idx, one in analysis.intervals.items()
        ),
        *(_Span(name, one.size_bytes, nodes[one.start], nodes[one.end - 1]) for name, one in analysis.extras.items()),
    ]


def _find_inserted(graph: fx.Graph) -> dict[tuple[str, str], fx.Node]:
    """The inserted ops by (name of the storage's node, name of the op). Each op reads the one before it."""
    storages: dict[fx.Node, str] = {}
    found: dict[tuple[str, str], fx.Node] = {}
    for node in graph.nodes:
        if node.target in OPS:
            first = node.args[0]
            assert isinstance(first, fx.Node)
            storage = first.name if node.target is OFFLOAD else storages[first]
            storages[node] = storage
            found[storage, _op_name(node).split(".")[1]] = node
    return found


def _describe_node(node: fx.Node, start_s: float, storage: str) -> ScheduledNode:
    return ScheduledNode(
        name=node.name,
        op=_op_name(node),
        inputs=tuple(source.name for source in node.all_input_nodes),
        module=module_path(node),
        source=source_line(node),
        start_s=start_s,
        storage=storage,
    )


def _op_name(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.op
    return str(node.target) if "<" not in str(node.target) else getattr(node.target, "__name__", str(node.target))
