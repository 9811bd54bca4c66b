"""New plans when the disk drifts: when, how often, and that gradients do not change."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from steps import FAST_DISK
from test_training_loops import INNERS, Tower, everything
from torch import Tensor

from ssdtrain_fx import OffloadConfig, Statistics, backend
from ssdtrain_fx import config as config_module
from ssdtrain_fx.compiler import dynamo_backend
from ssdtrain_fx.compiler.replan import (
    DRIFT_FACTOR,
    DRIFT_STEPS,
    REPLAN_INTERVAL_S,
    Drift,
    ReplanningStep,
    has_static_shapes,
)
from ssdtrain_fx.memory_limit import MemoryLimit
from ssdtrain_fx.runtime.memory.staging import CHUNK_BYTES
from ssdtrain_fx.testing import assert_same_bits, gradients_of

PLANNED = FAST_DISK.write.bytes_per_s
SLOW = Statistics(write_bytes_per_s=PLANNED / 10, read_bytes_per_s=FAST_DISK.read.bytes_per_s)
AS_PLANNED = Statistics(write_bytes_per_s=PLANNED, read_bytes_per_s=FAST_DISK.read.bytes_per_s)


class HandClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_drift_of_several_steps_asks_for_a_plan_with_the_measured_rates() -> None:
    drift = Drift(FAST_DISK, HandClock())
    assert [drift.observe(SLOW) for _ in range(DRIFT_STEPS - 1)] == [None] * (DRIFT_STEPS - 1)
    measured = drift.observe(SLOW)
    assert measured is not None
    assert measured.write.bytes_per_s == PLANNED / 10
    assert measured.write.latency_s == FAST_DISK.write.latency_s
    assert dataclasses.replace(measured, write=FAST_DISK.write) == FAST_DISK
    assert drift.hardware == FAST_DISK
    drift.adopt(measured)
    assert drift.hardware == measured


@pytest.mark.parametrize("factor", [1.0, 0.99 * DRIFT_FACTOR, 1.01 / DRIFT_FACTOR])
def test_rates_near_the_profile_change_nothing(factor: float) -> None:
    drift = Drift(FAST_DISK, HandClock())
    seen = Statistics(write_bytes_per_s=factor * PLANNED)
    assert not any(drift.observe(seen) for _ in range(10 * DRIFT_STEPS))


def test_a_rate_that_was_not_seen_is_that_of_the_profile() -> None:
    drift = Drift(FAST_DISK, HandClock())
    assert not any(drift.observe(Statistics()) for _ in range(10 * DRIFT_STEPS))


def test_one_step_as_planned_starts_the_count_again() -> None:
    drift = Drift(FAST_DISK, HandClock())
    for _ in range(10):
        assert not any(drift.observe(SLOW) for _ in range(DRIFT_STEPS - 1))
        assert drift.observe(AS_PLANNED) is None


def test_the_next_plan_is_not_made_at_once() -> None:
    clock = HandClock()
    drift = Drift(FAST_DISK, clock)
    drift.adopt(next(filter(None, (drift.observe(SLOW) for _ in range(DRIFT_STEPS)))))
    assert not any(drift.observe(AS_PLANNED) for _ in range(10 * DRIFT_STEPS))
    clock.now_s = REPLAN_INTERVAL_S
    assert drift.observe(AS_PLANNED) == FAST_DISK


def test_symbolic_shapes_are_told_from_static_ones() -> None:
    seen: list[bool] = []

    def look(gm: Any, inputs: Any) -> Any:
        seen.append(has_static_shapes(inputs))
        return gm

    torch.compile(lambda x: x * 2, backend=look, dynamic=False)(torch.randn(3, 4))
    torch._dynamo.reset()
    torch.compile(lambda x: x * 2, backend=look, dynamic=True)(torch.randn(3, 4))
    assert seen == [True, False]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("inner", INNERS)
def test_gradients_are_the_same_before_across_and_after_a_new_plan(
    inner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk turns out to be slow. A forward before the new plan has its backward after it."""
    torch.manual_seed(0)
    model = Tower()
    batches = [torch.randn(8, 32) for _ in range(DRIFT_STEPS + 3)]
    rates: list[float] = []
    compile_once = dynamo_backend._compile_once

    def compile_and_note(gm: Any, inputs: Any, config: Any, mode: Any, budget: Any = None) -> Any:
        rates.append(config.hardware.write.bytes_per_s)
        return compile_once(gm, inputs, config, mode, budget)

    monkeypatch.setattr(dynamo_backend, "_compile_once", compile_and_note)
    monkeypatch.setattr(dynamo_backend, "statistics", lambda: SLOW)

    def train(compiler: Any) -> list[dict[str, Tensor]]:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=compiler)
        pending: list[Tensor] = []
        found: list[dict[str, Tensor]] = []
        for batch in batches:
            pending.append(compiled(batch))
            if len(pending) == 2:  # each backward runs after the next forward
                model.zero_grad(set_to_none=True)
                pending.pop(0).backward()
                found.append(gradients_of(model))
        return found

    config = dataclasses.replace(everything(inner), hardware=FAST_DISK)
    expected = train(inner)
    assert_same_bits(train(backend(dataclasses.replace(config, replan="auto"))), expected)
    assert rates == [PLANNED, PLANNED / 10]
    assert "The step is planned and compiled again" in caplog.text
    rates.clear()
    assert_same_bits(train(backend(config)), expected)
    assert rates == [PLANNED]


