"""The step that plain Inductor would compile, which tells how the rewritten step has to be computed on a CPU.

See ``_torch_private.inductor_loops`` for the reasons.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

from ssdtrain_fx._torch_private import size_expression
from ssdtrain_fx._torch_private.inductor_loops import LAYOUT_OF_RESULTS, PLAIN_NODE, LoopChoices, choosing_loops

log = logging.getLogger(__name__)


class _Half(NamedTuple):
    """One half of a step, and the arguments of ``compile_fx_inner`` that the rewritten half is compiled with."""

    name: str
    plain: fx.GraphModule
    example_inputs: Sequence[Any]
    keywords: Mapping[str, Any]


class PlainStep:
    """Both halves of a step as Inductor's partitioner returns them. Inductor rewrites them when they are lowered.

    They are lowered when Inductor generates code for a rewritten half, not if its code comes from a cache.
    """

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        self._halves = {"forward": forward, "backward": backward}
        self._unrecorded: list[_Half] = []
        self._loops = LoopChoices(self._record)
        self._stride_by_saved: dict[str, tuple[Any, ...]] = {}
        text = "\n".join(half.print_readable(print_output=False, include_stride=True) for half in (forward, backward))
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        """Of both graphs: how the rewritten graphs are computed depends on them."""

    @staticmethod
    def mark(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """Note in the metadata of all nodes, which are copied to the rewritten graphs, which nodes they are here."""
        for half, gm in (("forward", forward), ("backward", backward)):
            for node in gm.graph.nodes:
                node.meta[PLAIN_NODE] = f"{half} {node.name}"

    @contextmanager
    def computing_alike(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Generator[None]:
        """Compile the rewritten half ``gm`` in this block; arguments as for ``compile_fx_inner``. Forward is first."""
        half = "backward" if kwargs.get("is_backward") else "forward"
        plain = self._halves.pop(half, None)
        if plain is not None:
            results = gm.graph.output_node().meta
            if LAYOUT_OF_RESULTS in results:
                plain.graph.output_node().meta[LAYOUT_OF_RESULTS] = results[LAYOUT_OF_RESULTS]
            self._unrecorded.append(_Half(half, plain, example_inputs, kwargs))
        with choosing_loops(self._loops):
            yield
        if self._loops.missed:
            log.info(
                "the last bits of %s may differ from plain Inductor's: it computes them in other loops, which the "
                "rewritten graph does not have",
                ", ".join(sorted(self._loops.missed)),
            )
            self._loops.missed.clear()
        if half == "backward":
            self._unrecorded.clear()

    def _record(self) -> None:
        """Record both halves up to the one that is being compiled: backward may compute nodes of forward again."""
        while self._unrecorded:
            half = self._unrecorded.pop(0)
            outputs: Any = half.plain.graph.output_node().args[0]
            if half.name == "backward":
                inputs = self._inputs_of_backward(half.plain)
            else:
                inputs = [*_effect_tokens(half.plain, len(half.example_inputs)), *half.example_inputs]
            try:
                strides = self._loops.record(half.plain, inputs, **half.keywords)
            except Exception:  # the step can be compiled without
                log.warning(
                    "the last bits of gradients may differ from plain Inductor's, because its %s graph could not be "
                    "scheduled. This is a bug; training goes on.",
                    half.name,
                    exc_info=True,
                )
                continue
            saved = zip(outputs, strides, strict=False)  # no strides of a graph without kernels
            self._stride_by_saved = {
                node.name: stride for node, stride in saved if node is not None and stride is not None
            }

    def _inputs_of_backward(self, backward: fx.GraphModule) -> list[Any]:
        """What backward gets, with the strides that forward really gives to what it saves."""
        inputs: list[Any] = []
        for node in backward.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            stride = self._stride_by_saved.get(node.name)
            if stride is not None and isinstance(value, torch.Tensor) and _differ(value.stride(), stride):
                value = value.as_strided(value.size(), stride)
            inputs.append(value)
        return inputs


def _effect_tokens(forward: fx.GraphModule, input_count: int) -> list[Any]:
    """The tokens that order ops with side effects. They come first, and AOTAutograd has removed them from the rewritten
    graph."""
    placeholders = forward.graph.find_nodes(op="placeholder")
    return [node.meta["val"] for node in placeholders[: len(placeholders) - input_count]]


def _differ(one: Sequence[int | torch.SymInt], other: Sequence[int | torch.SymInt]) -> bool:
    return [size_expression(number) for number in one] != [size_expression(number) for number in other]
