"""How the steps of two workers compare: whether they agree to the bit, and how their times relate."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ssdtrain_fx.studies.measure import Run, Step, Worker, counted, median_ms

CONFIDENCE = 0.95
CLEAR_WIDTH = 0.1
"""Largest span of what the pairs and the medians say about a ratio of step times that still allows a conclusion. A
guess."""
SHOWN_PARAMETERS = 5
"""How many parameters the text of a `Difference` names."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimeRatio:
    """Step time relative to that of a base run. They took turns: each pair of steps met the same conditions."""

    median: float
    """Median over the pairs."""
    interval: tuple[float, float] | None
    """Where the true median lies, at CONFIDENCE; None where the pairs are too few to say."""
    of_medians: float
    """Ratio of the two median step times. Other programs that run for a part of the time can distort it."""

    @property
    def doubt(self) -> str:
        """Why these figures are not a result, as a sentence; empty where they are one."""
        if self.interval is None:
            return (
                f"Too few pairs of steps for a {CONFIDENCE:.0%} interval of the change in step time: take more steps."
            )
        said = (*self.interval, self.of_medians)
        if max(said) - min(said) <= CLEAR_WIDTH:
            return ""
        return (
            "The machine was too noisy to tell the change in step time: pair by pair it is "
            f"{format_change(self.interval)} ({CONFIDENCE:.0%} interval), by the medians {self.of_medians - 1:+.1%}. "
            "Run it again on an idle machine, or take more steps."
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """How far two tensors are apart."""

    absolute: float
    """Largest difference of two elements."""
    relative: float
    """Largest difference of two elements, relative to the larger of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first step in which a run does not agree with its base run to the bit."""

    run: Run
    step: int
    loss: float
    base_loss: float
    parameters: int
    """How many parameters the model has."""
    gradients: dict[str, Distance]
    """Every parameter whose gradient differs, the largest absolute difference first."""

    def __str__(self) -> str:
        losses = (
            f"The losses are both {self.loss!r}."
            if self.loss == self.base_loss
            else f"The losses are {self.base_loss!r} and {self.loss!r}."
        )
        lines = [
            f"First difference of {self.run.title}: step {self.step + 1}. {losses}",
            f"The gradients of {len(self.gradients)} of {self.parameters} parameters differ"
            + (". Largest differences, absolute and relative:" if self.gradients else "."),
        ]
        shown = list(self.gradients.items())[:SHOWN_PARAMETERS]
        lines += [f"  {name}: {apart.absolute:.3g}, {apart.relative:.3g}" for name, apart in shown]
        if len(self.gradients) > len(shown):
            lines.append(f"  and {len(self.gradients) - len(shown)} more")
        return "\n".join(lines)


def find_difference(worker: Worker, base: Worker, step: Step, base_step: Step) -> Difference | None:
    """Where the last steps of two workers differ; None where loss and gradients are equal to the bit."""
    names = [name for name, digest in step.gradients.items() if digest != base_step.gradients[name]]
    if not names and step.loss_hex == base_step.loss_hex:
        return None
    ours, theirs = worker.gradients(names), base.gradients(names)
    apart = {name: _distance(ours[name], theirs[name]) for name in names}
    return Difference(
        run=worker.run,
        step=step.index,
        loss=step.loss,
        base_loss=base_step.loss,
        parameters=len(step.gradients),
        gradients=dict(sorted(apart.items(), key=lambda item: _nan_first(item[1].absolute))),
    )


def _distance(found: Tensor, base: Tensor) -> Distance:
    ours, theirs = found.double(), base.double()
    apart = (ours - theirs).abs()
    relative = torch.where(apart == 0, apart, apart / torch.maximum(ours.abs(), theirs.abs()))
    return Distance(absolute=float(apart.max()), relative=float(relative.max()))


def _nan_first(value: float) -> float:
    return -math.inf if math.isnan(value) else -value


def time_ratio(steps: Sequence[Step], base: Sequence[Step]) -> TimeRatio:
    """How the times of the counted steps relate."""
    pairs = zip(counted(steps), counted(base), strict=True)
    ratios = [step.duration_ms / base_step.duration_ms for step, base_step in pairs]
    return TimeRatio(
        median=statistics.median(ratios),
        interval=_median_interval(ratios),
        of_medians=median_ms(steps) / median_ms(base),
    )


def format_change(interval: tuple[float, float]) -> str:
    """An interval of a ratio as changes: ``-1.0% to +2.0%``."""
    return " to ".join(f"{ratio - 1:+.1%}" for ratio in interval)


def _median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Where the true median lies, at CONFIDENCE; None where the values are too few to say.

    It follows from the order of the values alone, whatever the noise is like (W. J. Conover, Practical Nonparametric
    Statistics, 3rd edition, 3.2).
    """
    from scipy import stats

    untyped = cast(Any, stats)
    low, high = untyped.quantile_test(values, p=0.5).confidence_interval(CONFIDENCE)
    return (float(low), float(high)) if math.isfinite(low) and math.isfinite(high) else None
