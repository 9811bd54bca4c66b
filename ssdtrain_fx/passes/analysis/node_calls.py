"""Which nodes to measure, as calls that can be repeated: an op, with layouts in place of tensors.

With Inductor, these are the library kernels that it does not fuse: matrix products, convolutions, attention, sorting.
Fused groups run as code that does not exist yet, so ``node_costs`` estimates them by roofline. Ops that add at indices
are estimated too, because Inductor generates their kernels. With ``aot_eager``, which runs node by node, every node is
measured.

    h = mm(x, w)    aten.mm.default [float32[8, 4] strides [4, 1] on cpu, float32[4, 4] strides [1, 4] on cpu] {}
    i = mm(h, w)    the same key: measured once

This module only reads the graph. It does not run the calls.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.accelerators import is_accelerator
from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.graph.node_facts import find_own_kernels

_NAMESPACES = ("aten", "prims")
"""Ops in these namespaces only compute, and access only their arguments. A collective would wait for other ranks, and a
custom op could do anything."""

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
    """The properties of a tensor that determine how long an op takes."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __str__(self) -> str:
        # No device index: times are stored under the name of the GPU.
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)} strides {list(self.stride)} on {self.device.type}"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of an op, with a :class:`TensorLayout` in place of each tensor and hints in place of symbolic sizes."""

    target: _torch_private.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: torch.device
    """The device that it runs on."""

    @property
    def key(self) -> str:
        """Equal for calls that take the same time; the same text in every process."""
        return f"{self.target} {_text(self.args)} {_text(self.kwargs)}"

    @property
    def name(self) -> str:
        """The op's name for messages, such as ``aten.mm``."""
        return str(self.target).removesuffix(".default")


Seconds = float | str
"""How long a call takes, or the reason why it cannot run alone."""


class Times(Protocol):
    """Looks up or measures how long calls take."""

    def of(self, calls: Sequence[Call]) -> Mapping[str, Seconds]:
        """The seconds of ``calls``, by key. The answer for a key never changes."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Unmeasured:
    """Nodes that should have been measured, but could not be."""

    op: str
    reason: str
    nodes: int


@dataclasses.dataclass(frozen=True, slots=True)
class CostSources:
    """How many node times of a graph come from which source. A fused group counts as one node."""

    measured: int = 0
    roofline: int = 0
    unmeasured: tuple[Unmeasured, ...] = ()
    """The nodes counted in ``roofline`` that should have been measured, but could not be."""
    roofline_ratio: float | None = None
    """With ``costs="steps"``, once steps were measured: how many times as long they computed as by roofline. The
    seconds of every node are multiplied by it."""

    def __str__(self) -> str:
        text = f"seconds per node: {self.measured} measured, {self.roofline} by roofline"
        if self.roofline_ratio is not None:
            text += f", times {self.roofline_ratio:.2f} as in earlier steps"
        if self.unmeasured:
            text += "; not measured: " + ", ".join(f"{one.nodes} x {one.op} ({one.reason})" for one in self.unmeasured)
        return text


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredNodes:
    """The measured nodes of a graph."""

    seconds: Mapping[fx.Node, float] = dataclasses.field(default_factory=dict[fx.Node, float])
    unmeasured: tuple[Unmeasured, ...] = ()

    def replace_in(self, joint: ScheduledJointGraph, node_s: Sequence[float]) -> tuple[float, ...]:
        """``node_s``, the seconds of every position of ``joint``, with the measured seconds where there are any."""
        return tuple(self.seconds.get(node, seconds) for node, seconds in zip(joint.graph.nodes, node_s, strict=True))

    def sources(self, node_s: Sequence[float]) -> CostSources:
        """Count the sources of ``node_s``, which :meth:`replace_in` returned."""
        taking_time = sum(seconds > 0 for seconds in node_s)
        return CostSources(len(self.seconds), taking_time - len(self.seconds), self.unmeasured)


def measure_nodes(joint: ScheduledJointGraph, alias_sets: AliasSets, times: Times, *, fused: bool) -> MeasuredNodes:
    """Request the times of all nodes that run as separate kernels from ``times``, in one call.

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
    """The call that ``node`` makes, or the reason why it must not or cannot run alone."""
    target = node.target
    if not isinstance(target, _torch_private.OpOverload):
        return "not a torch op"
    if target.namespace not in _NAMESPACES:
        return "an op that may have side effects"
    try:
        args, kwargs = cast(Any, (_describe(node.args), _describe(dict(node.kwargs))))
    except _CannotDescribeError as error:
        return str(error)
    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    devices = [leaf.device for leaf in _torch_private.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    if not devices:
        return "no tensor"
    return Call(cast(Any, target), args, kwargs, max(devices, key=is_accelerator))


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
