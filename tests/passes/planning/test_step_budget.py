"""From what a step may add to the memory of the process to the highest peak of a plan, and back."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from ssdtrain_fx.passes.planning.step_budget import FRAGMENTATION, StepBudget, budget_in_process

MIB = 1 << 20


def in_process(size_bytes: int, *, staging_bytes: int = 0) -> StepBudget:
    return budget_in_process(StepBudget(size_bytes=size_bytes), on_gpu=False, staging_bytes=staging_bytes)


def test_on_a_gpu_all_of_it_is_for_the_plan() -> None:
    budget = StepBudget(size_bytes=1000, limit="a limit")
    assert budget_in_process(budget, on_gpu=True, staging_bytes=16) == budget
    assert (budget.peak_bytes, budget.size_for(1000)) == (1000, 1000)


def test_on_a_cpu_staging_and_fragmentation_are_subtracted() -> None:
    assert in_process(1080 * MIB).peak_bytes == int(1080 * MIB / FRAGMENTATION)
    assert in_process(1096 * MIB, staging_bytes=16 * MIB).peak_bytes == int(1080 * MIB / FRAGMENTATION)


def test_staging_takes_no_more_than_an_eighth_of_a_small_budget() -> None:
    assert in_process(8000, staging_bytes=16 * MIB).peak_bytes == int(7000 / FRAGMENTATION)
    assert in_process(0, staging_bytes=16 * MIB).peak_bytes == 0


@given(peak_bytes=st.integers(0, 1 << 45), staging_bytes=st.sampled_from([0, 1, 16 * MIB]))
def test_the_size_for_a_peak_allows_this_peak_and_hardly_more(peak_bytes: int, staging_bytes: int) -> None:
    budget = in_process(1, staging_bytes=staging_bytes)
    raised = budget.raised_to(peak_bytes)
    assert raised.size_bytes == budget.size_for(peak_bytes)
    assert peak_bytes <= raised.peak_bytes <= peak_bytes + 8


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_a_larger_budget_never_allows_a_lower_peak(one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert in_process(small, staging_bytes=16 * MIB).peak_bytes <= in_process(large, staging_bytes=16 * MIB).peak_bytes
