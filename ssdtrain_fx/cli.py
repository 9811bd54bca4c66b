"""The ``ssdtrain-fx`` command."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from ssdtrain_fx import __version__
from ssdtrain_fx import demo as demonstration
from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.errors import BudgetError, ConfigError
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.measure import Step, Variant, WorkerError, choose_device
from ssdtrain_fx.probe import MOST_BYTES_PER_S, probe_and_store
from ssdtrain_fx.reference_rates import ReferenceRates, run_fio
from ssdtrain_fx.report import explain as explain_model
from ssdtrain_fx.units import format_bytes
from ssdtrain_fx.zoo import MODELS, build

app = typer.Typer(
    help="Activations on SSD for torch.compile: same gradients to the bit, lower peak memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

EXIT_DIFFERENT = 1
EXIT_FAILED = 3


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ssdtrain-fx {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    del version  # its callback has done the work


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=2, help="Training steps of each run; the first one compiles.")] = 6,
    layers: Annotated[int | None, typer.Option(min=1, help="Default: fits the machine.")] = None,
    hidden: Annotated[int | None, typer.Option(min=64, help="A multiple of 64. Default: fits the machine.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Default: fits the machine.")] = None,
    sequence: Annotated[int | None, typer.Option(min=8, help="Bytes of text. Default: fits the machine.")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU where there is one.")] = "auto",
    ssd_dir: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, writable=True, help="Directory on the SSD. Default: see OffloadConfig."
        ),
    ] = None,
    max_slowdown: Annotated[
        float | None, typer.Option(min=0, help="Share of the step time to give for memory. Default: 0.01, CPU 0.1.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all results here.")] = None,
    png_path: Annotated[Path, typer.Option("--png", help="Picture of memory over one step.")] = Path(
        "ssdtrain-demo.png"
    ),
    seed: Annotated[int, typer.Option(help="Other weights, other text.")] = 0,
    backend: Annotated[Variant, typer.Option(hidden=True, help="What to compare with plain Inductor.")] = "ssdtrain",
) -> None:
    """Train a byte-level GPT-2 with plain Inductor and with offloading; compare loss, memory and time.

    Exit code: 0 all equal to the bit, 1 a loss or gradient differs, 2 wrong usage, 3 a run failed.
    """
    console = Console()
    if hidden is not None and hidden % 64:
        raise typer.BadParameter(f"{hidden} is not a multiple of 64 (one attention head each).", param_hint="--hidden")
    for path in (json_path, png_path):
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"The directory of {path} does not exist.")
    try:
        run = demonstration.default_run(choose_device(device))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    chosen: dict[str, Any] = {"layers": layers, "hidden": hidden, "batch": batch, "sequence": sequence, "seed": seed}
    run = dataclasses.replace(run, **{name: value for name, value in chosen.items() if value is not None})
    if ssd_dir is not None:
        run = dataclasses.replace(run, options={**run.options, "ssd_dir": str(ssd_dir)})
    if max_slowdown is not None:
        run = dataclasses.replace(run, options={**run.options, "max_slowdown": max_slowdown})

    with Progress(*_progress_columns(), console=console) as progress:
        bar = progress.add_task("", total=demonstration.count_steps(steps))

        def on_step(description: str, step: Step | None) -> None:
            if step is not None:
                description += f", loss {step.loss:.4f}"
            progress.update(bar, description=description, advance=0 if step is None else 1)

        try:
            comparison = demonstration.compare(run, steps=steps, offloading=backend, on_step=on_step)
        except WorkerError as error:
            progress.stop()
            console.print("[bold red]A run failed.[/]")
            console.print(str(error), markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(EXIT_FAILED) from error

    console.print(demonstration.render_table(comparison))
    demonstration.draw_memory(comparison, png_path)
    console.print(f"Memory over one step: {png_path.resolve()}", highlight=False, soft_wrap=True)
    if json_path is not None:
        json_path.write_text(json.dumps(demonstration.to_json(comparison), indent=2) + "\n")
        console.print(f"All results: {json_path.resolve()}", highlight=False, soft_wrap=True)
    if not comparison.equal:
        console.print("[bold red]The runs do not agree to the bit.[/]")
        raise typer.Exit(EXIT_DIFFERENT)


@app.command()
def probe(
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU where there is one.")] = "auto",
    ssd_dir: Annotated[
        Path | None, typer.Option(help="Directory on the SSD. Default: $SSDTRAIN_DIR, else the temporary directory.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the profile here too; - prints it.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds instead of half a minute.")] = False,
    reference_write: Annotated[
        float | None, typer.Option(min=0.001, help="Sequential write rate of the drive in GB/s, from its data sheet.")
    ] = None,
    reference_read: Annotated[
        float | None, typer.Option(min=0.001, help="Sequential read rate of the drive in GB/s, from its data sheet.")
    ] = None,
) -> None:
    """Measure this machine and the SSD behind a directory, and keep the profile for the planner.

    Example: ssdtrain-fx probe --ssd-dir /mnt/nvme0 --reference-write 6.9 --reference-read 7.4

    Without references the drive is compared with what fio reaches, where fio is installed. Run it while the machine is
    otherwise idle. Exit code: 0 measured, 2 wrong usage, 3 it cannot be measured or stored.
    """
    to_stdout = json_path == Path("-")
    console = Console(stderr=to_stdout)
    if json_path is not None and not to_stdout and not json_path.parent.is_dir():
        raise typer.BadParameter(f"The directory of {json_path} does not exist.", param_hint="--json")
    try:
        chosen = choose_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    try:
        with Progress(*_progress_columns(), console=console) as progress:
            bar = progress.add_task("", total=None)

            def on_step(description: str, done: int, total: int) -> None:
                progress.update(bar, description=description, completed=done, total=total)

            result = probe_and_store(chosen, None if ssd_dir is None else str(ssd_dir), quick=quick, on_step=on_step)
            reference = ReferenceRates()
            if reference_write is None or reference_read is None:
                progress.update(bar, description="fio")
                reference = run_fio(result.directory) or reference
            progress.update(bar, description="done")
    except (ConfigError, OSError) as error:
        console.print("[bold red]The machine cannot be measured.[/]")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAILED) from error
    given = {
        "write_bytes_per_s": None if reference_write is None else reference_write * 1e9,
        "read_bytes_per_s": None if reference_read is None else reference_read * 1e9,
    }
    reference = dataclasses.replace(reference, **{name: rate for name, rate in given.items() if rate is not None})
    console.print(_probe_table(result.hardware, reference))
    console.print(f"SSD directory: {result.directory}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"Kept in: {result.path}", highlight=False, soft_wrap=True, markup=False)
    if to_stdout:
        typer.echo(result.hardware.to_json())
    elif json_path is not None:
        json_path.write_text(result.hardware.to_json() + "\n")
        console.print(f"Profile: {json_path.resolve()}", highlight=False, soft_wrap=True, markup=False)


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}; or module:callable, see below.")],
    layers: Annotated[int, typer.Option(min=1)] = 4,
    hidden: Annotated[int, typer.Option(min=64)] = 256,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    sequence: Annotated[int, typer.Option(min=8, help="Tokens, or pixels along one side of an image.")] = 256,
    vocab: Annotated[int, typer.Option(min=2)] = 1024,
    dropout: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    max_slowdown: Annotated[float, typer.Option(min=0, help="Share of the step time to give for memory.")] = 0.01,
    memory_budget_bytes: Annotated[
        int | None, typer.Option("--budget", min=1, help="Activation peak in bytes to stay under, at the least cost.")
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Plan for this profile (from probe --json), not this machine."),
    ] = None,
    optimal: Annotated[bool, typer.Option("--optimal", help="Also solve exactly: how far is the plan off?")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write the plans here, one per graph.")
    ] = None,
) -> None:
    """Show what would be offloaded in one training step, and why not the rest. Nothing is computed or written.

    module:callable names a function of yours without arguments, which returns the model and a tuple of its inputs.

    Example: ssdtrain-fx explain gpt2 --layers 12 --hidden 384 --batch 8 --max-slowdown 0.05

    Exit code: 0 done, 2 wrong usage, 3 the model cannot be traced or the budget cannot be met.
    """
    console = Console()
    sizes = {"layers": layers, "hidden": hidden, "batch": batch, "sequence": sequence, "vocab": vocab}
    try:
        if ":" in model:
            module, inputs = _load_callable(model)()
        else:
            module, make_batch = build(model, **sizes, dropout=dropout)
            inputs = make_batch(torch.Generator().manual_seed(0))
    except (ValueError, ImportError, AttributeError) as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from error
    config = OffloadConfig(
        max_slowdown=max_slowdown, memory_budget_bytes=memory_budget_bytes, hardware=hardware, inner="inductor"
    )
    try:
        with console.status("tracing"):
            report = explain_model(module, *inputs, config=config)
    except (ConfigError, BudgetError) as error:
        console.print(str(error), style="bold red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAILED) from error
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    if optimal:
        for graph in report.graphs:
            with console.status("solving exactly"):
                line = graph.optimality(config)
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json_path is not None:
        json_path.write_text("[" + ",\n".join(graph.plan.to_json() for graph in report.graphs) + "]\n")
        console.print(f"Plans: {json_path.resolve()}", highlight=False, soft_wrap=True, markup=False)


def _load_callable(name: str) -> Callable[[], tuple[Any, tuple[Any, ...]]]:
    """``package.module:function``; the working directory is searched too."""
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    finally:
        sys.path.remove("")


def _progress_columns() -> tuple[ProgressColumn, ...]:
    return (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )


def _probe_table(hardware: Hardware, reference: ReferenceRates) -> Table:
    """One row per figure of the profile."""
    table = Table("What", "Measured", "Share of reference", title=f"Hardware profile: {hardware.device}")
    for column in table.columns[1:]:
        column.justify = "right"

    def row(what: str, measured: str, rate: float = 0.0, known: float | None = None) -> None:
        table.add_row(what, measured, "-" if known is None else f"{100 * rate / known:.0f} %")

    for name, rate in hardware.flops_per_s.items():
        row(name if name.endswith("convolution") else f"{name} matrix product", f"{rate / 1e9:,.1f} GFLOP/s")
    for name, rate in hardware.elements_per_s.items():
        row(f"{name} exp, tanh, erf", f"{rate / 1e9:,.2f} G elements/s")
    row("memory", f"{hardware.memory_bytes_per_s / 1e9:,.1f} GB/s")
    row("empty kernel", _microseconds(hardware.kernel_s))
    write, read = hardware.write, hardware.read
    row("SSD write", f"{write.bytes_per_s / 1e9:.2f} GB/s", write.bytes_per_s, reference.write_bytes_per_s)
    row("SSD write, latency", _microseconds(write.latency_s))
    row("SSD read", f"{read.bytes_per_s / 1e9:.2f} GB/s", read.bytes_per_s, reference.read_bytes_per_s)
    row("SSD read, latency", _microseconds(read.latency_s))
    row("kept of each when both", f"{100 * hardware.share_when_both:.0f} %")
    where = "on the compute thread" if hardware.copies_block_compute else "beside compute"
    for what, channel in (("tensor to staging", hardware.copy_out), ("staging to tensor", hardware.copy_in)):
        free = channel.bytes_per_s >= MOST_BYTES_PER_S
        row(f"{what}, {where}", "free" if free else f"{channel.bytes_per_s / 1e9:.1f} GB/s")
    row("one offload and release", _microseconds(hardware.offload_s))
    row("one reload and wait", _microseconds(hardware.reload_s))
    row("staging", format_bytes(hardware.staging_bytes))
    return table


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs"
