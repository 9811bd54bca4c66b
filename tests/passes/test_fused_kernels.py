"""Which nodes run as one kernel, told by what the kernels of tiny graphs read and write, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from test_node_costs import ONLY_BYTES, costs, total, trace
from torch import Tensor

from ssdtrain_fx.passes.alias_sets import find_alias_sets
from ssdtrain_fx.passes.node_costs import estimate_node_seconds
from ssdtrain_fx.testing import capture_step


def test_a_chain_reads_and_writes_once() -> None:
    """40 B in, 40 B out, in between nothing; node by node 2 + 2 + 3 passes of 40 B."""

    def function(x: Tensor) -> Tensor:
        y = x * 2
        return (y + 1) * y

    joint = trace(function, (10,))
    assert costs(joint, ONLY_BYTES) == {"mul_1": 80}
    assert costs(joint, ONLY_BYTES, fused=False) == {"mul": 80, "add": 80, "mul_1": 120}


def test_expensive_ops_add_up_in_a_group() -> None:
    """20 exps take 2 s, 2 * 40 B take 0.8 s: the longer one counts, and one empty kernel."""
    joint = trace(lambda x: x.exp().exp(), (10,))
    assert costs(joint) == {"exp_1": pytest.approx(2.5)}
    assert total(trace(lambda x: x.pow(2), (10,))) == pytest.approx(1.3)
    assert total(trace(lambda x: x.pow(2.5), (10,))) == pytest.approx(1.5)


def test_what_is_read_outside_is_written() -> None:
    """``y`` is an output too: 40 B in, twice 40 B out."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y + 1

    assert costs(trace(function, (10,)), ONLY_BYTES) == {"add": 120}


def test_an_oracle_by_hand_around_a_matrix_product() -> None:
    """
    h = mm(x, w)             x 4x4, w 4x4: 3 * 64 B
    a = relu(h + b)          group 1: reads h (64), b (16); writes a (64), which the product reads
    z = mm(a, w)             3 * 64 B
    r = z * a                group 2: reads z, a; writes r. Not group 1: a product stands between
    """

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        a = torch.relu(torch.mm(x, w) + b)
        return torch.mm(a, w) * a

    assert costs(trace(function, (4, 4), (4, 4), (4,)), ONLY_BYTES) == {
        "mm": 192,
        "relu": 64 + 16 + 64,
        "mm_1": 192,
        "mul": 192,
    }


def test_statistics_of_rows_fuse_with_the_rows() -> None:
    """A softmax over rows reads 4 * 6 floats and writes 4 * 6."""

    def function(x: Tensor) -> Tensor:
        e = (x - x.amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True)

    assert costs(trace(function, (4, 6)), ONLY_BYTES) == {"div": 2 * 96}


def test_a_sum_over_columns_is_a_pass_of_its_own() -> None:
    """96 B in and out for the product, and 96 B in, 24 B out for the sum."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y.sum(0)

    assert costs(trace(function, (4, 6)), ONLY_BYTES) == {"mul": 192, "sum_1": 120}


def test_a_pointwise_op_moves_to_its_only_reader() -> None:
    """``x * 2`` stands in front of the product, and is inlined behind it: 64 B of x, 64 B of h, 64 B out."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * 2
        return torch.mm(w, w) + y

    assert costs(trace(function, (4, 4), (4, 4)), ONLY_BYTES) == {"mm": 128, "add": 192}


def test_readers_of_one_storage_share_a_pass() -> None:
    """Two chains with nothing in common but x: 40 B in, twice 40 B out."""
    assert total(trace(lambda x: (x * 2, x + 1), (10,)), ONLY_BYTES) == 120


def test_forward_and_backward_never_share_a_group() -> None:
    """tanh: forward writes its result, backward reads it again."""
    joint = capture_step(lambda x: torch.tanh(x), torch.randn(10, requires_grad=True)).join()
    seconds = estimate_node_seconds(joint, find_alias_sets(joint.graph), ONLY_BYTES)
    marker = joint.positions()[joint.marker]
    assert sum(seconds[:marker]) == 80
    assert sum(seconds[marker:]) == 120  # tangent and result in, gradient out
