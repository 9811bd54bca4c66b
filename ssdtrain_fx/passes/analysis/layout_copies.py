"""Copies of graph inputs that Inductor makes because convolutions on a CPU take their arguments channels-last.

The caller's image and weights are contiguous. Forward copies each into the other layout, and backward gets the copy
instead of the input. So an input that counts as the caller's memory is in memory twice:

    0  x, w                      inputs, contiguous
    1  y = convolution(x, w)     copies of x and w [1, 9)
       ...
    8  convolution_backward(dy, x, w)

The rule is that of ``GraphLowering.decide_layout_opt`` in torch/_inductor/graph.py, as of torch 2.13.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from ssdtrain_fx.passes.analysis.fused_kernels import NodeFacts
from ssdtrain_fx.passes.graph.tensor_sizes import hint, shape_of, touched_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutCopy:
    """A copy of ``source``, which is in memory while the nodes at positions ``start <= p < end`` run."""

    source: fx.Node
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return touched_bytes(self.source.meta["val"])


def find_layout_copies(found: NodeFacts) -> tuple[LayoutCopy, ...]:
    """The copies of one graph, by the first convolution that takes them."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return ()
    spans: dict[fx.Node, tuple[int, int]] = {}
    for position, fact in enumerate(found.facts):
        if fact.convolves and fact.device_type == "cpu":
            for source in fact.node.all_input_nodes:
                if source.op == "placeholder" and _is_copied(source.meta["val"]):
                    start, _ = spans.get(source, (position, 0))
                    spans[source] = start, position + 1
    return tuple(LayoutCopy(source, start, end) for source, (start, end) in spans.items())


def _is_copied(value: Any) -> bool:
    """Is it an image or a weight with two spatial dimensions that is not channels-last?"""
    shape = shape_of(value)
    return len(shape) == 4 and shape[1] > 1 and hint(value.stride(1)) != 1
