"""Measure the points of a recompute-offload-keep curve: one process per point, interleaved step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ssdtrain_fx.studies.measure import Run, Step, Variant, plan_turns, take_turns
from ssdtrain_fx.studies.rok_curve import PLANNED, OnProgress, RokCurve, RokOutcome, RokPoint, Strategy

VARIANTS: Mapping[Strategy, Variant] = {
    "keep": "inductor",
    "recompute": "checkpoint",
    "offload": "ssdtrain",
    "mixed": "ssdtrain",
}


def measure_rok(curve: RokCurve, run: Run, *, steps: int, on_progress: OnProgress) -> RokCurve:
    """Measure every point, and return the curve with ``measured`` filled in.

    The points of one batch size take turns step by step, so that other load on the machine slows all of them equally.

    Args:
        run: model, sizes and device. Batch, variant and limits come from each point.
        steps: steps of each run. The first ones do not count: they compile and warm up.

    Raises:
        WorkerError: a worker process failed.
    """
    batches = tuple(dict.fromkeys(point.batch for point in curve.points))
    by_batch = [[point for point in curve.points if point.batch == batch] for batch in batches]
    done, total = 0, sum(len(plan_turns([run_of(point, run) for point in points], steps)) for points in by_batch)

    def on_step(run: Run, step: Step) -> None:
        nonlocal done
        done += 1
        on_progress(f"batch {run.batch}: {run.variant}, step {step.index + 1}", done, total)

    measured: list[RokPoint] = []
    for points in by_batch:
        on_progress(f"batch {points[0].batch}: compiling", done, total)
        results = take_turns([run_of(point, run) for point in points], steps=steps, on_step=on_step)
        for point, result in zip(points, results, strict=True):
            outcome = RokOutcome(peak_bytes=result.growth_bytes, step_s=result.median_ms / 1e3)
            measured.append(dataclasses.replace(point, measured=outcome))
    return dataclasses.replace(curve, points=tuple(measured))


def run_of(point: RokPoint, run: Run) -> Run:
    """The run that measures ``point``: ``run`` with the batch size, variant and limit of the point."""
    options: dict[str, Any] = {**run.options}
    if point.strategy in PLANNED:
        options["recompute"] = point.strategy == "mixed"
    if point.max_slowdown is not None:
        options["max_slowdown"] = point.max_slowdown
    if point.memory_budget_bytes is not None:
        options["memory_budget_bytes"] = point.memory_budget_bytes
    return dataclasses.replace(run, batch=point.batch, variant=VARIANTS[point.strategy], options=options)