def test_a_step_that_cannot_be_compiled_again_keeps_its_code_and_tries_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = HandClock()
    rates: list[float] = []
    fails = False

    def compile_for(gm: Any, inputs: Any, hardware: Any) -> Any:
        if fails:
            raise RuntimeError("the compiler has no memory")
        rates.append(hardware.write.bytes_per_s)
        return gm.forward

    def double(gm: Any, inputs: Any) -> Any:
        return ReplanningStep(gm, inputs, compile_for, Drift(FAST_DISK, clock), lambda: SLOW).run

    compiled = torch.compile(lambda x: x * 2, backend=double)
    x = torch.ones(3, requires_grad=True)
    compiled(x)
    fails = True
    for _ in range(2 * DRIFT_STEPS):
        assert torch.equal(compiled(x), 2 * x)
    assert caplog.text.count("could not be compiled again") == 1
    assert "the compiler has no memory" in caplog.text
    fails, clock.now_s = False, REPLAN_INTERVAL_S
    for _ in range(DRIFT_STEPS):
        assert torch.equal(compiled(x), 2 * x)
    assert rates == [PLANNED, PLANNED / 10]


def test_a_new_plan_keeps_the_automatic_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some steps, the process holds the memory of a step. So too little seems to be left for another one."""
    left = iter([1 << 30, 1 << 20])
    monkeypatch.setattr(
        config_module,
        "read_memory_limit",
        lambda **_: MemoryLimit(limit_bytes=1 << 40, used_bytes=(1 << 40) - next(left), source=""),
    )
    budgets: list[Any] = []
    compile_with_aot_eager = dynamo_backend.compile_with_aot_eager

    def compile_and_note(*arguments: Any, budget: Any) -> Any:
        budgets.append(budget)
        return compile_with_aot_eager(*arguments, budget=budget)

    monkeypatch.setattr(dynamo_backend, "compile_with_aot_eager", compile_and_note)
    monkeypatch.setattr(dynamo_backend, "statistics", lambda: SLOW)
    config = OffloadConfig(inner="aot_eager", memory_budget_bytes="auto", hardware=FAST_DISK, replan="auto")
    compiled = torch.compile(Tower(), backend=backend(config))
    for _ in range(DRIFT_STEPS + 1):
        compiled(torch.randn(8, 32)).backward()
    first, second = budgets
    assert first == second
    assert first.size_bytes > 1 << 29


def test_plans_share_the_drives_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan, and the next one, for measured rates, which are those of this rank."""
    plans: list[Any] = []
    compile_with_aot_eager = dynamo_backend.compile_with_aot_eager

    def compile_and_note(gm: Any, inputs: Any, config: OffloadConfig, *rest: Any, **keywords: Any) -> Any:
        plans.append(config.load_hardware("cpu"))
        return compile_with_aot_eager(gm, inputs, config, *rest, **keywords)

    monkeypatch.setattr(dynamo_backend, "compile_with_aot_eager", compile_and_note)
    monkeypatch.setattr(dynamo_backend, "statistics", lambda: SLOW)
    config = OffloadConfig(inner="aot_eager", hardware=FAST_DISK, replan="auto", local_ranks=4)
    compiled = torch.compile(Tower(), backend=backend(config))
    for _ in range(DRIFT_STEPS + 1):
        compiled(torch.randn(8, 32)).backward()
    first, second = plans
    assert first == dataclasses.replace(FAST_DISK.shared_by(4), staging_chunk_bytes=CHUNK_BYTES)
    assert second.write.bytes_per_s == SLOW.write_bytes_per_s
