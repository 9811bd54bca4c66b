"""The option ``chunk_loss``: whether a loss is computed in chunks of rows, and in how many.

number    torch's auto-chunker cuts the loss head while Inductor's passes run on the joint graph, then all is planned
"auto"    the step is planned as it is. Then the passes run again, with the auto-chunker, on the graph as it was
          before them, and that step is planned too, in the same time. The better of the two is compiled
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx._torch_private import inductor as private
from ssdtrain_fx._torch_private.inductor_chunker import (
    KeepRawGraph,
    LossChunker,
    LossHead,
    chunking,
    partition_from_raw,
)
from ssdtrain_fx.compiler.replan import has_static_shapes
from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.errors import BudgetError
from ssdtrain_fx.passes.pipeline import OffloadedStep
from ssdtrain_fx.passes.planning.step_budget import StepBudget
from ssdtrain_fx.units import format_bytes

log = logging.getLogger(__name__)

MIN_ROWS = 128
"""``auto`` makes no smaller chunks: their products would take longer. A guess."""
MAX_CHUNKS = 64
"""``auto`` makes no more chunks, because the code has a call for each of them. A guess."""

ROUNDING = 1e-9
"""Times are equal to this share."""

Halves = tuple[fx.GraphModule, fx.GraphModule]
Partition = Callable[..., Halves]
MakePlan = Callable[[Halves, OffloadConfig], OffloadedStep]


def count_chunks(head: LossHead) -> int:
    """How many chunks ``auto`` makes of a loss head.

    As many that the logits of one chunk and their gradient together take no more memory than the gradient of the head's
    weight, which is needed at the same time. More chunks would lower the peak little, and each of them reads and writes
    that gradient.
    """
    rows = max(head.features // 2, MIN_ROWS)
    return max(1, min(-(-head.rows // rows), MAX_CHUNKS))


class LossChunking:
    """``chunk_loss`` for one call of Inductor."""

    def __init__(self, config: OffloadConfig, example_inputs: Sequence[Any], *, is_link: bool) -> None:
        """
        Args:
            is_link: the graph takes activations from other graphs, so the loss is probably in one of these.
        """
        wanted = config.chunk_loss
        self._config = config
        self._is_link = is_link
        self._chunker = LossChunker(count_chunks if isinstance(wanted, str) else lambda _: wanted)
        self._impossible = "" if wanted == "off" else _why_impossible(example_inputs)
        self.is_on = wanted != "off" and not self._impossible
        self.has_warned = False

    def settings(self) -> dict[str, Any]:
        """Inductor's settings for the compilation."""
        if not self.is_on:
            return {}
        if self._config.chunk_loss != "auto":
            return self._chunker.settings()
        others = private.as_passes(private.current_setting("joint_custom_pre_pass"))
        return {**self._chunker.settings(enabled=False), "joint_custom_pre_pass": [KeepRawGraph(), *others]}

    @contextlib.contextmanager
    def active(self) -> Generator[None]:
        """Compile in this block."""
        if not self.is_on:
            yield
        elif self._config.chunk_loss == "auto":
            with KeepRawGraph.keeping():
                yield
        else:
            with chunking(self._chunker):
                yield

    def plan(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        partition: Partition,
        make_plan: MakePlan,
        budget: StepBudget | None,
        **kwargs: Any,
    ) -> OffloadedStep:
        """Partition the joint graph and plan the step. Arguments as for a partitioner; ``budget`` is that of the plan.

        Raises:
            BudgetError: no plan stays within a budget that must be met.
        """
        halves = partition(gm, joint_inputs, **kwargs)
        if self._config.chunk_loss != "auto" or not self.is_on:
            step = _with_chunks(make_plan(halves, self._config), self._chunker.num_chunks)
            self._say_why_not(self._impossible or self._chunker.refusal, has_loss=_has_loss(halves, **kwargs))
            return step
        plain = _try(make_plan, halves, self._config)
        with private.settings(**self._chunker.settings()), chunking(self._chunker):
            cut = partition_from_raw(gm, joint_inputs, partition=partition, **kwargs)
        if cut is None or not self._chunker.num_chunks:
            log.info("the loss is not computed in chunks: %s", self._chunker.refusal or "the graph calls other graphs")
            return _result(plain)
        chunked = self._plan_in_time(make_plan, cut, plain, budget)
        if not self._is_better(chunked, plain, budget):
            log.info("the loss is not computed in chunks: %s", _compare(chunked, plain))
            return _result(plain)
        step = _with_chunks(_result(chunked), self._chunker.num_chunks)
        log.info("the loss is computed in %d chunks: %s", step.plan.loss_chunks, _compare(chunked, plain))
        return step

    def _plan_in_time(self, make_plan: MakePlan, cut: Halves, plain: _Attempt, budget: StepBudget | None) -> _Attempt:
        """Plan the step with chunks. Chunks take time, and transfers may take what is left of ``max_slowdown``."""
        chunked = _try(make_plan, cut, self._config)
        limit_s = self._limit_s(plain, budget)
        if isinstance(chunked, BudgetError) or not chunked.plan.step_s <= limit_s < _seconds(chunked):
            return chunked
        left = limit_s / chunked.plan.step_s - 1
        return _try(make_plan, cut, dataclasses.replace(self._config, max_slowdown=left))

    def _limit_s(self, plain: _Attempt, budget: StepBudget | None) -> float:
        """How long a step may take with chunks; without a limit, infinity."""
        if isinstance(plain, BudgetError) or budget is not None or self._config.policy == "all":
            return math.inf
        return plain.plan.step_s * (1 + self._config.max_slowdown)

    def _is_better(self, chunked: _Attempt, plain: _Attempt, budget: StepBudget | None) -> bool:
        """Whether the step with chunks is better than the one without.

        With a budget: it fits and the other does not, or it takes less time. Otherwise: its peak is lower, and it takes
        no more time than ``max_slowdown`` allows.
        """
        if isinstance(chunked, BudgetError):
            return False
        if isinstance(plain, BudgetError):
            return True
        if budget is not None:
            fits, fits_plain = (one.plan.peak_after_bytes <= budget.peak_bytes for one in (chunked, plain))
            if fits != fits_plain:
                return fits
            if fits:
                return _seconds(chunked) < _seconds(plain)
        is_in_time = _seconds(chunked) <= self._limit_s(plain, budget) * (1 + ROUNDING)
        return is_in_time and chunked.plan.peak_after_bytes < plain.plan.peak_after_bytes

    def _say_why_not(self, reason: str, *, has_loss: bool) -> None:
        if self._config.chunk_loss == "off" or not reason:
            return
        if self._config.chunk_loss == "auto" or (self._is_link and not has_loss):
            log.info("the loss is not computed in chunks: %s", reason)
            return
        self.has_warned = True
        log.warning(
            "chunk_loss=%d has no effect on this graph: torch's auto-chunker cannot compute its loss in chunks. %s. "
            "Compute the loss in the compiled function, return only the loss, and cut off labels instead of logits. "
            "chunk_loss='auto' does not warn.",
            self._config.chunk_loss,
            reason,
        )


