"""What Inductor stores in memory, where, and what each stored value is computed from.

Inductor lowers a graph node by node. A reduction is stored where it stands. A pointwise result is not: it becomes part
of whatever reads it, and is stored only when something needs it in memory. So a value that is not stored is computed
again by each reader, from inputs that have to be in memory until then:

    0  p = mm(x, w)
    1  s = add(p, r)         not stored: two readers, two inputs
    2  n = mean(s, [1])      stored; reads p and r
    3  t = sub(s, n)         not stored
    4  q = mm(t, v)          stores t at 4, computed from p, r and n
    5  u = add(s, q)         reads p and r once more

The rules are those of ``GraphLowering.run_node`` and ``StorageBox.should_realize_on_reuse`` in torch/_inductor/graph.py
and ir.py of torch 2.13. A result with several readers is stored at once

- if one of them needs it in memory and it has several inputs,
- if one of them is outside the graph,
- if it is computed from many inputs or by many ops, or on a CPU from an expensive one.

A result that is marked with ``REALIZE_TO_STRIDES`` is always stored at once, and so is a concatenation on a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ssdtrain_fx._torch_private import REALIZE_TO_STRIDES
from ssdtrain_fx.passes.graph.joint_graph import backward_starts
from ssdtrain_fx.passes.graph.node_facts import NodeFact
from ssdtrain_fx.passes.graph.op_kinds import Kind

STORED = "ssdtrain_stored"
"""Key in ``node.meta`` of a pointwise op whose result Inductor has to store as soon as it is computed."""
MAX_SHARED_READS = 4
"""A result with several readers is stored if it is computed from more inputs than this."""
MAX_OPS = 100
"""Any result is stored if it is computed by more ops than this."""


class _Limits(NamedTuple):
    """A result of several inputs is stored if there are more than this, or more ops."""

    reads: int
    ops: int
    stores_heavy: bool
    """With several readers, results of expensive ops are stored."""


CPU_LIMITS, OTHER_LIMITS = _Limits(12, 50, stores_heavy=True), _Limits(8, 30, stores_heavy=False)
HEAVY_OPS = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResult:
    """A pointwise result or a reduction that is in memory."""

    made_at: int
    """Position of the op."""
    stored_at: int
    """Where it is needed in memory first, or where it stands."""
    writes: tuple[int, ...]
    """Its storages, by index."""
    reads: frozenset[int]
    """The storages in memory that it is computed from, by index."""


@dataclasses.dataclass(slots=True)
class _Unstored:
    """A pointwise result so far: an expression over storages in memory."""

    made_at: int
    writes: tuple[int, ...]
    reads: frozenset[int]
    ops: frozenset[int]
    """Positions of the pointwise ops."""
    is_heavy: bool

    def is_large(self, limits: _Limits, *, is_shared: bool) -> bool:
        """Is it not worth, or not possible, to compute it in each reader? ``is_shared``: it has several readers."""
        if is_shared and (len(self.reads) > MAX_SHARED_READS or (limits.stores_heavy and self.is_heavy)):
            return True
        return len(self.ops) + len(self.reads) > limits.ops or len(self.reads) > limits.reads


def find_stored_results(facts: Sequence[NodeFact]) -> list[StoredResult]:
    """The stored results of a joint graph, in the order in which they are stored.

    Args:
        facts: of all nodes, in order.
    """
    position_of = {fact.node: position for position, fact in enumerate(facts)}
    marker = next((at for at, fact in enumerate(facts) if fact.node.target is backward_starts), len(facts))
    results: list[StoredResult] = []
    unstored: dict[int, _Unstored] = {}

    def store(storages: Iterable[int], at: int) -> None:
        for idx in storages:
            value = unstored.get(idx)
            if value is not None:
                for made in value.writes:
                    del unstored[made]
                results.append(StoredResult(value.made_at, at, value.writes, value.reads))

    def must_store(value: _Unstored, fact: NodeFact, position: int) -> bool:
        """Is it stored as soon as ``fact`` has been lowered, which is the value or a view of it?"""
        limits = CPU_LIMITS if fact.device_type == "cpu" else OTHER_LIMITS
        users = [position_of[user] for user in fact.node.users]
        inside = [at for at in users if at < len(facts) - 1 and (at > marker) == (position > marker)]
        is_returned = len(inside) < len(users)
        if len(inside) + is_returned > 1:
            is_needed = any(facts[at].kind is Kind.KERNEL for at in inside)
            if (is_needed and len(value.reads) > 1) or (is_returned and value.reads):
                return True
            return value.is_large(limits, is_shared=True)
        return (len(value.reads) > 1 and value.is_large(limits, is_shared=False)) or len(value.ops) > MAX_OPS

    for position, fact in enumerate(facts):
        read = dict.fromkeys(idx for idx, _ in fact.read)
        if position == marker:  # forward returns what backward reads
            store({idx for later in facts[position:] for idx, _ in later.read}, position)
        elif fact.needs_memory:
            store(read, position)
        elif fact.kind is Kind.FREE:
            store([idx for idx in read if idx in unstored and must_store(unstored[idx], fact, position)], position)
        else:
            inlined = {value.made_at: value for idx in read if (value := unstored.get(idx)) is not None}.values()
            value = _Unstored(
                made_at=position,
                writes=fact.made,
                reads=frozenset(idx for idx in read if idx not in unstored).union(*(one.reads for one in inlined)),
                ops=frozenset((position,)).union(*(one.ops for one in inlined)),
                is_heavy=fact.name in HEAVY_OPS or any(one.is_heavy for one in inlined),
            )
            unstored.update(dict.fromkeys(fact.made, value))
            is_pointwise = fact.kind is Kind.POINTWISE and not fact.is_filled_in_parts
            if not is_pointwise or fact.written or REALIZE_TO_STRIDES in fact.node.meta:
                results.append(StoredResult(position, position, value.writes, value.reads))
                for idx in fact.made:
                    del unstored[idx]
            elif must_store(value, fact, position):
                store(fact.made, position)
    return results
