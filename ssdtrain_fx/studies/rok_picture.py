"""Show a recompute-offload-keep curve as a plot and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssdtrain_fx.studies.rok_curve import RokCurve, RokPoint, Strategy, of_strategy
from ssdtrain_fx.units import format_bytes

STYLES: Mapping[Strategy, tuple[str, str]] = {
    "keep": ("#555555", "s"),
    "recompute": ("#1b9e77", "^"),
    "offload": ("#d95f02", "o"),
    "mixed": ("#7570b3", "D"),
}
"""Colour and marker."""
MIB = 1 << 20


def draw_rok(curve: RokCurve, path: Path, *, title: str) -> None:
    """Plot samples per second against peak memory as a PNG: one line per strategy, each point with its batch size.

    The line of a strategy joins its Pareto front. A broad grey line joins the Pareto front of all points.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    _draw_line(axes, curve.pareto_front(), color="#bbbbbb", linewidth=9, alpha=0.55, label="Pareto front", zorder=1)
    for strategy, (color, marker) in STYLES.items():
        points = of_strategy(curve.points, strategy)
        if not points:
            continue
        front = RokCurve(points=tuple(points)).pareto_front()
        beaten = [point for point in points if point not in front]
        _draw_line(axes, front, color=color, marker=marker, label=strategy, zorder=3)
        _draw_line(axes, beaten, color=color, marker=marker, markerfacecolor="white", linestyle="none", zorder=2)
        for point in points:
            label = f"{point.batch}, {point.limit}" if point.limit else f"{point.batch}"
            axes.annotate(
                label, _place(point), xytext=(5, -11), textcoords="offset points", fontsize=7.5, color=color, zorder=4
            )
    measured = all(point.measured is not None for point in curve.points)
    axes.set_title(f"Recompute, offload, keep ({'measured' if measured else 'predicted'})\n{title}")
    axes.set_xlabel(
        "growth of the process in a step [MiB]" if measured else "peak of the memory that a step allocates [MiB]"
    )
    axes.set_ylabel("samples per second")
    axes.margins(x=0.1, y=0.1)
    axes.set_xlim(left=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", title="labels: batch size, time or peak limit")
    figure.savefig(path)


def table_rows(curve: RokCurve) -> list[tuple[str, ...]]:
    """One row per point: strategy, batch, limit, peak, milliseconds, samples/s, and a star on the Pareto front."""
    front = set(curve.pareto_front())
    return [
        (
            point.strategy,
            str(point.batch),
            point.limit,
            format_bytes(point.outcome.peak_bytes),
            f"{1e3 * point.outcome.step_s:,.1f} ms",
            f"{point.samples_per_s:,.1f}",
            "*" if point in front else "",
        )
        for point in curve.points
    ]


def _draw_line(axes: Any, points: Sequence[RokPoint], **style: Any) -> None:
    if points:
        axes.plot(*zip(*map(_place, points), strict=True), **style)


def _place(point: RokPoint) -> tuple[float, float]:
    return point.outcome.peak_bytes / MIB, point.samples_per_s
