"""Which nodes are worth a measurement, as calls that anybody can repeat: an op, and layouts in the place of tensors.

Under Inductor these are the kernels that it takes from a library and fuses with nothing: matrix products, convolutions,
attention, sorting. Fused groups run as code that does not exist yet, so they stay on the roofline of ``node_costs``; so
does what adds at indices, for which Inductor writes kernels of its own. Node by node (``aot_eager``) it is every node.

    h = mm(x, w)    aten.mm.default [float32[8, 4] strides [4, 1] on cpu, float32[4, 4] strides [1, 4] on cpu] {}
    i = mm(h, w)    the same key: measured once

Who runs the calls is somebody else's business: this module reads the graph.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.graph.node_facts import find_own_kernels

_NAMESPACES = ("aten", "prims")
"""What these do is known: they compute, and touch nothing but their arguments. A collective would wait for other ranks,
and an op of a user could do anything."""

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.layout,
    torch.memory_format,
)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorLayout:
    """What of a tensor decides how long an op takes."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __str__(self) -> str:
        # Without the number of the device: times are kept by the name of the GPU.
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)} strides {list(self.stride)} on {self.device.type}"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of an op, with a :class:`TensorLayout` in the place of each tensor. Symbolic sizes are hints."""

    target: _torch_private.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: torch.device
    """What it runs on."""

    @property
    def key(self) -> str:
        """Equal for calls that take equally long; the same text in every process."""
        return f"{self.target} {_text(self.args)} {_text(self.kwargs)}"

    @property
    def name(self) -> str:
        """For messages: ``aten.mm``."""
        return str(self.target).removesuffix(".default")


Seconds = float | str
"""Of a call: how long it takes, or why it cannot be run alone."""


class Times(Protocol):
    """Knows, or finds out, how long calls take."""

    def of(self, calls: Sequence[Call]) -> Mapping[str, Seconds]:
        """Seconds of ``calls``, by their keys. The same key gets the same answer ever after."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Unmeasured:
    """Nodes that should have been measured."""

    op: str
    reason: str
    nodes: int


@dataclasses.dataclass(frozen=True, slots=True)
class CostSources:
    """Where the seconds of the nodes of a graph come from. A fused group counts as one node."""

    measured: int = 0
    roofline: int = 0
    unmeasured: tuple[Unmeasured, ...] = ()
    """Of ``roofline``, those that could not be measured, though they should have been."""

    def __str__(self) -> str:
        text = f"seconds per node: {self.measured} measured, {self.roofline} by roofline"
        if self.unmeasured:
            text += "; not measured: " + ", ".join(f"{one.nodes} x {one.op} ({one.reason})" for one in self.unmeasured)
        return text


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredNodes:
    """What was measured of a graph."""

    seconds: Mapping[fx.Node, float] = dataclasses.field(default_factory=dict[fx.Node, float])
    unmeasured: tuple[Unmeasured, ...] = ()

    def replace_in(self, joint: ScheduledJointGraph, node_s: Sequence[float]) -> tuple[float, ...]:
        """``node_s``, seconds of every position of ``joint``, with what was measured instead of the roofline."""
        return tuple(self.seconds.get(node, seconds) for node, seconds in zip(joint.graph.nodes, node_s, strict=True))

    def sources(self, node_s: Sequence[float]) -> CostSources:
        """What :meth:`replace_in` returned, counted."""
        taking_time = sum(seconds > 0 for seconds in node_s)
        return CostSources(len(self.seconds), taking_time - len(self.seconds), self.unmeasured)


def measure_nodes(joint: ScheduledJointGraph, alias_sets: AliasSets, times: Times, *, fused: bool) -> MeasuredNodes:
    """Ask ``times`` for all nodes that are kernels of their own, at once.

    Args:
        fused: False for ``inner="aot_eager"``, which runs node by node.
    """
    calls = {node: describe_call(node) for node in find_own_kernels(joint, alias_sets, fused=fused)}
    seconds = times.of([call for call in calls.values() if isinstance(call, Call)])
    measured: dict[fx.Node, float] = {}
    reasons: collections.Counter[tuple[str, str]] = collections.Counter()
    for node, call in calls.items():
        found = seconds[call.key] if isinstance(call, Call) else call
        if isinstance(found, str):
            name = call.name if isinstance(call, Call) else str(node.target).removesuffix(".default")
            reasons[name, found] += 1
        else:
            measured[node] = found
    return MeasuredNodes(measured, tuple(Unmeasured(op, reason, nodes) for (op, reason), nodes in reasons.items()))


def describe_call(node: fx.Node) -> Call | str:
    """The call that ``node`` makes, or why it must not or cannot be made by itself."""
    target = node.target
    if not isinstance(target, _torch_private.OpOverload):
        return "no op of torch"
    if target.namespace not in _NAMESPACES:
        return "an op that may do more than compute"
    try:
        args, kwargs = cast(Any, (_describe(node.args), _describe(dict(node.kwargs))))
    except _CannotDescribeError as error:
        return str(error)
    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    devices = [leaf.device for leaf in _torch_private.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    if not devices:
        return "no tensor"
    return Call(cast(Any, target), args, kwargs, max(devices, key=lambda device: device.type == "cuda"))


class _CannotDescribeError(Exception):
    pass


def _describe(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise _CannotDescribeError(f"a tensor of layout {value.layout}")
        return TensorLayout(value.dtype, value.device, _hints(value.shape), _hints(value.stride()))
    if isinstance(value, torch.SymInt):
        return _hints([value])[0]
    if isinstance(value, (tuple, list)):
        return tuple(_describe(item) for item in cast(Sequence[Any], value))
    if isinstance(value, dict):
        return {name: _describe(item) for name, item in cast(dict[str, Any], value).items()}
    if isinstance(value, (*_PLAIN, torch.device)):
        return value
    raise _CannotDescribeError(f"an argument of type {type(value).__name__}")


def _hints(sizes: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    try:
        return tuple(map(_torch_private.size_hint, sizes))
    except ValueError:
        raise _CannotDescribeError("a size that depends on data") from None


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, cast(Sequence[Any], value)))}]"
    if isinstance(value, dict):
        items = sorted(cast(dict[str, Any], value).items())
        return f"{{{', '.join(f'{name}={_text(item)}' for name, item in items)}}}"
    if isinstance(value, torch.device):
        return value.type
    return str(value) if isinstance(value, TensorLayout) else repr(value)
