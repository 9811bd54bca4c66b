"""Which nodes Inductor runs as one kernel, approximately.

Matrix products, convolutions and attention are separate kernels. Inductor fuses pointwise ops and reductions, so a
chain of ten reads and writes memory once. This module groups them in the same way:

    0  a = mm(x, w)         separate kernel
    1  b = mul(a, 2)        \\
    2  c = tanh(b)           | one group: reads a and d, writes c and e; b never reaches memory. Costs are on node 3.
    3  e = add(c, d)        /
    4  f = mm(e, v)         separate kernel
    5  return c, f

Two nodes may share a group if all of these hold:

* Both are in forward, or both are in backward.
* The longest chain of separate kernels before them has the same length, so no kernel runs between them. Inductor
  inlines a pointwise op where it is first needed, so the chain before its first reader counts.
* They iterate over the same elements, or one iterates over leading dimensions of the other, as row statistics do.
* One reads the other, or both read the same storage.

A reduction over leading dimensions (the gradient of a bias) reads memory in a different order and is a separate pass.

A group runs where the first of its results is stored (see ``stored_results``), which may be later than its nodes stand:

    0  p = mm(x, w)         separate kernel
    1  q = mm(y, w)         separate kernel
    2  a = mul(p, q)        \\
    3  b = add(p, q)        / one group, which runs at 5: p and q are in memory until then
    4  c = mm(z, w)         separate kernel
    5  d = mm(a, c)         needs a
    6  e = mm(b, d)         needs b, which has been in memory since 5
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from ssdtrain_fx.passes.analysis.stored_results import STORED, StoredResult, find_stored_results
from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, backward_starts
from ssdtrain_fx.passes.graph.node_facts import NodeFact
from ssdtrain_fx.passes.graph.op_kinds import FUSIBLE, Kind
from ssdtrain_fx.passes.graph.tensor_sizes import Shape


class NodeFacts:
    """The cost facts of all nodes of one graph, found once and used for both kernels and seconds.

    Args:
        for_gpu: the graph is planned for a GPU. Its tensors may be on a CPU, as on a machine without a GPU.
    """

    def __init__(self, joint: ScheduledJointGraph, alias_sets: AliasSets, *, for_gpu: bool = False) -> None:
        self._facts = [NodeFact.of(node, alias_sets, for_gpu=for_gpu) for node in joint.graph.nodes]

    @property
    def facts(self) -> Sequence[NodeFact]:
        return self._facts

    @functools.cached_property
    def groups(self) -> Sequence[int]:
        """The fused group of every position, identified by the position of one member."""
        return _fuse(self._facts, self._position_of, self.users)

    @functools.cached_property
    def users(self) -> Sequence[Sequence[int]]:
        """The positions that read each position's value, seen through views and ``getitem``. The last is the output."""
        return _users(self._facts, self._position_of)

    @functools.cached_property
    def _position_of(self) -> Mapping[fx.Node, int]:
        return {fact.node: position for position, fact in enumerate(self._facts)}


@dataclasses.dataclass(frozen=True, slots=True)
class FusedKernel:
    """A group of pointwise ops and reductions that runs as one kernel."""

    runs_at: int
    """Where the first of its results is stored. All other results are stored there as well."""
    begins_at: int
    ends_at: int
    """From where to where its arguments are in memory. On a CPU, all kernels between two separate ones become one
    function, which takes the arguments of all. Elsewhere, both are ``runs_at``."""
    results: tuple[StoredResult, ...]

    @property
    def writes(self) -> frozenset[int]:
        """The storages that it stores, by index."""
        return frozenset(idx for result in self.results for idx in result.writes)


def find_fused_kernels(found: NodeFacts) -> tuple[FusedKernel, ...]:
    """The kernels that Inductor generates, in the order in which they run."""
    facts, groups = found.facts, found.groups
    results = find_stored_results(facts)
    needed = {idx for fact in facts if fact.needs_memory for idx, _ in fact.read}
    group_of = {idx: groups[result.made_at] for result in results for idx in result.writes}
    for result in results:
        needed.update(idx for idx in result.reads if group_of.get(idx) != groups[result.made_at])
    by_group: dict[int, list[StoredResult]] = {}
    runs_at: dict[int, int] = {}
    inside: dict[int, frozenset[int]] = {}
    """By storage that one kernel makes and reads, and nothing else: what it is computed from."""
    for result in results:
        group = groups[result.made_at]
        runs_at[group] = min(runs_at.get(group, result.stored_at), result.stored_at)
        reads = frozenset[int]().union(*(inside.get(idx, (idx,)) for idx in result.reads))
        if needed.isdisjoint(result.writes):
            inside.update(dict.fromkeys(result.writes, reads))
        else:
            by_group.setdefault(group, []).append(dataclasses.replace(result, reads=reads))
    functions = _find_functions(facts, runs_at.values())
    kernels = (
        FusedKernel(
            runs_at=(at := runs_at[group]),
            begins_at=functions[at][0],
            ends_at=functions[at][1],
            results=tuple(stored),
        )
        for group, stored in by_group.items()
    )
    return tuple(sorted(kernels, key=lambda kernel: kernel.runs_at))


