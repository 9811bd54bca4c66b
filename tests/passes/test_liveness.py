"""Live intervals and memory profiles: what is predicted is what a run of the graph holds, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from ssdtrain_fx.passes.alias_sets import find_alias_sets
from ssdtrain_fx.passes.liveness import MemoryProfile, find_live_intervals, memory_profile
from ssdtrain_fx.passes.op_targets import OFFLOAD, RELEASE, RELOAD, WAIT


class StorageCounter(fx.Interpreter):
    """Runs a graph on real tensors and asks the allocator's side of things which storages exist at every node.

    It holds weak references to storages only, so what it counts is what is really alive. Storages of inputs are left
    out. A reloaded tensor hides in the runtime between reload and wait; it counts from its reload on.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.live_bytes: list[int] = []
        """At every position."""
        self.token_bytes: list[int] = []
        """The part of it that tokens and tickets take."""
        self._inputs: set[int] = set()
        self._sizes: dict[int, tuple[StorageWeakRef, int, bool]] = {}
        self._returning: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in ("placeholder", "get_attr"):
            self._inputs |= {StorageWeakRef(storage).cdata for storage in _storages(result)}
        self._sizes = {key: entry for key, entry in self._sizes.items() if not entry[0].expired()}
        for storage in _storages(result):
            reference = StorageWeakRef(storage)
            if reference.cdata not in self._inputs:
                is_token = n.target in (OFFLOAD, RELEASE, RELOAD)
                self._sizes.setdefault(reference.cdata, (reference, storage.nbytes(), is_token))
        if n.target is RELOAD:
            _, size, _, dtype, _ = n.args
            assert isinstance(size, (list, tuple)) and isinstance(dtype, torch.dtype)
            numbers = [self.env[number] if isinstance(number, fx.Node) else number for number in size]
            self._returning[n] = torch.Size(numbers).numel() * dtype.itemsize
        if n.target is WAIT:
            self._returning.pop(n.all_input_nodes[0])
        self.live_bytes.append(sum(size for _, size, _ in self._sizes.values()) + sum(self._returning.values()))
        self.token_bytes.append(sum(size for _, size, is_token in self._sizes.values() if is_token))
        return result if n.users or n.op == "output" else None


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf.untyped_storage()


def measure(gm: fx.GraphModule, args: list[Any]) -> StorageCounter:
    counter = StorageCounter(gm)
    held = list(args)  # the caller holds its inputs
    counter.run(*held)
    return counter


def predict(graph: fx.Graph) -> MemoryProfile:
    intervals = find_live_intervals(graph, find_alias_sets(graph))
    return memory_profile(intervals.values(), len(graph.nodes))
