"""A picture of what processes hold in the course of one training step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssdtrain_fx.studies.measure import Measurement
from ssdtrain_fx.units import format_bytes

COLORS = ("#555555", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#a6761d")


def draw_memory(measurements: Sequence[Measurement], path: Path, *, title: str) -> None:
    """Draw memory over the sampled step of each of ``measurements``, in one picture, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    for index, trained in enumerate(measurements):
        color = COLORS[index % len(COLORS)]
        label = f"{trained.run.title}: peak {format_bytes(trained.process_peak_bytes)}"
        times_ms = [ms for ms, _ in trained.sampled.samples]
        used_mib = [size / (1 << 20) for _, size in trained.sampled.samples]
        axes.plot(times_ms, used_mib, color=color, linewidth=1.8, label=label)
        axes.fill_between(times_ms, used_mib, color=color, alpha=0.12, linewidth=0)
        rest_bytes = trained.rest.process_bytes
        label = f"{trained.run.title}: rest {format_bytes(rest_bytes)}"
        axes.axhline(rest_bytes / (1 << 20), color=color, linewidth=1, linestyle="--", label=label)
    what = "resident memory of the process" if measurements[0].run.device == "cpu" else "allocated GPU memory"
    axes.set_title(f"Memory over one training step\n{title}")
    axes.set_xlabel("time since the step began [ms]; unused memory was given back before, which makes it longer")
    axes.set_ylabel(f"{what} [MiB]")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, format="png")
