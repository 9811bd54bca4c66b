"""``ssdtrain-fx probe``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from ssdtrain_fx.cli.common import EXIT_FAILED, DeviceOption, JsonTarget, SsdDirOption, progress_columns
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.machine.probe import probe_and_store
from ssdtrain_fx.machine.probe_transfers import MOST_BYTES_PER_S
from ssdtrain_fx.machine.reference_rates import ReferenceRates, run_fio
from ssdtrain_fx.studies.measure import choose_device
from ssdtrain_fx.units import format_bytes


def probe(
    device: DeviceOption = "auto",
    ssd_dir: SsdDirOption = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the profile to this file; - prints it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure for a few seconds instead of half a minute.")] = False,
    reference_write: Annotated[
        float | None, typer.Option(min=0.001, help="Sequential write rate of the drive in GB/s, from its data sheet.")
    ] = None,
    reference_read: Annotated[
        float | None, typer.Option(min=0.001, help="Sequential read rate of the drive in GB/s, from its data sheet.")
    ] = None,
) -> None:
    """Measure this machine and the SSD of a directory, and store the hardware profile for the planner.

    Example: ssdtrain-fx probe --ssd-dir /mnt/nvme0 --reference-write 6.9 --reference-read 7.4

    Without references, the drive is compared with the rates of fio, if it is installed. Run this while the machine is
    otherwise idle. Exit code: 0 measured, 2 wrong usage, 3 the measurement failed or could not be stored.
    """
    target = JsonTarget(json_path)
    console = target.console
    try:
        chosen = choose_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    try:
        with Progress(*progress_columns(), console=console) as progress:
            bar = progress.add_task("", total=None)

            def on_step(description: str, done: int, total: int) -> None:
                progress.update(bar, description=description, completed=done, total=total)

            paths = [str(path) for path in ssd_dir] if ssd_dir else None
            result = probe_and_store(chosen, paths, quick=quick, on_step=on_step)
            reference = ReferenceRates()
            if reference_write is None or reference_read is None:
                progress.update(bar, description="fio")
                reference = run_fio(result.directories) or reference
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
    console.print(f"SSD directory: {', '.join(result.directories)}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"Stored in: {result.path}", highlight=False, soft_wrap=True, markup=False)
    target.write(result.hardware.to_json())


def _probe_table(hardware: Hardware, reference: ReferenceRates) -> Table:
    """Table with one row per figure of the profile."""
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
    row("rate of each while both run", f"{100 * hardware.share_when_both:.0f} %")
    where = "on the compute thread" if hardware.copies_block_compute else "beside compute"
    for what, channel in (("bytes out", hardware.copy_out), ("bytes back", hardware.copy_in)):
        free = channel.bytes_per_s >= MOST_BYTES_PER_S
        row(f"{what}, {where}", "free" if free else f"{channel.bytes_per_s / 1e9:.1f} GB/s")
    row("one offload and release", _microseconds(hardware.offload_s))
    row("one reload and wait", _microseconds(hardware.reload_s))
    if hardware.next_offload_s is not None and hardware.next_reload_s is not None:
        row("the next offload and release in a row", _microseconds(hardware.next_offload_s))
        row("the next reload and wait in a row", _microseconds(hardware.next_reload_s))
    row("staging", format_bytes(hardware.staging_bytes))
    return table


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs"
