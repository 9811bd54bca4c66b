"""What the kernels of attention on a CPU allocate for themselves."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from profiles import HARDWARE
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from ssdtrain_fx.passes.analysis.analyse import analyse
from ssdtrain_fx.passes.analysis.kernel_workspaces import find_kernel_workspaces
from ssdtrain_fx.passes.decisions.find_peak_parts import find_peak_parts
from ssdtrain_fx.testing import capture_step

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SHAPES = (
    (2, 4, 192, 256, 64),
    (2, 4, 768, 768, 64),
    (1, 2, 100, 300, 32),
    (2, 4, 16, 64, 128),
    (1, 4, 191, 193, 63),
    (2, 2, 767, 2048, 80),
)
"""Batch, heads, queries, keys, head size."""


@pytest.fixture(params=(1, 2), autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def allocated_inside(call: Callable[[], object]) -> int:
    """The bytes that torch counts as allocated during ``call``, without its results."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        results = call()
    assert isinstance(results, tuple)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in found.events())
    return allocated - sum(result.untyped_storage().nbytes() for result in results)


def found_bytes(op: Callable[..., object], *tensors: Tensor, **settings: object) -> int:
    """What is found for a node that calls ``op``."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index, _ in enumerate(tensors)]
    with FakeTensorMode() as mode:
        for node, tensor in zip(inputs, tensors, strict=True):
            node.meta["val"] = mode.from_tensor(tensor)
    node = graph.call_function(op, (*inputs, *settings.values()))
    return find_kernel_workspaces(graph)[node]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_found_is_what_the_kernels_allocate(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, heads, queries, keys, size = shape

    def tensor(length: int) -> Tensor:
        return torch.randn(batch, length, heads, size, dtype=dtype).transpose(1, 2)

    query, key, value = tensor(queries), tensor(keys), tensor(keys)
    assert found_bytes(FORWARD, query, key, value) == allocated_inside(lambda: FORWARD(query, key, value))
    out, sums = FORWARD(query, key, value)
    for gradient in (tensor(queries), tensor(queries).contiguous()):
        tensors = (gradient, query, key, value, out, sums)
        found = found_bytes(BACKWARD, *tensors, dropout_p=0.0, is_causal=False)
        # The kernel also allocates a column of sums, which is not counted: at most 1 KiB per thread.
        run = functools.partial(BACKWARD, *tensors, dropout_p=0.0, is_causal=False)
        assert allocated_inside(run) == pytest.approx(found, abs=2048)


def test_a_plan_counts_them_while_the_kernel_runs() -> None:
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x * 2, x * 3)

    joint = capture_step(attend, torch.randn(1, 2, 64, 32, requires_grad=True)).join()
    on_gpu = dataclasses.replace(HARDWARE, device="toy GPU")
    assert not analyse(joint, min_tensor_bytes=0, hardware=on_gpu, fused=True).extras, "a GPU has other kernels"
    analysis = analyse(joint, min_tensor_bytes=0, hardware=HARDWARE, fused=True)
    nodes = list(joint.graph.nodes)
    found = {nodes[one.start].target: one for one in analysis.extras.values()}
    assert found.keys() == {FORWARD, BACKWARD}
    assert all(one.end == one.start + 1 for one in found.values())
    parts = find_peak_parts(analysis, analysis.extras.values())
    assert [(part.role, part.size_bytes) for part in parts] == [("other", sum(analysis.kernel_workspaces.values()))]
