"""Run a graph node by node on real tensors, and measure the storages that are alive."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, RELEASE, RELOAD, WAIT


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Bytes that are allocated while each node runs, in graph order, without the storages of the graph's inputs."""

    live_bytes: tuple[int, ...]
    """All bytes. A reloaded tensor counts from its ``reload`` on."""
    token_bytes: tuple[int, ...]
    """The bytes of tokens and tickets, 8 each. They are included in ``live_bytes``, but plans do not count them."""


def run(gm: fx.GraphModule, args: Sequence[Any]) -> Any:
    """Run ``gm`` node by node on copies of the arguments, always with the same random numbers."""
    return _run(fx.Interpreter(gm), args)


def measure_memory(gm: fx.GraphModule, args: Sequence[Any]) -> MeasuredMemory:
    """Run as ``run`` does, and measure at every node which storages are alive.

    This is an oracle for ``ssdtrain_fx.passes.analysis.liveness`` and shares no code with it: it checks weak references
    to real storages and does not analyse the graph.
    """
    counter = _StorageCounter(gm)
    _run(counter, args)
    return MeasuredMemory(tuple(counter.live_bytes), tuple(counter.token_bytes))


def copies(values: Sequence[Any]) -> list[Any]:
    """Copy tensors and keep their strides. Graphs write into some of their inputs, so each run needs copies."""
    return [value.detach().clone() if isinstance(value, Tensor) else value for value in values]


def _run(interpreter: fx.Interpreter, args: Sequence[Any]) -> Any:
    held = copies(args)  # a caller also holds its arguments
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return interpreter.run(*held)


class _StorageCounter(fx.Interpreter):
    """Holds only weak references to storages, so it keeps no storage alive."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.live_bytes: list[int] = []
        self.token_bytes: list[int] = []
        self._inputs: set[int] = set()
        self._sizes: dict[int, tuple[_torch_private.StorageWeakRef, int, bool]] = {}
        self._returning: dict[fx.Node, int] = {}
        """Bytes of reloaded tensors that the runtime holds between reload and wait, by reload node."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in ("placeholder", "get_attr"):
            self._inputs |= {_torch_private.StorageWeakRef(storage).cdata for storage in _storages(result)}
        self._sizes = {key: entry for key, entry in self._sizes.items() if not entry[0].expired()}
        for storage in _storages(result):
            reference = _torch_private.StorageWeakRef(storage)
            key = cast(int, reference.cdata)
            if key not in self._inputs:
                is_token = n.target in (OFFLOAD, RELEASE, RELOAD)
                self._sizes.setdefault(key, (reference, storage.nbytes(), is_token))
        if n.target is RELOAD:
            arguments, _ = self.fetch_args_kwargs_from_env(n)
            _, size, _, dtype, _ = cast("tuple[Any, list[int], Any, torch.dtype, Any]", arguments)
            self._returning[n] = math.prod(size) * dtype.itemsize
        if n.target is WAIT:
            self._returning.pop(n.all_input_nodes[0])
        self.live_bytes.append(sum(size for _, size, _ in self._sizes.values()) + sum(self._returning.values()))
        self.token_bytes.append(sum(size for _, size, is_token in self._sizes.values() if is_token))
        return result if n.users or n.op == "output" else None


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in _torch_private.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf.untyped_storage()
