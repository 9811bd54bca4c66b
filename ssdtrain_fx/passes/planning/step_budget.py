"""The budget of a step, and how much of it a plan may use.

A budget is the memory of a process, but a plan counts the bytes of storages. On a CPU, a step adds more to the resident
memory than its storages: staging, and memory that the allocator cannot reuse.

    resident memory of a step = FRAGMENTATION * peak of the plan + staging

Only this module contains this relation. On a GPU, device memory holds storages only, so both are the same.
"""

from __future__ import annotations

import dataclasses
import math

FRAGMENTATION = 1.08
"""How many times the peak of its plan a step adds to the resident memory on a CPU, without staging: 0.98 for BERT, 1.01
for GPT-2, 1.03 for T5, 1.05 for Llama, 1.08 for Mixtral, but 1.21 for ViT, whose convolution takes memory that torch's
allocator does not see (``benchmarks/families.py``, 2 cores, 2026-11-25)."""
MAX_STAGING_SHARE = 1 / 8
"""Staging takes at most this share of a budget. A step that is only a few times as large as staging does not have
enough in flight to fill it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepBudget:
    """What one step may add to the memory of the process. As given, all of it is for the plan."""

    size_bytes: int
    limit: str | None = None
    """Where the number comes from, for people. None: the user has given it, so it must be met."""
    fragmentation: float = 1.0
    staging_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The highest peak that a plan may have."""
        staging_bytes = min(self.staging_bytes, int(self.size_bytes * MAX_STAGING_SHARE))
        return int((self.size_bytes - staging_bytes) / self.fragmentation)

    def size_for(self, peak_bytes: int) -> int:
        """The smallest budget, to within a few bytes, that allows a plan with this peak."""
        step_bytes = math.ceil(peak_bytes * self.fragmentation)
        size_bytes = min(step_bytes + self.staging_bytes, math.ceil(step_bytes / (1 - MAX_STAGING_SHARE)))
        while dataclasses.replace(self, size_bytes=size_bytes).peak_bytes < peak_bytes:
            size_bytes += 1
        return size_bytes

    def raised_to(self, peak_bytes: int) -> StepBudget:
        """The budget that allows a plan with this peak."""
        return dataclasses.replace(self, size_bytes=self.size_for(peak_bytes))


def budget_in_process(budget: StepBudget, *, on_gpu: bool, staging_bytes: int) -> StepBudget:
    """The same budget with what a step needs besides its plan.

    Args:
        staging_bytes: the staging memory that the engine is expected to use on a CPU.
    """
    if on_gpu:
        return budget
    return dataclasses.replace(budget, fragmentation=FRAGMENTATION, staging_bytes=staging_bytes)
