"""A picture of what variants trade: growth of memory against step time, both relative to plain Inductor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """One variant at one setting."""

    name: str
    """Variant: spots of one name are joined and have one colour."""
    label: str
    """Setting, written beside the spot."""
    time_ratio: float
    growth_ratio: float


def draw_trades(panels: Mapping[str, Sequence[Spot]], target: Path | IO[bytes], *, colors: Mapping[str, str]) -> None:
    """Draw one panel per title, as a PNG; lower left is better. ``colors`` also gives the order of the names."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(8 * columns, 5 * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    every: Any = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (title, spots) in zip(every, panels.items(), strict=False):
        for name, color in colors.items():
            mine = sorted((one.time_ratio, one.growth_ratio, one.label) for one in spots if one.name == name)
            if not mine:
                continue
            axes.plot([x for x, _, _ in mine], [y for _, y, _ in mine], marker="o", color=color, label=name)
            for x, y, label in mine:
                axes.annotate(label, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=7.5, color=color)
        axes.plot([1], [1], marker="*", markersize=12, color="#333333", linestyle="", label="Inductor")
        axes.axhline(1, color="#cccccc", zorder=0)
        axes.axvline(1, color="#cccccc", zorder=0)
        axes.set_title(title, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("step time, relative to plain Inductor")
    figure.supylabel("growth of the process in a step, relative to plain Inductor")
    every[0].legend()
    figure.savefig(target, format="png")
