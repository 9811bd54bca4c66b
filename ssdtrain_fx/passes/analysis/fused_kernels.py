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

Inductor stores a pointwise result when it reaches an op that needs the result in memory, or where the node is marked
(``store_sums``). A reduction that runs earlier recomputes that value from its inputs:

    0  p = mm(x, w)         separate kernel
    1  s = mul(p, 2)        stored for 3
    2  b = sum(s, [0])      separate pass: reads p again, not s
    3  d = mm(view(s), v)   separate kernel
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, backward_starts
from ssdtrain_fx.passes.graph.node_facts import NodeFact
from ssdtrain_fx.passes.graph.op_kinds import FUSIBLE, Kind
from ssdtrain_fx.passes.graph.tensor_sizes import Shape

STORED = "ssdtrain_stored"
"""Key in ``node.meta`` of a pointwise op whose result Inductor has to store as soon as it is computed."""


class NodeFacts:
    """The cost facts of all nodes of one graph, found once and used for both kernels and seconds."""

    def __init__(self, joint: ScheduledJointGraph, alias_sets: AliasSets) -> None:
        self._facts = [NodeFact.of(node, alias_sets) for node in joint.graph.nodes]

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
    """A group of pointwise ops and reductions that runs as one kernel. Storages are given by index."""

    last: int
    """Position of the last member."""
    reads: tuple[int, ...]
    """Made outside the group."""
    writes: tuple[int, ...]
    """Made in the group and needed outside it."""
    inlined: tuple[int, ...]
    """Made in the group and read only by its members, so they never reach memory."""
    reads_again: tuple[int, ...] = ()
    """Inputs from which members recompute arguments that are stored too late for them."""


def find_fused_kernels(
    joint: ScheduledJointGraph, alias_sets: AliasSets, *, found: NodeFacts | None = None
) -> tuple[FusedKernel, ...]:
    """The groups that :func:`estimate_node_seconds` prices, in the order of their last members.

    Args:
        found: facts of this graph, if they are already known.
    """
    found = NodeFacts(joint, alias_sets) if found is None else found
    facts, groups = found.facts, found.groups
    read_again = _read_again(facts, found.users)
    maker: dict[int, int] = {}
    for fact, group in zip(facts, groups, strict=True):
        if fact.kind is not Kind.FREE:
            maker.update((idx, group) for idx in fact.made)
    needed = {idx for fact in facts if fact.node.op == "output" for idx, _ in fact.read}
    members: dict[int, list[int]] = {}
    for position, (fact, group) in enumerate(zip(facts, groups, strict=True)):
        if fact.kind is Kind.FREE:
            continue
        needed.update(idx for idx, _ in fact.read if maker.get(idx, group) != group)
        if fact.kind in FUSIBLE:
            members.setdefault(group, []).append(position)
    kernels: list[FusedKernel] = []
    for group, positions in members.items():
        made = [idx for position in positions for idx in facts[position].made]
        read = dict.fromkeys(
            idx for position in positions for idx, _ in facts[position].read if maker.get(idx) != group
        )
        kernels.append(
            FusedKernel(
                last=positions[-1],
                reads=tuple(read),
                writes=tuple(idx for idx in made if idx in needed),
                inlined=tuple(idx for idx in made if idx not in needed),
                reads_again=tuple(dict.fromkeys(idx for position in positions for idx in read_again.get(position, ()))),
            )
        )
    return tuple(sorted(kernels, key=lambda kernel: kernel.last))


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


def _read_again(facts: Sequence[NodeFact], users: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """By position of a reduction over columns: the storages from which it recomputes its argument.

    This happens if only separate kernels after the reduction need the argument in memory. A kernel that reads the
    argument directly, not through a view, is an exception: Inductor checks direct readers when it computes the
    argument, and stores it at once.
    """
    kernels = [[at for at in readers if facts[at].kind is Kind.KERNEL] for readers in users]
    maker: dict[int, int] = {}
    made_of: dict[int, list[tuple[int, int | None]]] = {}
    """By position of a pointwise op: the storages that it reads, and the position that made each."""
    again: dict[int, list[int]] = {}
    marker = 0

    def is_stored(made_at: int | None, position: int) -> bool:
        """Is the result of ``made_at`` in memory when Inductor reaches ``position``?"""
        if made_at is None or made_at < marker or facts[made_at].kind is not Kind.POINTWISE:
            return True
        if STORED in facts[made_at].node.meta:
            return True
        return min(kernels[made_at], default=position) < position

    def comes_too_late(made_at: int | None, position: int) -> bool:
        if made_at is None or not kernels[made_at] or is_stored(made_at, position):
            return False
        return not any(facts[at].node in facts[made_at].node.users for at in kernels[made_at])

    def sources(made_at: int, position: int) -> Iterator[int]:
        waiting, seen = [made_at], {made_at}
        while waiting:
            for idx, before in made_of[waiting.pop()]:
                if before is None or is_stored(before, position):
                    yield idx
                elif before not in seen:
                    seen.add(before)
                    waiting.append(before)

    for position, fact in enumerate(facts):
        if fact.node.target is backward_starts:
            marker = position
        if fact.kind is Kind.POINTWISE:
            made_of[position] = [(idx, maker.get(idx)) for idx, _ in fact.read]
        elif fact.kind is Kind.COLUMNS:
            late = [maker[idx] for idx, _ in fact.read if comes_too_late(maker.get(idx), position)]
            again[position] = [idx for made_at in late for idx in sources(made_at, position)]
        if fact.kind is not Kind.FREE:
            maker.update((idx, position) for idx in fact.made)
            maker.update((idx, position) for idx, _ in fact.written)
    return again


def _same_space(one: Shape, other: Shape) -> bool:
    """Does the smaller shape have as many elements as the larger one, or as its leading dimensions?"""
    small, large = sorted((one, other), key=math.prod)
    count, product = math.prod(small), 1
    for size in large:
        if product >= count:
            break
        product *= size
    return product == count
