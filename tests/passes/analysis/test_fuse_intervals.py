"""How fusion changes live intervals, on graphs small enough to check by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ssdtrain_fx.passes.analysis.fuse_intervals import find_reads, fuse_intervals
from ssdtrain_fx.passes.analysis.fused_kernels import NodeFacts, find_fused_kernels
from ssdtrain_fx.passes.analysis.liveness import LiveInterval, find_live_intervals
from ssdtrain_fx.testing import GraphAnalysis, analyse, capture_step, capture_toy, named


def chain(x: Tensor, w: Tensor) -> Tensor:
    """One kernel between two products. It fuses ``mul``, ``tanh`` and ``add``, and only ``add`` reaches memory."""
    h = x @ w
    return ((h * 2).tanh() + 1) @ w


def one_op(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh() @ w


def intervals(
    analysis: GraphAnalysis, *, for_gpu: bool = False
) -> tuple[dict[int, LiveInterval], dict[int, LiveInterval]]:
    """Intervals by storage, without and with fusion."""
    found = NodeFacts(analysis.joint, analysis.alias_sets, for_gpu=for_gpu)
    kernels = find_fused_kernels(found)
    fused = fuse_intervals(analysis.joint.graph, analysis.alias_sets, found, kernels, find_reads(found, kernels))
    return find_live_intervals(analysis.joint.graph, analysis.alias_sets), fused


def fused(
    function: Callable[..., Tensor | tuple[Tensor, ...]] = chain, *, requires_grad: bool = False, for_gpu: bool = False
) -> tuple[dict[str, LiveInterval], dict[str, LiveInterval]]:
    """Intervals by the name of the allocator, without and with fusion."""
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=requires_grad)
    analysis = analyse(capture_step(function, x, w))
    storages = analysis.alias_sets.storages
    both = intervals(analysis, for_gpu=for_gpu)
    before, after = ({storages[idx].allocator.name: interval for idx, interval in each.items()} for each in both)
    return before, after


def test_what_lives_in_one_kernel_reaches_no_memory() -> None:
    before, after = fused()
    assert {"mm", "mul", "tanh", "add", "mm_1"} <= before.keys()
    assert "mul" not in after, "made and read in one kernel"
    assert {"mm", "tanh", "mm_1"} <= after.keys(), "tanh is saved for backward"


def test_a_result_takes_over_the_memory_of_an_argument_that_dies() -> None:
    """``tanh`` is written in place of ``mm``, which is not read again, so they are never live together."""
    before, after = fused(one_op)
    assert before["mm"].end > after["mm"].end == after["tanh"].start


def test_what_is_read_again_is_not_overwritten() -> None:
    """With a gradient for ``w``, backward reads ``add``, so it is in memory until then."""
    before, after = fused(requires_grad=True)
    assert after["add"].end == before["add"].end


def shared_bias(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The sum runs before the product that needs ``mul`` in memory, so it recomputes ``mul`` from ``mm``."""
    s = (x @ w) * 2
    return s.sum(0), s.view(2, 2, 4).view(4, 4) @ w


def test_what_is_stored_later_takes_over_what_a_sum_has_read() -> None:
    before, after = fused(shared_bias)
    assert before["mm"].end == before["mul"].start + 1
    assert after["mm"].end == after["mul"].start == after["sum_1"].start, "one function of a CPU"


def read_by_two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """One kernel makes two results from ``mm``. Backward reads ``tanh`` alone."""
    p = x @ w
    return p.tanh(), p + 1


def test_what_two_results_read_is_not_overwritten() -> None:
    _, after = fused(read_by_two)
    assert after["tanh"].start == after["add"].start
    assert after["mm"].end == after["tanh"].start + 1


def smaller(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ w) > 0, x.tanh()


def test_a_smaller_result_takes_over_nothing() -> None:
    _, after = fused(smaller)
    assert after["mm"].end > after["gt"].start


def two_kernels(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The second kernel does not read ``mm``, but on a CPU both are one function."""
    return (x @ w).sum(0), (x * 2).view(2, 2, 4).view(4, 4) @ w


def test_an_argument_lives_as_long_as_the_function_runs() -> None:
    before, after = fused(two_kernels)
    assert after["mm"].end == after["mm_1"].start + 1 > before["mm"].end


def residual(x: Tensor, w: Tensor) -> Tensor:
    """The second sum is computed from the terms of the first one, which is never stored."""
    h = x @ w
    s = h + x
    return s + (s.relu() @ w)


def test_a_sum_that_is_not_stored_keeps_its_terms_in_memory() -> None:
    before, after = fused(residual)
    assert "add" in before and "add" not in after
    assert after["mm"].end == before["add"].end > before["mm"].end


def concatenated(x: Tensor, w: Tensor) -> Tensor:
    """Each argument of ``cat`` is half as large as its result, which is as large as ``mm``."""
    one, other = (x @ w).split(2, dim=1)
    return torch.cat((other * 2, one + 1), dim=1).exp() @ w


def test_on_a_cpu_the_parts_of_a_concatenation_are_written_into_it() -> None:
    """The arguments reach no memory. The result does, and takes nothing over from ``mm``."""
    _, after = fused(concatenated)
    assert {"mm", "cat"} <= after.keys()
    assert after.keys().isdisjoint(("mul", "add"))
    assert after["mm"].end == after["cat"].end > after["cat"].start + 1, "both are arguments of one function"


def test_planned_for_a_gpu_a_concatenation_of_cpu_tensors_is_one_kernel() -> None:
    _, after = fused(concatenated, for_gpu=True)
    assert after.keys().isdisjoint(("mul", "add", "cat"))
    assert after["mm"].end == after["exp"].start, "exp is written in its place"


def test_all_that_is_held_reaches_memory() -> None:
    for name in ("mlp", "attention", "norms", "deep"):
        analysis = analyse(capture_toy(name))
        plain, after = intervals(analysis)
        assert after.keys() <= plain.keys()
        end = len(analysis.joint.graph.nodes)
        for interval in after.values():
            assert 0 <= interval.start < interval.end <= end
        for node in (*analysis.joint.saved, *analysis.joint.graph.output_node().all_input_nodes):
            for idx in analysis.alias_sets.by_node[node]:
                assert (idx in after) == (idx in plain), f"{named(analysis.joint.graph, node.name)} is held"