_Attempt = OffloadedStep | BudgetError


def _try(make_plan: MakePlan, halves: Halves, config: OffloadConfig) -> _Attempt:
    try:
        return make_plan(halves, config)
    except BudgetError as error:
        return error


def _result(attempt: _Attempt) -> OffloadedStep:
    if isinstance(attempt, BudgetError):
        raise attempt
    return attempt


def _with_chunks(step: OffloadedStep, num_chunks: int) -> OffloadedStep:
    return dataclasses.replace(step, plan=dataclasses.replace(step.plan, loss_chunks=num_chunks))


def _seconds(step: OffloadedStep) -> float:
    return step.plan.step_s + step.plan.exposed_s


def _compare(chunked: _Attempt, plain: _Attempt) -> str:
    def describe(attempt: _Attempt) -> str:
        if isinstance(attempt, BudgetError):
            return "does not fit into memory_budget_bytes"
        return f"has a peak of {format_bytes(attempt.plan.peak_after_bytes)} and takes {_seconds(attempt):.3g} s"

    return f"the step with chunks {describe(chunked)}, the one without {describe(plain)}"


def _why_impossible(example_inputs: Sequence[Any]) -> str:
    if not _torch_private.has_auto_chunker():
        return _torch_private.NO_AUTO_CHUNKER
    if not has_static_shapes(example_inputs):
        return "The shapes are dynamic, and the size of a chunk must be a number. Compile with dynamic=False"
    return ""


def _has_loss(halves: Halves, *, num_fwd_outputs: int, **_: Any) -> bool:
    """Whether forward returns a single number."""
    results: Any = halves[0].graph.output_node().args[0]
    values = (node.meta.get("val") for node in results[:num_fwd_outputs] if isinstance(node, fx.Node))
    return any(isinstance(value, torch.Tensor) and value.numel() == 1 for value in values)
