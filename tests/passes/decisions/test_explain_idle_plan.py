"""If a plan offloads nothing, it says why, and names the option that would change that, with the peak it would reach.

The figures are checked by planning with the option.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import matrix
from torch import Tensor

from ssdtrain_fx import OffloadConfig, backend, explain
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.pipeline import offload_saved_tensors
from ssdtrain_fx.passes.planning.plan import Plan
from ssdtrain_fx.passes.planning.policy import Budget, Costs, Decision, StepAnalysis
from ssdtrain_fx.testing import CapturedStep, capture_step, save_all, toy_hardware
from ssdtrain_fx.units import format_bytes

FAST = toy_hardware(1e15)
SLOW = toy_hardware(3e9)


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    """Six layers: each saves 64 KiB."""
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x.sum()


def capture(function: Callable[..., Any] = layers) -> CapturedStep:
    return capture_step(function, matrix(256, 64), *(matrix(64, 64) for _ in range(6)), partition=save_all)


def plan_for(step: CapturedStep, hardware: Hardware = FAST, **options: Any) -> Plan:
    defaults = {"inner": "aot_eager", "min_tensor_bytes": 0, "max_slowdown": 0.0, "recompute": False}
    config = OffloadConfig(**{**defaults, **options})
    return offload_saved_tensors(
        step.forward,
        step.backward,
        num_forward_outputs=step.num_forward_outputs,
        config=config,
        hardware=hardware,
        budget=config.find_budget(),
    ).plan


def assert_reaches(line: str, plan: Plan) -> None:
    assert plan.offloaded
    assert f"would offload {format_bytes(plan.offloaded_bytes)}" in line
    assert f"a peak of {format_bytes(plan.peak_after_bytes)} instead of {format_bytes(plan.peak_before_bytes)}" in line


def test_a_plan_that_offloads_needs_no_reason() -> None:
    plan = plan_for(capture())
    assert plan.offloaded
    assert plan.why_nothing_moves == ""


def test_storages_are_too_small(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ssdtrain_fx"):
        plan = plan_for(capture(), min_tensor_bytes=1 << 20)
    line = plan.why_nothing_moves
    assert line.startswith("no saved storage may be offloaded: ")
    assert "below min_tensor_bytes=1048576" in line
    assert_reaches(line, plan_for(capture()))
    assert [record.message for record in caplog.records if "nothing is offloaded" in record.message] == [
        f"nothing is offloaded: {line}"
    ]


def test_there_is_too_little_time() -> None:
    line = plan_for(capture(), SLOW, max_slowdown=0.01).why_nothing_moves
    assert line.startswith("offloading takes more time than max_slowdown=0.01 allows. ")
    found = re.search(r"max_slowdown=([\d.]+) would offload", line)
    assert found is not None
    assert_reaches(line, plan_for(capture(), SLOW, max_slowdown=float(found.group(1))))


def test_the_drive_is_too_slow_for_any_slowdown() -> None:
    step = capture()
    line = plan_for(step, toy_hardware(1.0), max_slowdown=0.01).why_nothing_moves
    assert "The SSD is too slow: even max_slowdown=1 moves nothing." in line
    floor_bytes = plan_for(step).floor_bytes
    assert f"memory_budget_bytes could reach a peak of {format_bytes(floor_bytes)}, at any cost in time" in line
    plan = plan_for(step, toy_hardware(1.0), memory_budget_bytes=floor_bytes)
    assert plan.offloaded and plan.peak_after_bytes == floor_bytes


def test_the_peak_is_elsewhere() -> None:
    """The products of the largest op are not saved, and nothing else is idle while it runs."""

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        wide = (x @ x.t()).detach()
        return (wide @ wide).sum() + torch.tanh(x @ weights[0]).sum()

    line = plan_for(capture(function)).why_nothing_moves
    assert re.match(r"the peak of [\d.]+ \w+ is elsewhere: at \w+ in forward", line)
    assert "A smaller batch lowers it; no option does." in line


def test_nothing_is_saved() -> None:
    line = plan_for(capture(lambda x, *weights: (x * weights[0][0]).sum())).why_nothing_moves
    assert line == "backward reads nothing but inputs of the graph. No option changes that."


def test_checkpointing_is_there_already() -> None:
    def function(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(layers, x, *weights, use_reentrant=False)

    plans: list[Plan] = []
    config = OffloadConfig(inner="aot_eager", min_tensor_bytes=0, hardware=FAST)
    from ssdtrain_fx.compiler.aot_eager import compile_with_aot_eager

    def keep_plan(gm: Any, inputs: Any) -> Any:
        return compile_with_aot_eager(gm, inputs, config, observe=lambda step: plans.append(step.plan))

    torch.compiler.reset()
    torch.compile(function, backend=keep_plan)(matrix(256, 64), *(matrix(64, 64) for _ in range(6))).backward()
    (plan,) = plans
    assert not plan.offloaded
    assert "Activation checkpointing recomputes what could be offloaded" in plan.why_nothing_moves


def test_the_step_fits_the_budget() -> None:
    line = plan_for(capture(), memory_budget_bytes=1 << 40).why_nothing_moves
    assert line.startswith(f"the step fits into memory_budget_bytes={1 << 40} without offloading")
    assert format_bytes(plan_for(capture()).floor_bytes) in line


def test_the_policy_keeps_everything() -> None:
    def keep_all(step: StepAnalysis, costs: Costs, budget: Budget) -> dict[str, Decision]:
        return {}

    assert plan_for(capture(), policy=keep_all).why_nothing_moves.startswith("the policy keeps every storage.")


def test_recomputation_does_it_alone() -> None:
    plan = plan_for(capture(), toy_hardware(1.0), max_slowdown=1.0, recompute=True)
    assert plan.recomputed and not plan.offloaded
    peak = format_bytes(plan.peak_after_bytes)
    assert plan.why_nothing_moves.startswith(f"recomputation alone lowers the peak to {peak}")


def test_there_are_no_gradients(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    compiled = torch.compile(torch.nn.Linear(4, 4), backend=backend(OffloadConfig(inner="aot_eager")))
    with caplog.at_level(logging.INFO, logger="ssdtrain_fx"), torch.no_grad():
        compiled(torch.randn(2, 4))
    assert any("the graph computes no gradients" in record.message for record in caplog.records)


def test_the_report_shows_the_line() -> None:
    config = OffloadConfig(inner="aot_eager", min_tensor_bytes=1 << 30, hardware=FAST)
    (graph,) = explain(layers, matrix(256, 64), *(matrix(64, 64) for _ in range(6)), config=config).graphs
    assert graph.plan.why_nothing_moves
    assert f"nothing is offloaded: {graph.plan.why_nothing_moves}" in graph.where()
