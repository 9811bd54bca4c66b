"""Compare this backend with its rivals on a GPU: time, device memory, bits.

    python benchmarks/gpu.py                                    # needs a CUDA device; results are in benchmarks/results
    python benchmarks/gpu.py --model gpt2 --variants ssdtrain ssdtrain-ssd --max-slowdown 0.01 0.1 --ssd-dir /mnt/nvme0

Everything is compared with plain Inductor, which always runs. The variants are

    checkpoint        torch.utils.checkpoint around every layer
    selective         the same, with matrix products, attention and convolutions saved
    hooks_host        torch.autograd.graph.save_on_cpu, with pinned memory
    ssdtrain          this backend, with its host tier
    ssdtrain-ssd      the same with so little pinned memory that nearly all of it goes to the SSD
    ssdtrain-kvikio   the same with io="kvikio": straight from the GPU to the file. Where KvikIO can be imported

Each has a process of its own. The processes of several models compile at once, at most ``--jobs`` of them.
Then only one process at a time makes a step, in turns, model after model. After each model, the results are written:
one JSON file and one page. A variant that fails is named, and the others go on.

Exit code: 0, or 1 if a variant of this backend failed or differs from plain Inductor in a bit.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import html
import importlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ssdtrain_fx.cli.common import progress_columns
from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.machine.probe import load_hardware
from ssdtrain_fx.runtime.storage.directory import check_directories
from ssdtrain_fx.studies import bench
from ssdtrain_fx.studies.comparison import CONFIDENCE, time_ratio
from ssdtrain_fx.studies.measure import (
    Measurement,
    Run,
    Step,
    Variant,
    WorkerError,
    choose_device,
    measure_groups,
    notes,
)
from ssdtrain_fx.studies.trade_picture import Spot, draw_trades
from ssdtrain_fx.studies.zoo import MODELS
from ssdtrain_fx.units import format_bytes

FAMILIES = ("gpt2", "bert", "llama", "t5")
STAGING_BYTES = 128 << 20
"""Pinned memory of `ssdtrain-ssd`: enough to keep a drive busy."""
HASHED_STEPS = 3
"""Gradients are hashed in the steps that compile and warm up, the first one that counts, and the last one."""
FIRST_RUNS = 2
"""How many processes may run their first step at the same time: each needs all memory of a step."""
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
ERROR = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt|Failed|Unsupported)\b.*:")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A variant by the name that `--variants` gives it."""

    variant: Variant
    title: str
    color: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    devices: tuple[str, ...] = ("cuda",)
    """Where it runs by default."""


