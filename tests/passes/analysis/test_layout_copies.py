"""Copies that convolutions on a CPU need and the graph does not show."""

from __future__ import annotations

import torch
from test_node_costs import trace
from torch import Tensor

from ssdtrain_fx.passes.analysis.fused_kernels import NodeFacts
from ssdtrain_fx.passes.analysis.layout_copies import find_layout_copies
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.testing import capture_step


def copies(joint: ScheduledJointGraph) -> dict[str, tuple[str, str, int]]:
    """By name of the input: the node before which the copy is made, the last one that reads it, and its bytes."""
    nodes = list(joint.graph.nodes)
    found = NodeFacts(joint, find_alias_sets(joint.graph))
    return {
        copy.source.name: (nodes[copy.start].name, nodes[copy.end - 1].name, copy.size_bytes)
        for copy in find_layout_copies(found)
    }


def test_forward_copies_image_and_weight_for_backward() -> None:
    conv = torch.nn.Conv2d(2, 4, 3, padding=1, bias=False)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.conv2d(x, weight, padding=1).relu()

    joint = capture_step(function, torch.randn(1, 2, 8, 8), conv.weight).join()
    assert copies(joint) == {
        "primals_1": ("convolution", "convolution_backward", 4 * 2 * 8 * 8),
        "primals_2": ("convolution", "convolution_backward", 4 * 4 * 2 * 3 * 3),
    }


def test_what_is_channels_last_is_not_copied() -> None:
    image, weight = torch.randn(1, 2, 8, 8), torch.randn(4, 2, 3, 3, requires_grad=True)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.conv2d(x, weight).relu()

    joint = capture_step(function, image.to(memory_format=torch.channels_last), weight).join()
    assert copies(joint).keys() == {"primals_2"}


def test_what_is_made_in_the_graph_is_made_in_the_right_layout() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.conv2d(x * 2, weight, padding=1)

    assert copies(trace(function, (1, 2, 8, 8), (4, 2, 3, 3))).keys() == {"weight_1"}


def test_what_is_the_same_in_both_layouts_is_not_copied() -> None:
    """A weight of 1 x 1, one channel, and what has one spatial dimension only."""

    def function(x: Tensor, one: Tensor, gray: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.conv2d(x * 1, one), torch.conv2d(gray, weight)

    assert copies(trace(function, (1, 2, 8, 8), (4, 2, 1, 1), (1, 1, 8, 8), (4, 1, 3, 3))) == {}
    assert copies(trace(torch.conv1d, (1, 2, 8), (4, 2, 3))) == {}
