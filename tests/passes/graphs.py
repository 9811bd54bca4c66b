"""Helpers for the tests of passes, in addition to :mod:`ssdtrain_fx.testing`: random programs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.testing import CapturedStep, Partition, capture_step, capture_toy, save_all

RANDOM_OPS = ["add", "mul", "relu", "sin", "mm", "transpose", "view", "reshape", "split", "expand", "softmax", "norm"]
if torch.__version__.startswith("2.12."):
    RANDOM_OPS.remove("expand")  # AOTAutograd in torch 2.12 cannot differentiate an expanded output
Program = tuple[tuple[str, int, int], ...]
"""Instructions ``(op, a, b)``: apply the op to earlier values a and b, as indices modulo the number of values."""


def random_programs(*, max_size: int = 12) -> st.SearchStrategy[Program]:
    instruction = st.tuples(st.sampled_from(RANDOM_OPS), st.integers(0, 15), st.integers(0, 15))
    return st.lists(instruction, min_size=2, max_size=max_size).map(tuple)


def capture_program(program: Program, *, partition: Partition = save_all) -> CapturedStep:
    """Interpret ``program`` on two matrices. It returns a loss over its last three values, and the last value."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        values = [x.sin(), w.cos()]
        for op, first, second in program:
            a, b = values[first % len(values)], values[second % len(values)]
            values += _apply(op, a, b)
        return torch.stack([value.sum() for value in values[-3:]]).sum(), values[-1]

    generator = torch.Generator().manual_seed(2)
    x, w = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((4, 4), (4, 8)))
    return capture_step(function, x, w, partition=partition)


def _apply(op: str, a: Tensor, b: Tensor) -> list[Tensor]:
    """The results of one instruction; none if the shapes do not allow it."""
    match op:
        case "add" if a.shape == b.shape:
            return [a + b]
        case "mul" if a.shape == b.shape:
            return [a * b]
        case "relu":
            return [a.relu()]
        case "sin":
            return [a.sin()]
        case "softmax":
            return [a.softmax(-1)]
        case "norm":
            return [F.layer_norm(a, a.shape[-1:])]
        case "mm" if a.shape[1] == b.shape[0]:
            return [a @ b]
        case "transpose":
            return [a.t()]
        case "view" if a.is_contiguous():
            return [a.view(-1, 2)]
        case "reshape":
            return [a.reshape(2, -1)]
        case "split" if a.shape[0] > 1:
            return list(a.split(a.shape[0] // 2))
        case "expand":
            return [a.sum(0, keepdim=True).expand(a.shape)]
    return []


def capture_toy_or_program(name_or_program: str | Program) -> CapturedStep:
    return capture_toy(name_or_program) if isinstance(name_or_program, str) else capture_program(name_or_program)


def matrix(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random matrix that requires a gradient."""
    return torch.randn(shape or (4, 6), dtype=dtype, requires_grad=True)


def live_at_marker(step: CapturedStep, joint: ScheduledJointGraph) -> int:
    """The measured live bytes at the start of backward."""
    return step.measure(joint).live_bytes[joint.positions()[joint.marker]]


def names(nodes: Iterable[object]) -> list[str]:
    return [str(node) for node in nodes]