BASE = "inductor"
KINDS = {
    "checkpoint": Kind(variant="checkpoint", title="checkpoint", color="#1b9e77", devices=("cuda", "cpu")),
    "selective": Kind(variant="selective", title="selective", color="#66a61e", devices=("cuda", "cpu")),
    "hooks_host": Kind(variant="hooks_host", title="hooks_host", color="#a6761d"),
    "ssdtrain": Kind(variant="ssdtrain", title="ssdtrain", color="#d95f02", devices=("cuda", "cpu")),
    "ssdtrain-ssd": Kind(
        variant="ssdtrain", title="ssdtrain, SSD", color="#7570b3", options={"host_budget_bytes": STAGING_BYTES}
    ),
    "ssdtrain-kvikio": Kind(variant="ssdtrain", title="ssdtrain, KvikIO", color="#e7298a", options={"io": "kvikio"}),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A variant of one model: what was measured, or why nothing was."""

    title: str
    setting: str = ""
    """Set apart from others of the same title: ``max_slowdown``."""
    run: Run
    base: Measurement | None = None
    """Plain Inductor, which took turns with it."""
    measured: Measurement | None = None
    error: str = ""
    """One line; empty if it was measured."""

    @property
    def label(self) -> str:
        return f"{self.title} {self.setting}".strip()

    @property
    def good(self) -> bool:
        """It is another's variant, or it was measured and agrees with plain Inductor to the bit."""
        if self.run.variant != "ssdtrain":
            return True
        return self.measured is not None and (self.base is None or self.measured.equals(self.base))

    def to_plain(self) -> dict[str, Any]:
        """All figures, for JSON. Without a base, there are no ratios."""
        plain: dict[str, Any] = {
            "variant": self.label,
            "error": self.error or None,
            "run": dataclasses.asdict(self.run),
        }
        one, base = self.measured, self.base
        if one is not None:
            last = one.steps[-1].statistics
            plain |= one.to_plain() | {
                "host_bytes_per_step": last.host_bytes,
                "ssd_bytes_per_step": last.bytes_written,
                "io_path": last.io_path,
            }
        if one is not None and base is not None:
            plain |= bench.compare(one, base) | {
                "equal_losses": largest_loss_difference(one, base) == 0,
                "largest_relative_loss_difference": largest_loss_difference(one, base),
                "equal_gradients": equal_gradients(one, base),
            }
        return plain

    def cells(self) -> list[str]:
        """What a table shows, one text per column of COLUMNS."""
        one, base = self.measured, self.base
        if one is None:
            return [self.label, "failed", *["-"] * (len(COLUMNS) - 2)]
        last = one.steps[-1].statistics
        moves = self.run.variant == "ssdtrain"
        cells = [self.label, f"{one.median_ms:,.1f} ms", "-", "-"]
        cells += [format_bytes(one.process_peak_bytes), "-", format_bytes(one.growth_bytes), "-"]
        cells += [format_bytes(size) if moves else "-" for size in (last.host_bytes, last.bytes_written)]
        cells += [last.io_path if moves else "-", "-", "-"]
        if base is not None and base is not one:
            ratio, apart = time_ratio(one.steps, base.steps), largest_loss_difference(one, base)
            cells[2:4] = [f"{ratio.median:.3f}", bench.format_interval(ratio.interval)]
            cells[5] = f"{one.process_peak_bytes / max(1, base.process_peak_bytes):.3f}"
            cells[7] = f"{one.growth_bytes / max(1, base.growth_bytes):.3f}"
            cells[-2:] = [f"{apart:.1e} apart" if apart else "equal", _equal(equal_gradients(one, base))]
        return cells


COLUMNS = (
    *("", "step", "ratio", f"{CONFIDENCE:.0%} sure", "peak", "ratio", "growth", "ratio"),
    *("to host", "to SSD", "path", "losses", "gradients"),
)


def largest_loss_difference(one: Measurement, base: Measurement) -> float:
    """Of all steps, relative to the loss of ``base``."""
    pairs = zip((*one.steps, one.sampled), (*base.steps, base.sampled), strict=True)
    return max(
        0.0 if mine.loss_hex == its.loss_hex else abs(mine.loss - its.loss) / max(abs(its.loss), sys.float_info.min)
        for mine, its in pairs
    )


def equal_gradients(one: Measurement, base: Measurement) -> bool:
    """Of all hashed steps, to the bit."""
    return one.gradients_digest == base.gradients_digest


def _equal(equal: bool) -> str:
    return "equal" if equal else "different"


def rows_of(run: Run, names: Sequence[str], max_slowdowns: Sequence[float]) -> list[Row]:
    """Plain Inductor and the variants of these names, each of this backend once for each of ``max_slowdowns``."""
    rows = [Row(title=BASE, run=dataclasses.replace(run, variant=BASE))]
    for name in names:
        kind = KINDS[name]
        ours = kind.variant == "ssdtrain"
        for share in max_slowdowns if ours and max_slowdowns else [None]:
            options = run.options | kind.options | ({} if share is None else {"max_slowdown": share})
            one = dataclasses.replace(run, variant=kind.variant, options=options if ours else run.options)
            rows.append(Row(title=kind.title, setting="" if share is None else f"+{100 * share:g} %", run=one))
    return rows


def waves_of(models: Sequence[str], size: int, jobs: int) -> list[list[str]]:
    """Models whose processes compile at the same time: as many as ``jobs`` can serve, but at least one. Of each model,
    ``size`` processes hold its weights until it is measured."""
    count = max(1, jobs // size)
    return [list(models[start : start + count]) for start in range(0, len(models), count)]


def one_line(error: WorkerError) -> str:
    """What went wrong, without the traceback."""
    first, *lines = str(error).strip().splitlines()
    named = [line for line in lines if ERROR.match(line)]
    if not named and lines == ["(nothing)"]:
        return first
    return (named or lines or [first])[-1].strip()[:300]


def has_kvikio() -> bool:
    """Whether KvikIO and the libraries below it can be loaded."""
    try:
        importlib.import_module("kvikio")
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def measure(
    models: Mapping[str, Sequence[Row]],
    *,
    steps: int,
    jobs: int,
    on_step: Callable[[Run, Step], None],
    on_model: Callable[[str, list[Row]], None],
    goes_on: Callable[[], bool],
) -> None:
    """Measure the rows of some models, which compile at the same time; ``on_model`` gets those of each when they are
    measured."""
    errors: dict[int, str] = {}

    def on_failure(run: Run, error: WorkerError) -> None:
        errors[id(run)] = one_line(error)

    groups = [[row.run for row in rows] for rows in models.values()]
    measured = measure_groups(
        groups, steps=steps, jobs=jobs, gates=FIRST_RUNS, on_step=on_step, on_failure=on_failure, goes_on=goes_on
    )
    for (model, rows), results in zip(models.items(), measured, strict=True):
        by_run = {id(one.run): one for one in results}
        base = by_run.get(id(rows[0].run))
        done = [
            dataclasses.replace(row, base=base, measured=by_run.get(id(row.run)), error=errors.get(id(row.run), ""))
            for row in rows
        ]
        on_model(model, done)


def render(title: str, rows: Sequence[Row]) -> Table:
    """A table with one line per variant."""
    table = Table(title=title, caption="\n".join(remarks(rows)))
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row.cells())
    return table


def remarks(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table has to know, and what failed."""
    results = [row.measured for row in rows if row.measured is not None]
    found = [*notes(results), "Ratios are to plain Inductor, pair by pair."] if results else []
    for row in rows:
        if row.error:
            found.append(f"{row.label} failed: {row.error}")
        elif row.measured is not None and row.base is not None and row.measured is not row.base:
            doubt = time_ratio(row.measured.steps, row.base.steps).doubt
            found += [f"{row.label}: {doubt}"] if doubt else []
    return found


def picture(models: Mapping[str, Sequence[Row]]) -> bytes:
    """Growth against time, one panel per model, as a PNG; empty if there is nothing to show."""
    panels: dict[str, list[Spot]] = {}
    for model, rows in models.items():
        for row in rows[1:]:
            if row.measured is None or row.base is None:
                continue
            spot = Spot(
                name=row.title,
                label=row.setting,
                time_ratio=time_ratio(row.measured.steps, row.base.steps).median,
                growth_ratio=row.measured.growth_bytes / max(1, row.base.growth_bytes),
            )
            panels.setdefault(model, []).append(spot)
    if not panels:
        return b""
    written = io.BytesIO()
    draw_trades(panels, written, colors={kind.title: kind.color for kind in KINDS.values()})
    return written.getvalue()


def to_page(title: str, models: Mapping[str, Sequence[Row]], machine: Mapping[str, Any]) -> str:
    """One HTML page that needs no other file."""
    parts: list[str] = []
    if png := picture(models):
        source = base64.b64encode(png).decode()
        parts.append(f'<img alt="growth of memory against step time" src="data:image/png;base64,{source}">')
    for model, rows in models.items():
        head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
        body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.cells()) for row in rows)
        said = "".join(f"<p>{html.escape(line)}</p>" for line in remarks(rows))
        parts.append(f"<h2>{html.escape(model)}</h2>\n<table><tr>{head}\n{body}\n</table>\n{said}")
    about = "\n".join(f"<li>{html.escape(f'{name}: {value}')}</li>" for name, value in machine.items())
    style = (
        "body{font:15px sans-serif;margin:2em;max-width:80em}img{max-width:100%}table{border-collapse:collapse}"
        "td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}td:first-child{text-align:left}"
        "p,li{color:#555;margin:.2em 0}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<style>{style}</style>\n<h1>{html.escape(title)}</h1>\n"
        + "\n".join(parts)
        + f"\n<ul>\n{about}\n</ul></html>\n"
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read and check the options. A wrong one ends the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), nargs="+", default=FAMILIES)
    parser.add_argument("--variants", choices=list(KINDS), nargs="+", help="default: all that make sense on the device")
    parser.add_argument("--layers", type=int, default=24, help="t5: half of them in the encoder")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=8, help="rounds; the first ones do not count")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ssd-dir", help="directory on the SSD")
    parser.add_argument("--hardware", type=Path, help="profile to plan with; default: that of this machine")
    parser.add_argument("--max-slowdown", type=float, nargs="*", default=[], help="several: this backend runs at each")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="processes that compile at once; default: all cores")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="after this, no more rounds or models begin"
    )
    folder = Path(__file__).parent / "results"
    parser.add_argument("--results", type=Path, default=folder, help="where gpu.json and gpu.html are written")
    chosen = parser.parse_args(arguments)
    if chosen.steps < 2:
        parser.error("--steps must be at least 2: the first one compiles.")
    if chosen.jobs < 1:
        parser.error("--jobs must be at least 1.")
    chosen.options = {} if chosen.ssd_dir is None else {"ssd_dir": chosen.ssd_dir}
    try:
        choose_device(chosen.device)
        for share in chosen.max_slowdown:
            OffloadConfig(max_slowdown=share)
        chosen.directories = check_directories(chosen.ssd_dir)
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    if chosen.variants is None:
        chosen.variants = [name for name, kind in KINDS.items() if chosen.device in kind.devices]
        if "ssdtrain-kvikio" in chosen.variants and not has_kvikio():
            chosen.variants.remove("ssdtrain-kvikio")
    return chosen


def save_hardware(chosen: argparse.Namespace, console: Console) -> Path:
    """Measure the hardware once, alone: processes that compile at the same time would disturb each other."""
    console.print("Measuring the hardware, unless a profile is stored.")
    path = chosen.results / "gpu-hardware.json"
    path.write_text(load_hardware(chosen.device, chosen.ssd_dir).to_json() + "\n")
    if chosen.device == "cuda":
        torch.cuda.empty_cache()
    return path.resolve()


def main(arguments: list[str]) -> int:
    chosen = parse(arguments)
    began_s = time.monotonic()
    console = Console()
    chosen.results.mkdir(exist_ok=True, parents=True)
    options = chosen.options | {"hardware": str(chosen.hardware or save_hardware(chosen, console))}
    sizes = {name: getattr(chosen, name) for name in ("layers", "hidden", "batch", "sequence", "vocab", "dtype")}
    run = Run(**sizes, device=chosen.device, optimizer="adamw", hashed_steps=HASHED_STEPS, options=options)
    models = {
        model: rows_of(dataclasses.replace(run, model=model), chosen.variants, chosen.max_slowdown)
        for model in chosen.model
    }
    size = len(next(iter(models.values())))
    waves = waves_of(list(models), size, chosen.jobs)
    # A process that compiles alone starts many others for that. Here, the cores have work without them.
    threads = max(1, len(os.sched_getaffinity(0)) // min(chosen.jobs, size * len(waves[0])))
    os.environ.setdefault(COMPILE_THREADS, str(threads))
    machine = bench.describe_machine(chosen.device, chosen.directories) | {"cuda": torch.version.cuda}
    title = f"{run.layers} layers, hidden {run.hidden}, batch {run.batch} x {run.sequence}, {run.dtype}, {run.device}"
    done: dict[str, list[Row]] = {}

    def goes_on() -> bool:
        return time.monotonic() - began_s < chosen.limit_s

    with Progress(*progress_columns(), console=console) as progress:
        bar = progress.add_task("compiling", total=sum(map(len, models.values())) * (chosen.steps + 1))

        def on_step(run: Run, step: Step) -> None:
            which = "compiled" if step.index == 0 else f"step {step.index + 1}"
            progress.update(bar, description=f"{run.model}, {run.variant}, {which}", advance=1)

        def on_model(model: str, rows: list[Row]) -> None:
            done[model] = rows
            Console(width=max(console.width, 180)).print(render(f"{model}, {title}", rows))
            plain = {name: [row.to_plain() for row in its_rows] for name, its_rows in done.items()}
            seconds = time.monotonic() - began_s
            written = machine | {"seconds": seconds, "models": plain}
            (chosen.results / "gpu.json").write_text(json.dumps(written, indent=2) + "\n")
            (chosen.results / "gpu.html").write_text(to_page(f"GPU: {title}", done, machine))

        for wave in waves:
            if goes_on():
                measure(
                    {model: models[model] for model in wave},
                    steps=chosen.steps,
                    jobs=chosen.jobs,
                    on_step=on_step,
                    on_model=on_model,
                    goes_on=goes_on,
                )
    for model in models.keys() - done.keys():
        console.print(f"{model} was not measured: --limit-s.")
    for name in ("gpu.json", "gpu.html"):
        console.print(f"Results: {(chosen.results / name).resolve()}", highlight=False, soft_wrap=True)
    return 0 if done and all(row.good for rows in done.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
