"""Costs of tiny graphs, calculated by hand.

The machine of these tests: 1000 FLOP/s, 100 B/s, 10 expensive elements/s, and 0.5 s for an empty kernel.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Program, capture_program, random_programs
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from ssdtrain_fx.hardware import Hardware, convolution_key
from ssdtrain_fx.passes.analysis.node_costs import estimate_node_seconds
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, backward_starts
from ssdtrain_fx.passes.graph.node_facts import NodeFact
from ssdtrain_fx.testing import TOYS, analyse, capture_step, capture_toy, min_cut, toy_hardware

SLOW = toy_hardware(
    flops_per_s={"float32": 1000.0}, memory_bytes_per_s=100.0, elements_per_s={"float32": 10.0}, kernel_s=0.5
)
ONLY_BYTES = dataclasses.replace(
    SLOW, flops_per_s={"float32": 1e15}, memory_bytes_per_s=1.0, elements_per_s={"float32": 1e15}, kernel_s=0.0
)
"""With this profile, seconds equal bytes."""


def trace(function: Callable[..., Any], *shapes: Sequence[int]) -> ScheduledJointGraph:
    """The forward graph of ``function`` as a joint graph with an empty backward."""
    with FakeTensorMode():
        gm = make_fx(function)(*(torch.empty(*shape) for shape in shapes))
    output = gm.graph.output_node()
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
    with gm.graph.inserting_before(output):
        gm.graph.call_function(backward_starts)
    output.args = ((tuple(results), ()),)
    gm.recompile()
    return ScheduledJointGraph(gm=gm, saved=(), backward_inputs=())


def costs(joint: ScheduledJointGraph, hardware: Hardware = SLOW, *, fused: bool = True) -> dict[str, float]:
    """The nonzero costs, by node name."""
    seconds = estimate_node_seconds(joint, find_alias_sets(joint.graph), hardware, fused=fused)
    assert len(seconds) == len(joint.graph.nodes)
    return {node.name: cost for node, cost in zip(joint.graph.nodes, seconds, strict=True) if cost}


def total(joint: ScheduledJointGraph, hardware: Hardware = SLOW, *, fused: bool = True) -> float:
    return sum(costs(joint, hardware, fused=fused).values())


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_a_matrix_product_that_computes() -> None:
    """2 * 10 * 20 * 30 = 12000 FLOP take 12 s; 4 * (200 + 600 + 300) = 4400 B take 44 s, or 4.4 s at 1000 B/s."""
    joint = trace(torch.mm, (10, 20), (20, 30))
    assert costs(joint) == {"mm": pytest.approx(44.5)}
    assert costs(joint, dataclasses.replace(SLOW, memory_bytes_per_s=1000.0)) == {"mm": pytest.approx(12.5)}


def test_views_inputs_and_getitem_are_free() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        a, b = x.split(2)
        return a.t(), b.view(-1), x.expand(3, 4, 2)[1:]

    assert costs(trace(function, (4, 2))) == {}


def test_attention_counts_products_and_exponentials() -> None:
    """Query [1, 2, 3, 4], key and value [1, 2, 5, 4]: 2 products of 2 * 2 * 3 * 5 * 4 FLOP, and 2 * 3 * 5 = 30 exps."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

    joint = trace(function, (1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4))
    (cost,) = costs(joint, dataclasses.replace(SLOW, memory_bytes_per_s=1e9)).values()
    assert cost == pytest.approx(2 * 240 / 1000 + 30 / 10 + 0.5, rel=1e-4)


@pytest.mark.parametrize(("keys", "share"), [(256, 1.0), (1024, 0.75), (65536, 0.504)])
def test_causal_attention_skips_blocks_of_keys(keys: int, share: float) -> None:
    """In forward and in backward, whether ``is_causal`` is an argument by position or by name."""

    def positional(q: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)[0]

    def named(q: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, is_causal=True)[0]

    def whole(q: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0]

    found: list[list[float]] = []
    for function in (positional, named, whole):
        with FakeTensorMode():
            q = torch.empty(1, 2, keys, 4, requires_grad=True)
            joint = capture_step(lambda q, function=function: function(q * 1.0).sum(), q, partition=min_cut).join()
        nodes = [node for node in joint.graph.nodes if "attention" in str(node.target)]
        facts = [NodeFact.of(node, find_alias_sets(joint.graph)) for node in nodes]
        assert len(facts) == 2
        found.append([value for one in facts for value in (one.flops, one.expensive_elements)])
    for causal in found[:2]:
        ratios = [part / all_ for part, all_ in zip(causal, found[2], strict=True)]
        assert ratios == [pytest.approx(share, abs=0.001)] * 4


