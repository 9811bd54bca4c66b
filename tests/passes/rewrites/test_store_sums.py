"""Sums over many layers are stored at their position."""

from __future__ import annotations

import pytest
import torch
from graphs import matrix
from torch import Tensor

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.analysis.fused_kernels import NodeFacts, find_fused_kernels
from ssdtrain_fx.passes.analysis.stored_results import STORED
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.rewrites.store_sums import WAITS_FOR_KERNELS, store_sums
from ssdtrain_fx.testing import capture_step


def read_by_all(x: Tensor, c: Tensor, w: Tensor, *, layers: int = 4, products: int = WAITS_FOR_KERNELS // 2) -> Tensor:
    """Every layer reads ``c.sin()`` in a product, after ``products`` others. Each of these has two in backward."""
    read = c.sin()
    for _ in range(layers):
        for _ in range(products):
            x = (x @ w).tanh()
        x = x * (read @ w)
    return x.sum()


def joint_of(function: object = read_by_all, *, dtype: torch.dtype = torch.float32) -> ScheduledJointGraph:
    assert callable(function)
    return capture_step(function, *(matrix(4, 4, dtype=dtype) for _ in range(3))).join()


def marked(joint: ScheduledJointGraph) -> list[str]:
    store_sums(joint)
    nodes = [node for node in joint.graph.nodes if STORED in node.meta]
    assert all(node.meta[_torch_private.REALIZE_TO_STRIDES] for node in nodes)
    return [node.name for node in nodes]


def gradients_of_what_is_read(joint: ScheduledJointGraph) -> list[str]:
    """The sums of gradients. The last one is multiplied by the cosine."""
    (last,) = [node for node in joint.graph.nodes if str(node.target) == "aten.cos.default"]
    (user,) = last.users
    (node,) = [argument for argument in user.all_input_nodes if argument is not last]
    found: list[str] = []
    while str(node.target) == "aten.add.Tensor":
        found.insert(0, node.name)
        node = node.all_input_nodes[0]
    return found


def test_a_sum_that_waits_for_a_layer_is_marked() -> None:
    joint = joint_of()
    sums = gradients_of_what_is_read(joint)
    assert len(sums) == 3
    assert marked(joint) == sums, "the last one is multiplied after the backward of the first layer"


def test_a_marked_sum_is_no_part_of_the_kernel_that_reads_it() -> None:
    joint = joint_of()
    alias_sets = find_alias_sets(joint.graph)

    def stored() -> set[str]:
        kernels = find_fused_kernels(NodeFacts(joint, alias_sets))
        return {alias_sets.storages[idx].allocator.name for kernel in kernels for idx in kernel.writes}

    before = stored()
    *names, _ = marked(joint)  # the last one is multiplied as soon as its terms are computed
    assert names
    assert not before.intersection(names)
    assert stored().issuperset(names)


def test_what_is_added_up_within_a_layer_is_left_alone() -> None:
    def function(x: Tensor, c: Tensor, w: Tensor) -> Tensor:
        return read_by_all(x, c, w, products=1)

    assert marked(joint_of(function)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_inductor_adds_up_in_a_wider_type_is_left_alone(dtype: torch.dtype) -> None:
    assert marked(joint_of(dtype=dtype)) == []


def test_sums_of_float32_are_left_alone_in_a_graph_with_16_bit_values() -> None:
    """Storing a sum would change what is read by the loop of its reader, and with it the width of the vectors."""

    def function(x: Tensor, c: Tensor, w: Tensor) -> Tensor:
        return read_by_all(x, c, w) + x.bfloat16().abs().sum()

    joint = joint_of(function)
    assert len(gradients_of_what_is_read(joint)) == 3
    assert marked(joint) == []


def test_a_sum_whose_terms_live_on_is_left_alone() -> None:
    """The sum would be an additional tensor in memory."""

    def function(x: Tensor, c: Tensor, w: Tensor) -> Tensor:
        read = c.sin()
        for _ in range(4):
            for _ in range(WAITS_FOR_KERNELS // 2):
                x = (x @ w).tanh()
            x = x + read  # the gradient of ``read`` is that of ``x``, which goes on
        return x.sum()

    joint = joint_of(function)
    assert len(gradients_of_what_is_read(joint)) == 3
    assert marked(joint) == []