def _find_functions(facts: Sequence[NodeFact], runs_at: Collection[int]) -> dict[int, tuple[int, int]]:
    """For each position where a kernel runs: the first and the last such position in the same function."""
    if any(fact.device_type not in ("", "cpu") for fact in facts):
        return {at: (at, at) for at in runs_at}
    separate = [at for at, fact in enumerate(facts) if fact.kind is Kind.KERNEL or fact.node.target is backward_starts]
    functions: dict[int, list[int]] = {}
    for at in runs_at:
        functions.setdefault(bisect.bisect_left(separate, at), []).append(at)
    return {at: (min(members), max(members)) for members in functions.values() for at in members}


# -- groups ------------------------------------------------------------------------------------------------------------


def _fuse(facts: Sequence[NodeFact], position_of: Mapping[fx.Node, int], users: Sequence[Sequence[int]]) -> list[int]:
    """The group of every position, identified by the position of one member."""
    levels = _levels(facts, position_of, users)
    by_columns = _feeds_only_columns(facts, users)
    parent = list(range(len(facts)))
    shapes = [fact.shape for fact in facts]

    def find(member: int) -> int:
        while parent[member] != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    # A storage is written by its allocator and by ops that mutate it. A reader sees the last write before it.
    maker: dict[int, int] = {}
    readers: dict[tuple[int, int, bool], int] = {}
    for position, fact in enumerate(facts):
        if fact.kind in FUSIBLE:
            level, columns = levels[position], by_columns[position]
            partners: list[int] = []
            for idx, _ in fact.read:
                made_at = maker.get(idx)
                if made_at is not None and levels[made_at] == level and by_columns[made_at] == columns:
                    partners.append(made_at)
                partners.append(readers.setdefault((idx, level, columns), position))
            for partner in partners:
                mine, other = find(position), find(partner)
                if mine != other and facts[partner].kind in FUSIBLE and _same_space(shapes[mine], shapes[other]):
                    parent[mine] = other
                    shapes[other] = max(shapes[mine], shapes[other], key=math.prod)
        if fact.kind is not Kind.FREE:
            maker.update((idx, position) for idx in fact.made)
            maker.update((idx, position) for idx, _ in fact.written)
    return [find(position) for position in range(len(facts))]


def _users(facts: Sequence[NodeFact], position_of: Mapping[fx.Node, int]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in facts]
    for position in range(len(facts) - 1, -1, -1):
        for user in facts[position].node.users:
            at = position_of[user]
            if facts[at].kind is Kind.FREE and user.op != "output":
                users[position] += users[at]
            else:
                users[position].append(at)
    return users


def _levels(facts: Sequence[NodeFact], position_of: Mapping[fx.Node, int], users: Sequence[Sequence[int]]) -> list[int]:
    """The longest chain of separate kernels before each position; backward starts above all of forward."""
    levels = [0] * len(facts)
    floor, highest, marker = 0, 0, len(facts)
    for position, fact in enumerate(facts):
        if fact.node.target is backward_starts:
            floor, marker = highest + 2, position
        level = floor if fact.kind is not Kind.FREE else 0
        for source in fact.node.all_input_nodes:
            at = position_of[source]
            level = max(level, levels[at] + (facts[at].kind is Kind.KERNEL))
        levels[position] = level
        highest = max(highest, level)
    for position in range(len(facts) - 1, -1, -1):
        readers = users[position]
        if facts[position].kind is not Kind.POINTWISE or not readers or STORED in facts[position].node.meta:
            continue
        last = max(readers)
        if (position > marker or last < marker) and last < len(facts) - 1:
            levels[position] = min(levels[at] for at in readers)
    return levels


def _feeds_only_columns(facts: Sequence[NodeFact], users: Sequence[Sequence[int]]) -> list[bool]:
    """For every position: is it a reduction over columns, or a pointwise op that is only inlined into those?"""
    found = [fact.kind is Kind.COLUMNS for fact in facts]
    for position in range(len(facts) - 1, -1, -1):
        if facts[position].kind is Kind.POINTWISE and users[position]:
            shape = facts[position].shape
            found[position] = all(found[at] and _same_space(facts[at].shape, shape) for at in users[position])
    return found


def _same_space(one: Shape, other: Shape) -> bool:
    """Does the smaller shape have as many elements as the larger one, or as its leading dimensions?"""
    small, large = sorted((one, other), key=math.prod)
    count, product = math.prod(small), 1
    for size in large:
        if product >= count:
            break
        product *= size
    return product == count
