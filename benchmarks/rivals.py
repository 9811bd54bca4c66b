"""Compare ways to reduce activation memory: which is faster at equal peak, and which has a lower peak at equal time?

    python benchmarks/rivals.py                                 # all families: about ten minutes each
    python benchmarks/rivals.py --model gpt2 --variants budget ssdtrain --budgets 0.7 --steps 40    # two that are close

All ratios are relative to plain Inductor. An equal peak is an equal peak of the whole process. The variants are

    checkpoint    torch.utils.checkpoint around every layer
    selective     the same, with matrix products, attention and convolutions saved
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
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ssdtrain_fx.cli.common import progress_columns
from ssdtrain_fx.runtime.storage.directory import check_directories
from ssdtrain_fx.studies import bench
from ssdtrain_fx.studies.comparison import CONFIDENCE, time_ratio
from ssdtrain_fx.studies.measure import Measurement, Run, Step, WorkerError, notes
from ssdtrain_fx.studies.trade_picture import Spot, draw_trades
from ssdtrain_fx.studies.zoo import MODELS
from ssdtrain_fx.units import format_bytes

BUDGETS = (0.0, 0.25, 0.5, 0.75, 1.0)
MAX_SLOWDOWNS = (0.0, 0.02, 0.05, 0.1, 0.3)
FAMILIES = ("gpt2", "bert", "t5", "llama", "mixtral", "vit", "resnet", "mamba")
TOLERANCE = 0.01
"""Peaks and times this close count as equal."""
COLORS = {
    "checkpoint": "#1b9e77",
    "selective": "#66a61e",
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
    runs = [("", dataclasses.replace(run, variant=variant)) for variant in ("checkpoint", "selective")]
    for share in budgets:
        options = {**run.options, "activation_memory_budget": share}
        runs.append((f"{share:g}", dataclasses.replace(run, variant="budget", options=options)))
    runs += [("", dataclasses.replace(run, variant=variant)) for variant in ("hooks_host", "hooks_disk")]
    for share in max_slowdowns:
        options = {**run.options, "max_slowdown": share}
        runs.append((f"+{100 * share:g} %", dataclasses.replace(run, variant="ssdtrain", options=options)))
    return runs


def point_of(setting: str, base: Measurement, result: Measurement) -> Point:
    ratio = time_ratio(result.steps, base.steps)
    return Point(
        variant=result.run.variant,
        setting=setting,
        peak_bytes=result.process_peak_bytes,
        peak_ratio=result.process_peak_bytes / max(1, base.process_peak_bytes),
        growth_bytes=result.growth_bytes,
        growth_ratio=result.growth_bytes / max(1, base.growth_bytes),
        rest_bytes=result.rest.process_bytes,
        page_faults=result.page_faults,
        time_ratio=ratio.median,
        time_ratio_interval=ratio.interval,
        equal_bits=result.equals(base),
    )


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


def draw(results: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Plot growth against time, both as ratios, one panel per title."""
    panels = {
        title: [
            Spot(name=one.variant, label=one.setting, time_ratio=one.time_ratio, growth_ratio=one.growth_ratio)
            for one in points
        ]
        for title, points in results.items()
    }
    draw_trades(panels, path, colors=COLORS)


def measure(run: Run, chosen: argparse.Namespace, console: Console) -> list[tuple[str, Measurement, Measurement]]:
    """Measure every variant of ``run``: (setting, plain Inductor, variant). A rival that fails is left out, and named.

    Raises:
        WorkerError: this backend failed.
    """
    found = runs_of(run, budgets=chosen.budgets, max_slowdowns=chosen.max_slowdowns)
    found = [(setting, one) for setting, one in found if one.variant in chosen.variants]
    with Progress(*progress_columns(), console=console) as progress:
        bar = progress.add_task("compiling", total=2 * len(found) * (chosen.steps + 1))

        def on_step(run: Run, step: Step) -> None:
            progress.update(bar, description=f"{run.model}, {run.variant}, step {step.index + 1}", advance=1)

        base = dataclasses.replace(run, variant=bench.BASE)
        measured: list[tuple[str, Measurement, Measurement]] = []
        for setting, one in found:
            try:
                [(its_base, result)] = bench.measure_in_pairs(base, [one], steps=chosen.steps, on_step=on_step)
            except WorkerError as error:
                if one.variant == "ssdtrain":
                    raise
                console.print(f"{run.model}, {one.variant} {setting} failed: {error}", highlight=False, markup=False)
                continue
            measured.append((setting, its_base, result))
    return measured


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), nargs="+", default=FAMILIES)
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
    folder = Path(__file__).parent / "results"
    parser.add_argument(
        "--results", type=Path, default=folder, help="where rivals-MODEL.json and rivals.png are written"
    )
    chosen = parser.parse_args(arguments)
    if chosen.steps < 2:
        parser.error("--steps must be at least 2: the first one compiles.")
    directories = check_directories(chosen.ssd_dir)
    every = runs_of(Run(), budgets=chosen.budgets, max_slowdowns=chosen.max_slowdowns)
    if not any(run.variant in chosen.variants for _, run in every):
        parser.error("nothing to measure: the chosen --variants have no settings.")
    sizes = {name: getattr(chosen, name) for name in ("layers", "hidden", "batch", "sequence", "vocab")}
    options = {} if chosen.ssd_dir is None else {"ssd_dir": chosen.ssd_dir}
    folder = chosen.results
    folder.mkdir(exist_ok=True, parents=True)
    console = Console()
    results: dict[str, list[Point]] = {}
    for model in chosen.model:
        run = Run(**sizes, model=model, options=options)
        try:
            measured = measure(run, chosen, console)
        except WorkerError as error:
            sys.exit(str(error))
        points = [point_of(setting, base, result) for setting, base, result in measured]
        pairs = [pair for _, *pair in measured]
        title = f"{model}, {run.layers} layers, hidden {run.hidden}, batch {run.batch} x {run.sequence}"
        results[title] = points
        table = render(points, title, "\n".join(notes([one for pair in pairs for one in pair])))
        Console(width=max(console.width, 180)).print(table)
        path = folder / f"rivals-{model}.json"
        written = {
            "points": [dataclasses.asdict(point) for point in points],
            "pairs": [bench.to_json(pair, directories) for pair in pairs],
        }
        path.write_text(json.dumps(written, indent=2) + "\n")
        draw(results, folder / "rivals.png")  # after each: a picture of what there is, if the next one fails
        console.print(f"Results: {path.resolve()}", highlight=False, soft_wrap=True)
    console.print(f"Picture: {(folder / 'rivals.png').resolve()}", highlight=False, soft_wrap=True)
    ours = [point for points in results.values() for point in points if point.variant == "ssdtrain"]
    return 0 if all(point.equal_bits for point in ours) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
