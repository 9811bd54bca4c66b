"""Which nodes run as one kernel. The bytes that kernels of tiny graphs read and write are calculated by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from test_node_costs import ONLY_BYTES, costs, total, trace
from torch import Tensor

from ssdtrain_fx.passes.analysis.fused_kernels import FusedKernel, NodeFacts, find_fused_kernels
from ssdtrain_fx.passes.analysis.node_costs import estimate_node_seconds
from ssdtrain_fx.passes.graph.alias_sets import AliasSets, find_alias_sets
from ssdtrain_fx.testing import capture_step


def test_a_chain_reads_and_writes_once() -> None:
    """Fused: 40 B in, 40 B out, nothing between. Node by node: 2 + 2 + 3 passes of 40 B."""

    def function(x: Tensor) -> Tensor:
        y = x * 2
        return (y + 1) * y

    joint = trace(function, (10,))
    assert costs(joint, ONLY_BYTES) == {"mul_1": 80}
    assert costs(joint, ONLY_BYTES, fused=False) == {"mul": 80, "add": 80, "mul_1": 120}


def test_expensive_ops_add_up_in_a_group() -> None:
    """20 exps take 2 s and 2 * 40 B take 0.8 s. The longer time counts, plus one empty kernel."""
    joint = trace(lambda x: x.exp().exp(), (10,))
    assert costs(joint) == {"exp_1": pytest.approx(2.5)}
    assert total(trace(lambda x: x.pow(2), (10,))) == pytest.approx(1.3)
    assert total(trace(lambda x: x.pow(2.5), (10,))) == pytest.approx(1.5)


def test_what_is_read_outside_is_written() -> None:
    """``y`` is also an output: 40 B in, 2 * 40 B out."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y + 1

    assert costs(trace(function, (10,)), ONLY_BYTES) == {"add": 120}


def test_an_oracle_by_hand_around_a_matrix_product() -> None:
    """
    h = mm(x, w)             x 4x4, w 4x4: 3 * 64 B
    a = relu(h + b)          group 1: reads h (64), b (16); writes a (64), which the product reads
    z = mm(a, w)             3 * 64 B
    r = z * a                group 2: reads z, a; writes r. Not group 1: a product runs between
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


def test_a_sum_over_columns_is_a_separate_pass() -> None:
    """96 B in and out for the product, and 96 B in, 24 B out for the sum."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y.sum(0)

    assert costs(trace(function, (4, 6)), ONLY_BYTES) == {"mul": 192, "sum_1": 120}


def test_a_pointwise_op_moves_to_its_only_reader() -> None:
    """``x * 2`` is before the product in the graph, and is inlined after it: 64 B of x, 64 B of h, 64 B out."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * 2
        return torch.mm(w, w) + y

    assert costs(trace(function, (4, 4), (4, 4)), ONLY_BYTES) == {"mm": 128, "add": 192}


def test_readers_of_one_storage_share_a_pass() -> None:
    """Two chains that share only x: 40 B in, 2 * 40 B out."""
    assert total(trace(lambda x: (x * 2, x + 1), (10,)), ONLY_BYTES) == 120


def test_forward_and_backward_never_share_a_group() -> None:
    """tanh: forward writes its result, backward reads it again."""
    joint = capture_step(lambda x: torch.tanh(x), torch.randn(10, requires_grad=True)).join()
    seconds = estimate_node_seconds(joint, find_alias_sets(joint.graph), ONLY_BYTES)
    marker = joint.positions()[joint.marker]
    assert sum(seconds[:marker]) == 80
    assert sum(seconds[marker:]) == 120  # tangent and result in, gradient out


def kernels_of(function: Callable[..., object], *shapes: Sequence[int]) -> list[tuple[str, FusedKernel, AliasSets]]:
    """Each kernel, and the name of the node at which it runs."""
    joint = trace(function, *shapes)
    alias_sets = find_alias_sets(joint.graph)
    nodes = list(joint.graph.nodes)
    return [(nodes[one.runs_at].name, one, alias_sets) for one in find_fused_kernels(NodeFacts(joint, alias_sets))]


def names(alias_sets: AliasSets, storages: Iterable[int]) -> set[str]:
    return {alias_sets.storages[idx].allocator.name for idx in storages}


def test_a_kernel_runs_where_its_first_result_is_needed() -> None:
    """Both results are computed from both inputs, so they are one kernel, although ``add`` is needed later."""

    def function(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        p, q = x @ w, y @ w
        a, b = p * q, p + q
        return w @ w, a @ w, b @ w

    [(at, kernel, alias_sets)] = kernels_of(function, (4, 4), (4, 4), (4, 4))
    assert at == "mm_3", "not at mul or add, and not at mm_2, which reads neither"
    assert [names(alias_sets, result.reads) for result in kernel.results] == [{"mm", "mm_1"}] * 2
    assert names(alias_sets, kernel.writes) == {"mul", "add"}


def test_what_only_one_kernel_makes_and_reads_reaches_no_memory() -> None:
    """Lowering stores the sum of the rows, but fusion takes it out of memory again."""

    def function(x: Tensor) -> Tensor:
        return x / x.sum(-1, keepdim=True)

    [(_, kernel, alias_sets)] = kernels_of(function, (4, 6))
    assert names(alias_sets, kernel.writes) == {"div"}
    assert names(alias_sets, kernel.results[0].reads) == {"x_1"}


def test_on_a_cpu_the_kernels_between_two_products_are_one_function() -> None:
    """The sum of the columns and the scaled tensor iterate over different things, so they are two kernels."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        p = x @ w
        s = p * 2
        return s.sum(0), s.view(2, 2, 4).view(4, 4) @ w

    (first, of_sum, _), (second, of_product, _) = kernels_of(function, (4, 4), (4, 4))
    assert (first, second) == ("sum_1", "mm_1")
    for kernel in (of_sum, of_product):
        assert (kernel.begins_at, kernel.ends_at) == (of_sum.runs_at, of_product.runs_at)