def test_attention_in_a_checkpoint_costs_what_it_costs_elsewhere() -> None:
    """It may draw a dropout mask, so AOTAutograd runs it inside an op that keeps the state of the generator."""

    def attend(q: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q * 1.0, q, q)

    def checkpointed(q: Tensor) -> Tensor:
        return checkpoint(attend, q, use_reentrant=False)

    rates = {"float32": 1.0, "float64": 1000.0}  # the state of the generator has neither dtype
    elements = {"float32": 1.0, "float64": 10.0}
    fast_memory = dataclasses.replace(SLOW, memory_bytes_per_s=1e9, flops_per_s=rates, elements_per_s=elements)
    seconds: list[dict[str, float]] = []
    for function in (attend, checkpointed):
        q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
        seconds.append(costs(capture_step(function, q, partition=min_cut).join(), fast_memory))
    once_s = 2 * 2 * 2 * 3 * 3 * 4 / 1000 + 2 * 3 * 3 / 10 + 0.5
    alone = [value for name, value in seconds[0].items() if "backward" not in name and "attention" in name]
    assert alone == [pytest.approx(once_s, rel=1e-3)]
    both = [value for name, value in seconds[1].items() if "rng_state" in name]
    assert both == [pytest.approx(once_s, rel=1e-3)] * 2  # in forward, and again in backward


def test_convolutions_have_a_separate_rate() -> None:
    """[1, 2, 5, 5] with 3 filters of 3x3 -> [1, 3, 3, 3]: 2 * 27 * 2 * 9 = 972 FLOP."""
    joint = trace(torch.nn.functional.conv2d, (1, 2, 5, 5), (3, 2, 3, 3))
    fast_memory = dataclasses.replace(SLOW, memory_bytes_per_s=1e9)
    own = dataclasses.replace(fast_memory, flops_per_s={"float32": 1000.0, convolution_key("float32"): 2000.0})
    assert total(joint, fast_memory) == pytest.approx(0.972 + 0.5)
    assert total(joint, own) == pytest.approx(0.486 + 0.5)


def test_looking_up_rows_reads_only_these() -> None:
    """3 rows of 4 floats: reads 48 B and 24 B of indices, writes 48 B. The table has 4000 B."""

    def function(table: Tensor) -> Tensor:
        return torch.nn.functional.embedding(torch.zeros(3, dtype=torch.long), table)

    assert total(trace(function, (250, 4)), ONLY_BYTES) <= 48 + 48 + 2 * 24


# -- properties --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOYS)
def test_fusion_saves_and_twice_the_machine_takes_half_the_time(name: str) -> None:
    joint = capture_toy(name).join()
    twice = dataclasses.replace(
        SLOW,
        flops_per_s={"float32": 2000.0},
        memory_bytes_per_s=200.0,
        elements_per_s={"float32": 20.0},
        kernel_s=0.25,
    )
    assert 0 < total(joint) <= total(joint, fused=False)
    assert total(joint, twice) == pytest.approx(total(joint) / 2)


@given(program=random_programs())
@settings(max_examples=15, deadline=None)
def test_random_programs(program: Program) -> None:
    """Costs are finite and not negative. A node that takes no time unfused takes none fused."""
    joint = capture_program(program).join()
    alias_sets = find_alias_sets(joint.graph)
    fused = estimate_node_seconds(joint, alias_sets, SLOW)
    single = estimate_node_seconds(joint, alias_sets, SLOW, fused=False)
    assert all(0 <= cost < float("inf") for cost in fused)
    assert all(one > 0 or many == 0 for one, many in zip(single, fused, strict=True))
    assert sum(fused) <= sum(single) + 1e-9


@pytest.mark.parametrize("function", [lambda x: (x * 2).exp().sum(-1), lambda x: x @ x.t(), lambda x: x.t().clone()])
def test_larger_takes_longer(function: Callable[[Tensor], Tensor]) -> None:
    sums = [total(trace(function, (size, size))) for size in (2, 4, 8, 16)]
    assert sums == sorted(set(sums))


def test_symbolic_sizes_cost_what_their_hints_cost() -> None:
    static, dynamic = (analyse(capture_toy("mlp", dynamic=dynamic)) for dynamic in (False, True))
    assert total(dynamic.joint) == pytest.approx(total(static.joint), rel=0.05)


def test_sizes_that_depend_on_data_cost_nothing_but_a_kernel() -> None:
    with FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()):
        gm = make_fx(lambda x: x.nonzero() * 2)(torch.empty(4))
    gm.graph.output_node().args = (((gm.graph.output_node().args[0],), ()),)
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(backward_starts)
    joint = ScheduledJointGraph(gm=gm, saved=(), backward_inputs=())
    assert costs(joint, dataclasses.replace(ONLY_BYTES, kernel_s=1.0)) == {"nonzero": 16 + 1, "mul": 1}


@pytest.mark.slow
def test_the_same_costs_whatever_the_hash_seed() -> None:
    code = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
from ssdtrain_fx.testing import analyse, capture_toy
from test_node_costs import SLOW, estimate_node_seconds
analysis = analyse(capture_toy("attention"))
print(estimate_node_seconds(analysis.joint, analysis.alias_sets, SLOW))
"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert printed.pop().startswith("(")


def test_thousands_of_nodes() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(300):
            y = torch.mm(x, w)
            y = torch.tanh(y + x) * 0.5
            x = (y - y.mean(-1, keepdim=True)).view(-1, 8).t().t()
        return x

    joint = trace(function, (8, 8), (8, 8))
    assert len(joint.graph.nodes) > 2500
    alias_sets = find_alias_sets(joint.graph)
    start_s = time.process_time()
    estimate_node_seconds(joint, alias_sets, SLOW)
    assert time.process_time() - start_s < 10  # it takes about 0.05 s; only superlinear code comes close to 10 s
