"""Ops that the plan puts in rows are in rows in the code that Inductor generates."""

from __future__ import annotations

import ast
import itertools

import pytest
import torch
from steps import counted, generated_code, small_model
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig, backend
from ssdtrain_fx.testing import assert_same_bits, toy_hardware, train

pytestmark = pytest.mark.usefixtures("one_thread")

PRODUCTS = ("extern_kernels.mm", "extern_kernels.addmm")
ROWS = OffloadConfig(
    min_tensor_bytes=0,
    max_slowdown=0.5,
    hardware=toy_hardware(
        1e9,
        flops_per_s={"float32": 2e9},
        copies_block_compute=True,
        offload_s=1e-4,
        reload_s=1e-4,
        next_offload_s=1e-5,
        next_reload_s=1e-5,
    ),
)
"""A matrix product takes 1 ms, and the disk 0.07 ms for an activation."""


class Blocks(nn.Module):
    """The peak is a wide layer at the end, so there is room for rows before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(12))
        self.head = nn.Linear(width, 64 * width)

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + second(F.gelu(first(x)))
        return self.head(x).square().mean()


def rows_of(code: str, op: str) -> list[int]:
    """How many calls of ``op`` there are between two matrix products, wherever there are any."""
    (call,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef) and node.name == "call")
    values = (getattr(statement, "value", None) for statement in call.body)
    names = [ast.unparse(value.func) for value in values if isinstance(value, ast.Call)]
    rows = itertools.groupby((name for name in names if name in (*PRODUCTS, op)), key=op.__eq__)
    return [len(list(row)) for is_op, row in rows if is_op]


def test_ops_are_in_the_rows_of_the_plan() -> None:
    x = torch.randn(256, 64)
    torch.manual_seed(0)
    model = Blocks()
    plan = ssdtrain_fx.explain(model, x, config=ROWS).graphs[0].plan
    forward, backward = generated_code(model, x, compiler=ROWS)
    for code, op in ((forward, "offload"), (forward, "release"), (backward, "reload"), (backward, "wait")):
        positions = {getattr(storage.decision, op) for storage in plan.offloaded}
        rows = rows_of(code, f"ssdtrain_{op}")
        assert sum(rows) == len(plan.offloaded) >= 12
        assert len(rows) <= len(positions) <= len(plan.offloaded) // 2, (op, rows, positions)


def test_an_offload_stays_in_its_row_although_its_tensor_is_ready_earlier() -> None:
    """Inductor would run it right after the kernel that computes the tensor."""
    model, batches = small_model("gpt2")
    plan = ssdtrain_fx.explain(model, *batches[0], config=ROWS).graphs[0].plan
    positions = {storage.decision.offload for storage in plan.offloaded}
    forward, _ = generated_code(model, *batches[0], compiler=ROWS)
    rows = rows_of(forward, "ssdtrain_offload")
    assert sum(rows) == len(plan.offloaded)
    assert len(rows) == len(positions) <= len(plan.offloaded) // 2, (rows, positions)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_ops_in_rows_change_no_bit(name: str) -> None:
    model, batches = small_model(name)
    plan = ssdtrain_fx.explain(model, *batches[0], config=ROWS).graphs[0].plan
    assert len({storage.decision.offload for storage in plan.offloaded}) < len(plan.offloaded)
    expected = train(model, batches, "inductor")
    done = counted(lambda: assert_same_bits(train(model, batches, backend(ROWS)), expected))
    assert done.offloads >= len(plan.offloaded)
