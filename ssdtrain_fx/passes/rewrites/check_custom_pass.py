"""Check the graph that a user's pass returns.

The checks cover what later passes and AOTAutograd rely on:

- it is a well-formed ``ScheduledJointGraph`` with one ``backward_starts()``
- it takes the same arguments, and returns the same number of outputs and gradients with the same shapes, dtypes and
  devices
- no node in forward reads an input that exists only in backward, such as a tangent
- new nodes have ``meta["val"]``, which gives their storages and sizes

They do not cover whether the graph still computes the same. :mod:`ssdtrain_fx.testing` tests that.
"""

from __future__ import annotations

import dataclasses
from typing import NoReturn

import torch
from torch import fx

from ssdtrain_fx.errors import PassError
from ssdtrain_fx.function_names import display_name
from ssdtrain_fx.passes.graph.joint_graph import JointPass, ScheduledJointGraph, backward_starts, find_saved


def checked(custom_pass: JointPass) -> JointPass:
    """``custom_pass``, which raises PassError where it returns a graph that cannot be compiled.

    The message names the pass and the node. ``saved`` of the returned graph is what backward reads.
    """

    def run(joint: ScheduledJointGraph) -> ScheduledJointGraph:
        before = _Interface.of(joint)
        without_value = {node for node in joint.graph.nodes if "val" not in node.meta}
        returned = custom_pass(joint)
        if not isinstance(returned, ScheduledJointGraph):  # pyright: ignore[reportUnnecessaryIsInstance]
            _fail(custom_pass, f"returned {returned!r}; expected a ScheduledJointGraph")
        return _check(custom_pass, returned, before, without_value)

    return run


@dataclasses.dataclass(frozen=True, slots=True)
class _Interface:
    """The arguments and results of a joint graph, as text."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]

    @classmethod
    def of(cls, joint: ScheduledJointGraph) -> _Interface:
        inputs = [f"{node.name} {_describe(node)}" for node in joint.graph.find_nodes(op="placeholder")]
        outputs, gradients = (map(_describe, values) for values in (joint.forward_outputs, joint.gradients))
        return cls(tuple(inputs), tuple(outputs), tuple(gradients))


def _check(
    custom_pass: JointPass, joint: ScheduledJointGraph, before: _Interface, without_value: set[fx.Node]
) -> ScheduledJointGraph:
    markers = joint.graph.find_nodes(op="call_function", target=backward_starts)
    if len(markers) != 1:
        _fail(custom_pass, f"returned a graph with {len(markers)} backward_starts(); expected one")
    try:
        joint.graph.lint()
    except (RuntimeError, ValueError) as error:
        _fail(custom_pass, f"returned a graph that is not well-formed: {error}")
    after = _Interface.of(joint)
    for what in ("inputs", "outputs", "gradients"):
        found, expected = getattr(after, what), getattr(before, what)
        if found != expected:
            _fail(custom_pass, f"changed the {what} to {list(found)}; expected {list(expected)}")
    in_forward = True
    for node in joint.graph.nodes:
        in_forward = in_forward and node is not markers[0]
        if node.op not in ("call_function", "output"):
            continue
        foreign = set(node.all_input_nodes).intersection(joint.backward_inputs)
        if in_forward and foreign:
            _fail(
                custom_pass, f"makes {node.name} in forward read {', '.join(map(str, foreign))}, an input of backward"
            )
        if "val" not in node.meta and node not in without_value and node.op == "call_function":
            _fail(
                custom_pass, f"left {node.name} without meta['val']; set it to the value of the node that it replaces"
            )
    joint.gm.recompile()
    return dataclasses.replace(joint, saved=find_saved(joint))


def _describe(value: object) -> str:
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {[str(size) for size in value.shape]} on {value.device}"
    return str(value) if value is None or isinstance(value, (int, float)) else type(value).__name__


def _fail(custom_pass: JointPass, message: str) -> NoReturn:
    raise PassError(f"Custom pass {display_name(custom_pass)} {message}.")
