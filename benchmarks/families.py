"""Compare plain Inductor and ssdtrain for one model of each family: memory of the process, time, bits.

    python benchmarks/families.py                                        # half an hour
    python benchmarks/families.py --model vit --model mixtral --steps 8  # these only, with wider intervals
    python benchmarks/families.py --markdown benchmarks/stored/families.json     # stored results: time against plan

Each family runs in two processes that take turns, step by step, as in ``ssdtrain-fx bench``. Both have the environment
of the caller.

Afterwards the model is explained. *Plan* is the activation peak that the plan predicts, and *floor* is the lowest peak
if everything moved at any cost in time. *Parts* says what the planned peak consists of. *Planned time* is the step time
that the plan predicts, and *compute* is the predicted time of a step that moves nothing; both are relative to the
measured step of plain Inductor.

The printed table is Markdown. Exit code: 0 every loss and gradient is equal to the bit, 1 one differs, 3 a run failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from result_tables import Rows, markdown
from rich import box
from rich.console import Console
from rich.table import Table

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.cli.common import EXIT_DIFFERENT, EXIT_FAILED, JsonTarget, parse_options
from ssdtrain_fx.passes.planning.plan import Plan
from ssdtrain_fx.runtime.storage.directory import check_directories
from ssdtrain_fx.studies import bench, zoo
from ssdtrain_fx.studies.comparison import CONFIDENCE, time_ratio
from ssdtrain_fx.studies.measure import Measurement, Run, WorkerError, take_turns
from ssdtrain_fx.studies.own_models import is_own_model
from ssdtrain_fx.units import format_bytes

FAMILIES = ("gpt2", "bert", "t5", "llama", "mixtral", "vit")
SIZES: Mapping[str, int] = {"layers": 12, "hidden": 384, "batch": 8, "sequence": 512, "vocab": 2048}
SIZES_OF_T5: Mapping[str, int] = {"sequence": 256}
"""Its encoder and its decoder have 6 layers each, and both read a sequence of this length."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One family."""

    inductor: Measurement
    ssdtrain: Measurement
    plan: Plan

    @property
    def is_equal(self) -> bool:
        return self.ssdtrain.equals(self.inductor)

    @property
    def planned_time(self) -> float:
        """Step time relative to the measured one of plain Inductor, if the plan is right about the time it exposes."""
        return 1 + 1e3 * self.plan.exposed_s / self.inductor.median_ms

    @property
    def planned_compute(self) -> float:
        """Predicted time of a step that moves nothing, relative to the measured one. It has no optimizer."""
        return 1e3 * self.plan.step_s / self.inductor.median_ms

    @property
    def cells(self) -> list[str]:
        run, base, ours, plan = self.ssdtrain.run, self.inductor, self.ssdtrain, self.plan
        ratio = time_ratio(ours.steps, base.steps)
        last = ours.steps[-1].statistics
        parts = ", ".join(f"{part.role} {format_bytes(part.size_bytes)}" for part in plan.peak_after.parts)
        return [
            run.model if is_own_model(run.model) else f"{run.model}, {run.batch} x {run.sequence}",
            f"{format_bytes(base.process_peak_bytes)}, {format_bytes(base.growth_bytes)}",
            f"{format_bytes(ours.process_peak_bytes)}, {format_bytes(ours.growth_bytes)}",
            f"{ours.process_peak_bytes / base.process_peak_bytes:.3f}",
            f"{ours.growth_bytes / base.growth_bytes:.3f}",
            f"{ratio.median:.3f} ({bench.format_interval(ratio.interval)})",
            f"{self.planned_time:.3f}",
            f"{self.planned_compute:.2f}",
            format_bytes(plan.peak_after_bytes),
            format_bytes(plan.floor_bytes),
            parts,
            f"{format_bytes(last.bytes_written)}, {format_bytes(last.bytes_read)}",
            f"{base.page_faults:,.0f}, {ours.page_faults:,.0f}",
            "equal" if self.is_equal else "different",
        ]


