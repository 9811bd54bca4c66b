"""How long does each node take? Measured: the scheduled joint graph runs once, node by node, on its real device.

Equal calls are measured once: a model of 48 layers costs little more than one of 2. What was measured is kept in a
:class:`NodeTimes`, which serialises to JSON, so that the next compilation measures nothing.

Nothing is fused here, so for Inductor the sum is too long; see ``node_costs`` for an estimate that knows about fusion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.clocks import clock_of
from ssdtrain_fx.passes.alias_sets import AliasSets, find_alias_sets
from ssdtrain_fx.passes.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.node_costs import takes_time


class NodeTimes:
    """Seconds of calls, by op, shapes, strides, dtypes, scalars and device."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self._seconds = {} if seconds is None else seconds

    def __len__(self) -> int:
        return len(self._seconds)

    def of(self, key: str, measure: Callable[[], float]) -> float:
        """What is known for ``key``, else what ``measure`` finds."""
        if key not in self._seconds:
            self._seconds[key] = measure()
        return self._seconds[key]

    def to_json(self) -> str:
        return json.dumps(self._seconds, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> NodeTimes:
        """Inverse of :meth:`to_json`."""
        return cls(json.loads(text))


def measure_node_seconds(
    joint: ScheduledJointGraph,
    args: Sequence[Any] | None = None,
    *,
    repeats: int = 3,
    times: NodeTimes | None = None,
    cuda: Any = torch.cuda,
) -> tuple[float, ...]:
    """Seconds of every position of ``joint``: the shortest of ``repeats`` runs; 0 for inputs, views and the marker.

    Values are freed after their last use, as in training. An op that writes its arguments runs once.

    Args:
        args: what the placeholders stand for, which is written to where the graph does. None: made up from metadata,
            random numbers for floating-point tensors and zeros for all others.
        times: what is known already; what is measured is added.
    """
    timer = _Timer(joint, find_alias_sets(joint.graph), repeats, NodeTimes() if times is None else times, cuda)
    with torch.no_grad():
        timer.run(*(make_inputs(joint) if args is None else args))
    return tuple(timer.seconds)


def make_inputs(joint: ScheduledJointGraph) -> list[Any]:
    """Stand-ins for the placeholders of ``joint``, with their sizes, strides, dtypes and devices."""
    return [_stand_in(node.meta.get("val")) for node in joint.graph.find_nodes(op="placeholder")]


class _Timer(fx.Interpreter):
    def __init__(
        self, joint: ScheduledJointGraph, alias_sets: AliasSets, repeats: int, times: NodeTimes, cuda: Any
    ) -> None:
        super().__init__(joint.gm)
        self.seconds: list[float] = []
        self._alias_sets = alias_sets
        self._repeats = repeats
        self._times = times
        self._cuda = cuda

    def run_node(self, n: fx.Node) -> Any:
        if not takes_time(n, self._alias_sets):
            self.seconds.append(0.0)
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target = cast(Callable[..., Any], n.target)
        results: list[Any] = []

        def call() -> None:
            results[:] = [target(*args, **kwargs)]

        def measure() -> float:
            mutates = isinstance(target, _torch_private.OpOverload) and target._schema.is_mutable
            clock = clock_of(_device_of(n), self._cuda)
            if not mutates:
                call()
            return min(clock.seconds(call) for _ in range(1 if mutates else self._repeats))

        self.seconds.append(self._times.of(_key(n, args, kwargs), measure))
        if not results:
            call()
        return results[0]


def _device_of(node: fx.Node) -> torch.device:
    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    tensors = [leaf for leaf in _torch_private.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return max((tensor.device for tensor in tensors), key=lambda device: device.type == "cuda")


def _key(node: fx.Node, args: object, kwargs: object) -> str:
    return json.dumps([str(node.target), str(_device_of(node)), _describe(args), _describe(kwargs)])


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), str(value.device), list(value.shape), list(value.stride())]
    if isinstance(value, (tuple, list)):
        return [_describe(item) for item in cast(Sequence[Any], value)]
    if isinstance(value, dict):
        return {str(name): _describe(item) for name, item in sorted(cast(dict[str, Any], value).items())}
    return repr(value)


def _stand_in(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return _torch_private.size_hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    size, stride = (tuple(map(_torch_private.size_hint, sizes)) for sizes in (value.shape, value.stride()))
    # Outside of the mode that the metadata was traced under, whatever device it is on.
    tensor = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    return tensor.uniform_() if value.dtype.is_floating_point else tensor.zero_()
