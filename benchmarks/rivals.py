"""Compare ways to reduce activation memory: which is faster at equal peak, and which has a lower peak at equal time?

    python benchmarks/rivals.py --model gpt2            # also bert, t5, llama: about ten minutes each
    python benchmarks/rivals.py --variants budget ssdtrain --budgets 0.7 --steps 40     # two that are close

All ratios are relative to plain Inductor. An equal peak is an equal peak of the whole process. The variants are

    checkpoint    torch.utils.checkpoint around every layer
    budget        torch._functorch.config.activation_memory_budget, swept
    hooks_host    torch.autograd.graph.save_on_cpu
    hooks_disk    saved-tensor hooks that write to a file in the background (ssdtrain_fx/rivals.py)
    ssdtrain      this backend, at several max_slowdown

All variants run under Inductor, each in a separate process that takes turns with a process of plain Inductor, step by
step. Time and memory are those of the same steps. On a CPU, ``save_on_cpu`` copies from host memory to host memory and
cannot save any; it is included to show the cost of the hook. torch's own activation offloading
(``enable_activation_offloading``) is not included: it moves marked activations to CPU memory with ``device_put``, and
on a CPU they already are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ssdtrain_fx.cli.common import progress_columns
from ssdtrain_fx.runtime.storage.directory import check_directories
from ssdtrain_fx.studies import bench
from ssdtrain_fx.studies.comparison import CONFIDENCE, time_ratio
from ssdtrain_fx.studies.measure import Measurement, Run, Step, WorkerError, notes
from ssdtrain_fx.studies.zoo import MODELS
from ssdtrain_fx.units import format_bytes

BUDGETS = (0.0, 0.25, 0.5, 0.75, 1.0)
MAX_SLOWDOWNS = (0.02, 0.05, 0.1, 0.2)
TOLERANCE = 0.01
"""Peaks and times this close count as equal."""
COLORS = {
    "checkpoint": "#1b9e77",
    "budget": "#7570b3",
    "hooks_host": "#a6761d",
    "hooks_disk": "#e7298a",
    "ssdtrain": "#d95f02",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One variant at one setting. Ratios are relative to the process of plain Inductor that took turns with it."""

    variant: str
    setting: str
    peak_bytes: int
    """Peak of the whole process."""
    peak_ratio: float
    growth_bytes: int
    growth_ratio: float
    rest_bytes: int
    page_faults: float
    time_ratio: float
    time_ratio_interval: tuple[float, float] | None = None
    """Confidence interval at CONFIDENCE; None if it cannot be computed."""
    equal_bits: bool

    @property
    def label(self) -> str:
        return f"{self.variant} {self.setting}".strip()


def runs_of(run: Run, *, budgets: Sequence[float], max_slowdowns: Sequence[float]) -> list[tuple[str, Run]]:
    """Return every run except plain Inductor, with its setting as text."""
    runs = [("", dataclasses.replace(run, variant="checkpoint"))]
    for share in budgets:
        options = {**run.options, "activation_memory_budget": share}
        runs.append((f"{share:g}", dataclasses.replace(run, variant="budget", options=options)))
    runs += [("", dataclasses.replace(run, variant=variant)) for variant in ("hooks_host", "hooks_disk")]
    for share in max_slowdowns:
        options = {**run.options, "max_slowdown": share}
        runs.append((f"+{100 * share:g} %", dataclasses.replace(run, variant="ssdtrain", options=options)))
    return runs


def points_of(settings: Sequence[str], pairs: Sequence[tuple[Measurement, Measurement]]) -> list[Point]:
    return [
        Point(
            variant=result.run.variant,
            setting=setting,
            peak_bytes=result.process_peak_bytes,
            peak_ratio=result.process_peak_bytes / max(1, base.process_peak_bytes),
            growth_bytes=result.growth_bytes,
            growth_ratio=result.growth_bytes / max(1, base.growth_bytes),
            rest_bytes=result.rest.process_bytes,
            page_faults=result.page_faults,
            time_ratio=time_ratio(result.steps, base.steps).median,
            time_ratio_interval=time_ratio(result.steps, base.steps).interval,
            equal_bits=result.equals(base),
        )
        for setting, (base, result) in zip(settings, pairs, strict=True)
    ]


def fastest_within(points: Sequence[Point], peak_ratio: float) -> Point | None:
    """Return the fastest of ``points`` whose peak is not higher."""
    found = [point for point in points if point.peak_ratio <= peak_ratio * (1 + TOLERANCE)]
    return min(found, key=lambda point: point.time_ratio, default=None)


def smallest_within(points: Sequence[Point], time_ratio: float) -> Point | None:
    """Return the lowest peak of ``points`` that take no longer."""
    found = [point for point in points if point.time_ratio <= time_ratio * (1 + TOLERANCE)]
    return min(found, key=lambda point: point.peak_ratio, default=None)