def measure(run: Run, *, steps: int, console: Console) -> Row:
    """Run one family, then explain it."""
    inductor, ssdtrain = take_turns([dataclasses.replace(run, variant="inductor"), run], steps=steps)
    console.print(f"{run.model}: measured", style="dim")
    torch.manual_seed(run.seed)
    module, make_batch = zoo.build(run.model, **{name: getattr(run, name) for name in SIZES})
    batch = make_batch(torch.Generator().manual_seed(run.seed))
    report = ssdtrain_fx.explain(module, *batch, config=OffloadConfig.from_options(run.options))
    return Row(inductor=inductor, ssdtrain=ssdtrain, plan=report.plan)


def render(rows: list[Row]) -> Table:
    table = Table(box=box.MARKDOWN)
    for name in (
        "model",
        "Inductor: process, growth",
        "ssdtrain: process, growth",
        "process",
        "growth",
        f"time ({CONFIDENCE:.0%} interval)",
        "planned time",
        "compute",
        "plan",
        "floor",
        "parts of the plan",
        "written, read",
        "page faults: Inductor, ssdtrain",
        "bits",
    ):
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*row.cells)
    return table


def page_table(results: Sequence[Mapping[str, Any]]) -> Rows:
    """Memory, bytes moved in each direction, and step times against those that plans predicted."""
    rows = [("model", "growth", "moved", "planned", f"measured ({CONFIDENCE:.0%})", "compute")]
    for entry in results:
        _, ours = entry["results"]
        name = f"`{ours['run']['model'].rpartition(':')[2]}`"
        rows.append(
            (
                name if ours["equal_to_inductor"] else f"{name}, other bits",
                f"{ours['growth_ratio']:.2f}",
                format_bytes(ours["statistics_last_step"]["bytes_written"]),
                f"{entry['planned_time_ratio']:.3f}",
                f"{ours['step_time_ratio']:.3f} ({bench.format_interval(ours['step_time_ratio_interval'])})",
                f"{entry['planned_compute_ratio']:.2f}",
            )
        )
    return rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        action="append",
        help=f"one of {', '.join(zoo.MODELS)}, or module:callable; may be repeated; default: the first six",
    )
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=f"default: {default}")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE for ssdtrain; may be repeated")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--markdown", type=Path, help="print a table of these results, and measure nothing")
    chosen = parser.parse_args(arguments)
    if chosen.markdown is not None:
        print(markdown(page_table(json.loads(chosen.markdown.read_text()))))
        return 0
    for model in chosen.model or ():
        if model not in zoo.MODELS and not is_own_model(model):
            parser.error(f"argument --model: {model!r} is not one of {', '.join(zoo.MODELS)}")
    given = {name: getattr(chosen, name) for name in SIZES if getattr(chosen, name) is not None}
    try:
        target = JsonTarget(chosen.json)
        options: dict[str, Any] = {"max_slowdown": 0.05, **parse_options(chosen.option)}
        OffloadConfig.from_options(options)
        directories = check_directories(options.get("ssd_dir"))
    except (ValueError, typer.BadParameter) as error:
        parser.error(str(error))
    progress = Console(stderr=True)
    rows: list[Row] = []
    failures: list[str] = []
    for model in chosen.model or FAMILIES:
        sizes: dict[str, Any] = {**SIZES, **(SIZES_OF_T5 if model == "t5" else {}), **given}
        try:
            rows.append(measure(Run(model=model, options=options, **sizes), steps=chosen.steps, console=progress))
        except WorkerError as error:
            failures.append(f"{model}: {error}")
        except KeyboardInterrupt:  # what is measured is shown and written
            failures.append(f"{model}: interrupted")
            break
    Console(width=400, stderr=chosen.json == Path("-")).print(render(rows))
    results: list[dict[str, Any]] = [
        {
            **bench.to_json([row.inductor, row.ssdtrain], directories),
            "planned_peak_bytes": row.plan.peak_after_bytes,
            "floor_bytes": row.plan.floor_bytes,
            "planned_time_ratio": row.planned_time,
            "planned_compute_ratio": row.planned_compute,
        }
        for row in rows
    ]
    for measured in (measured for entry in results for measured in entry["results"]):
        del measured["memory_course_ms_bytes"]  # most of the file, and no table or picture here shows it
    target.write(json.dumps(results, indent=1))
    if failures:
        progress.print("\n".join(failures), markup=False, highlight=False, soft_wrap=True)
        return EXIT_FAILED
    return 0 if all(row.is_equal for row in rows) else EXIT_DIFFERENT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
