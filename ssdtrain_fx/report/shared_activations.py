"""Which inputs of graphs are results that another graph has in memory anyway.

    h = relu(x @ w)         graph 0, whose backward reads h
    ---- graph break
    y = h @ v               graph 1, whose backward reads h as well: one tensor, held by two graphs

A plan is made for one graph, and counts all that the graph reads. Which result becomes which input is only known when
the graphs run. So ``explain`` watches them, and the tensor counts in the first graph that holds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.planning.chain_memory import ChainMemory
from ssdtrain_fx.passes.planning.plan import Plan

Storages = Mapping[int, _torch_private.StorageWeakRef]
"""The storages of arguments or results, by number. A weak reference keeps the address from being used again."""


class SharedActivations:
    """Watches the compiled graphs of one call."""

    def __init__(self) -> None:
        self._arguments: dict[int, Storages] = {}
        self._results: dict[int, Storages] = {}

    def watch(self, compiled: Callable[..., Any], graph: int) -> Callable[..., Any]:
        """``compiled``, whose first call is watched. ``graph`` is its index; graphs run in this order."""

        def run(*arguments: Any) -> Any:
            if graph in self._arguments:
                return compiled(*arguments)
            self._arguments[graph] = _storages(arguments)
            results = compiled(*arguments)
            self._results[graph] = _storages(results)
            return results

        return run

    def count_once(self, plans: Sequence[Plan]) -> list[Plan]:
        """The plans of all graphs, without inputs that another graph holds."""
        before = self._count_once([plan.chain_before for plan in plans])
        after = self._count_once([plan.chain_after for plan in plans])
        return [
            dataclasses.replace(plan, chain_before=one, chain_after=other)
            for plan, one, other in zip(plans, before, after, strict=True)
        ]

    def _count_once(self, graphs: Iterable[ChainMemory]) -> list[ChainMemory]:
        held: set[_torch_private.StorageWeakRef] = set()
        counted: list[ChainMemory] = []
        for graph, memory in enumerate(graphs):
            arguments, results = self._arguments.get(graph, {}), self._results.get(graph, {})
            memory = memory.without_inputs([number for number, storage in arguments.items() if storage in held])
            counted.append(memory)
            held |= {arguments[number] for number in memory.held_inputs if number in arguments}
            held |= {results[number] for number in memory.held_results if number in results}
        return counted


def _storages(values: Iterable[Any]) -> Storages:
    return {
        number: _torch_private.StorageWeakRef(value.untyped_storage())
        for number, value in enumerate(values)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    }
