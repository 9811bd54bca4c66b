"""A kernel that reads a buffer runs after the kernel that adds to it, however Inductor fuses the two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.scheduler import SchedulerNode

from ssdtrain_fx._torch_private.inductor_mutations import keeping_writers_in_front


def scatter(x: Tensor, index: Tensor) -> Tensor:
    sums = torch.zeros(16, 8).index_add(0, index, x.tanh())
    return (sums / 2).exp()


class Recomputed:
    """Before kernels are fused, computes the loops of each again, as Inductor does for some of them."""

    def __init__(self) -> None:
        self.names: list[tuple[set[str], set[str]]] = []
        """Of the buffers that a reader of a written buffer depends on: before and after."""

    def __call__(self, nodes: Sequence[Any]) -> Sequence[Any]:
        for node in nodes:
            if isinstance(node, SchedulerNode) and node.mutation_renames:
                before = {dep.name for dep in node.read_writes.reads}
                node.recompute_size_and_body()
                self.names.append((before, {dep.name for dep in node.read_writes.reads}))
        return nodes


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("options", [{"policy": "all", "min_tensor_bytes": 0}, {"max_slowdown": 0.0}])
def test_a_kernel_still_depends_on_the_writer_when_its_loops_are_computed_again(
    ssd_dir: str, options: dict[str, Any]
) -> None:
    recomputed = Recomputed()
    x, index = torch.randn(32, 8, requires_grad=True), torch.arange(32) % 16
    expected = scatter(x, index)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), x)
    with config.patch(_pre_fusion_custom_pass=recomputed, fx_graph_cache=False):
        compiled = torch.compile(scatter, backend="ssdtrain", options={**options, "ssd_dir": ssd_dir})
        result = compiled(x, index)
        (gradient,) = torch.autograd.grad(result.sum(), x)
    assert recomputed.names
    assert all(before == after for before, after in recomputed.names)
    torch.testing.assert_close((result, gradient), (expected, expected_gradient))


def test_plain_inductor_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled without this backend is scheduled as if the package were not there."""

    def names() -> list[tuple[set[str], set[str]]]:
        recomputed = Recomputed()
        torch._dynamo.reset()
        with config.patch(_pre_fusion_custom_pass=recomputed, fx_graph_cache=False):
            torch.compile(scatter)(torch.ones(32, 8), torch.arange(32) % 16)
        return recomputed.names

    with keeping_writers_in_front():
        kept = names()
    assert kept and all(before == after for before, after in kept)
    outside = names()
    of_torch: Any = SchedulerNode.recompute_size_and_body
    monkeypatch.setattr(SchedulerNode, "recompute_size_and_body", of_torch.ssdtrain_original)
    assert outside == names()