def render(points: Sequence[Point], title: str, caption: str) -> Table:
    """Return a table with one row per point. Rivals' rows also show this backend at equal peak and at equal time."""
    ours = [point for point in points if point.variant == "ssdtrain"]
    table = Table(
        title=title, caption=f"Ratios are to plain Inductor. -: no setting of ssdtrain reaches this.\n{caption}"
    )
    sizes = ("peak of process", "ratio", "growth", "ratio", "rest")
    times = ("time", f"{CONFIDENCE:.0%} sure", "page faults", "bits")
    for name in ("", *sizes, *times, "ssdtrain, no higher peak: time", "ssdtrain, no longer: peak"):
        table.add_column(name, justify="left" if not name else "right")
    for point in points:
        fastest = smallest = None
        if point.variant != "ssdtrain":
            fastest, smallest = fastest_within(ours, point.peak_ratio), smallest_within(ours, point.time_ratio)
        table.add_row(
            point.label,
            format_bytes(point.peak_bytes),
            f"{point.peak_ratio:.3f}",
            format_bytes(point.growth_bytes),
            f"{point.growth_ratio:.3f}",
            format_bytes(point.rest_bytes),
            f"{point.time_ratio:.3f}",
            bench.format_interval(point.time_ratio_interval),
            f"{point.page_faults:,.0f}",
            "equal" if point.equal_bits else "different",
            f"{fastest.time_ratio:.3f} ({fastest.setting})" if fastest else "-",
            f"{smallest.peak_ratio:.3f} ({smallest.setting})" if smallest else "-",
        )
    return table


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Plot peak ratio against time ratio; lower left is better."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    for variant, color in COLORS.items():
        mine = sorted(
            (point.time_ratio, point.peak_ratio, point.setting) for point in points if point.variant == variant
        )
        if not mine:
            continue
        axes.plot([x for x, _, _ in mine], [y for _, y, _ in mine], marker="o", color=color, label=variant)
        for x, y, setting in mine:
            axes.annotate(setting, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=7.5, color=color)
    axes.axhline(1, color="#cccccc", zorder=0)
    axes.axvline(1, color="#cccccc", zorder=0)
    axes.set_title(f"Peak memory against step time, both relative to plain Inductor\n{title}")
    axes.set_xlabel("step time")
    axes.set_ylabel("peak memory of the process")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="gpt2")
    parser.add_argument("--layers", type=int, default=6, help="t5: half of them in the encoder")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--variants", choices=list(COLORS), nargs="+", default=list(COLORS), help="variants to measure")
    parser.add_argument("--budgets", type=float, nargs="*", default=BUDGETS)
    parser.add_argument("--max-slowdowns", type=float, nargs="*", default=MAX_SLOWDOWNS)
    parser.add_argument("--steps", type=int, default=5, help="rounds; the first ones do not count")
    parser.add_argument("--ssd-dir", help="directory on the SSD")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/rivals-MODEL.json")
    parser.add_argument("--png", type=Path, help="default: benchmarks/results/rivals-MODEL.png")
    chosen = parser.parse_args(arguments)
    if chosen.steps < 2:
        parser.error("--steps must be at least 2: the first one compiles.")
    directories = check_directories(chosen.ssd_dir)
    sizes = {name: getattr(chosen, name) for name in ("model", "layers", "hidden", "batch", "sequence", "vocab")}
    run = Run(**sizes, options={} if chosen.ssd_dir is None else {"ssd_dir": chosen.ssd_dir})
    found = runs_of(run, budgets=chosen.budgets, max_slowdowns=chosen.max_slowdowns)
    found = [(setting, one) for setting, one in found if one.variant in chosen.variants]
    if not found:
        parser.error("nothing to measure: the chosen --variants have no settings.")
    settings, runs = zip(*found, strict=True)
    console = Console()
    with Progress(*progress_columns(), console=console) as progress:
        bar = progress.add_task("compiling", total=2 * len(runs) * (chosen.steps + 1))

        def on_step(run: Run, step: Step) -> None:
            progress.update(bar, description=f"{run.variant}, step {step.index + 1}", advance=1)

        try:
            base = dataclasses.replace(run, variant=bench.BASE)
            pairs = bench.measure_in_pairs(base, runs, steps=chosen.steps, on_step=on_step)
        except WorkerError as error:
            sys.exit(str(error))
    points = points_of(settings, pairs)
    title = f"{run.model}, {run.layers} layers, hidden {run.hidden}, batch {run.batch} x {run.sequence}"
    table = render(points, title, "\n".join(notes([one for pair in pairs for one in pair])))
    Console(width=max(console.width, 180)).print(table)
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    json_path: Path = chosen.json or folder / f"rivals-{run.model}.json"
    png_path: Path = chosen.png or folder / f"rivals-{run.model}.png"
    written = {
        "points": [dataclasses.asdict(point) for point in points],
        "pairs": [bench.to_json(pair, directories) for pair in pairs],
    }
    json_path.write_text(json.dumps(written, indent=2) + "\n")
    draw(points, png_path, title)
    console.print(f"Results: {json_path.resolve()}\nPicture: {png_path.resolve()}", highlight=False, soft_wrap=True)
    return 0 if all(point.equal_bits for point in points if point.variant == "ssdtrain") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
