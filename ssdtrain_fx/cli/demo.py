"""``ssdtrain-fx demo``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ssdtrain_fx.cli.common import (
    EXIT_DIFFERENT,
    EXIT_FAILED,
    DeviceOption,
    JsonTarget,
    StepProgress,
    check_target,
    written,
)
from ssdtrain_fx.studies import demo as demonstration
from ssdtrain_fx.studies.measure import Variant, WorkerError, choose_device


def demo(
    steps: Annotated[int, typer.Option(min=2, help="Training steps of each run; the first one compiles.")] = 10,
    layers: Annotated[int | None, typer.Option(min=1, help="Default: fits the machine.")] = None,
    hidden: Annotated[int | None, typer.Option(min=64, help="A multiple of 64. Default: fits the machine.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Default: fits the machine.")] = None,
    sequence: Annotated[int | None, typer.Option(min=8, help="Bytes of text. Default: fits the machine.")] = None,
    device: DeviceOption = "auto",
    ssd_dir: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            writable=True,
            help="Directory on the SSD; several times for several drives. Default: see OffloadConfig.",
        ),
    ] = None,
    max_slowdown: Annotated[
        float | None, typer.Option(min=0, help="Share of the step time to give for memory. Default: 0.01, CPU 0.1.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all results here; - prints them.")] = None,
    png_path: Annotated[Path, typer.Option("--png", help="Picture of memory over one step.")] = Path(
        "ssdtrain-demo.png"
    ),
    seed: Annotated[int, typer.Option(help="Other weights, other text.")] = 0,
    backend: Annotated[Variant, typer.Option(hidden=True, help="What to compare with plain Inductor.")] = "ssdtrain",
) -> None:
    """Train a byte-level GPT-2 with plain Inductor and with offloading; compare loss, memory and time.

    Exit code: 0 all equal to the bit, 1 a loss or gradient differs, 2 wrong usage, 3 a run failed.
    """
    target = JsonTarget(json_path)
    console = target.console
    if hidden is not None and hidden % 64:
        raise typer.BadParameter(f"{hidden} is not a multiple of 64 (one attention head each).", param_hint="--hidden")
    check_target(png_path, "--png")
    try:
        run = demonstration.default_run(choose_device(device))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    chosen: dict[str, Any] = {"layers": layers, "hidden": hidden, "batch": batch, "sequence": sequence, "seed": seed}
    run = dataclasses.replace(run, **{name: value for name, value in chosen.items() if value is not None})
    if ssd_dir:
        run = dataclasses.replace(run, options={**run.options, "ssd_dir": [str(path) for path in ssd_dir]})
    if max_slowdown is not None:
        run = dataclasses.replace(run, options={**run.options, "max_slowdown": max_slowdown})

    console.print(demonstration.describe(run, steps=steps, offloading=backend), highlight=False, soft_wrap=True)
    try:
        with StepProgress(console, demonstration.plan(run, steps=steps, offloading=backend)) as progress:
            comparison = demonstration.compare(run, steps=steps, offloading=backend, on_step=progress.step_done)
    except WorkerError as error:
        console.print("[bold red]A run failed.[/]")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAILED) from error

    console.print(demonstration.render_table(comparison))
    target.write(json.dumps(demonstration.to_json(comparison), indent=2))
    with written(png_path, "Memory over one step", console):
        demonstration.draw(comparison, png_path)
    if not comparison.equal:
        console.print("[bold red]The runs do not agree to the bit.[/]")
        console.print(str(comparison.difference), markup=False, highlight=False, soft_wrap=True)
        console.print("The steps after a difference start from other weights, so they differ too.", soft_wrap=True)
        raise typer.Exit(EXIT_DIFFERENT)
