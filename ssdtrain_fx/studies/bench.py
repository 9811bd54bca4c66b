"""Paired comparison of one training step: plain Inductor, Inductor with checkpointing, and ssdtrain.

Every variant runs in a separate process. The processes take turns (A B C A B C ...) and the median of the per-round
ratios is reported, so that what else the machine does cancels out. Time and memory are those of the same steps. Every
step has another batch, the same for all variants, and the losses and gradients of every step are compared to the bit.
(`checkpoint` recomputes what Inductor then fuses differently; where its bits differ, the table says so. For `ssdtrain`
a difference is an error. What is compiled layer by layer is compared with Inductor layer by layer, since other graphs
are fused differently.)
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table

from ssdtrain_fx.accelerators import device_functions
from ssdtrain_fx.machine.system import block_device, cpu_model
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.runtime.storage.directory import file_system_type
from ssdtrain_fx.studies.comparison import CONFIDENCE, time_ratio
from ssdtrain_fx.studies.measure import MEMORY_ROWS, Measurement, Run, Step, Variant, notes, take_turns
from ssdtrain_fx.studies.own_models import is_own_model
from ssdtrain_fx.units import format_bytes

BASE: Variant = "inductor"
"""What every other variant is compared with."""
RATIO_ROWS = 2
"""How many of the MEMORY_ROWS are also shown as a ratio: the peak of the process and its growth."""


def measure_in_pairs(
    base: Run, others: Sequence[Run], *, steps: int, on_step: Callable[[Run, Step], None]
) -> list[tuple[Measurement, Measurement]]:
    """Each of ``others`` in turns with ``base``: the results of both. At most two processes at a time, for when memory
    would not hold all of them.

    Raises:
        WorkerError: a worker failed.
    """
    pairs: list[tuple[Measurement, Measurement]] = []
    for run in others:
        its_base, one = take_turns([base, run], steps=steps, on_step=on_step)
        pairs.append((its_base, one))
    return pairs


def render_table(results: Sequence[Measurement]) -> Table:
    """One column per variant."""
    base = results[0]
    run = base.run
    table = Table(title=describe(run))
    table.add_column("")
    for result in results:
        table.add_column(result.run.title, justify="right")

    def add_row(name: str, show: Callable[[Measurement], str], *, end_section: bool = False) -> None:
        table.add_row(name, *map(show, results), end_section=end_section)

    add_row("step time (median)", lambda result: f"{result.median_ms:,.1f} ms")
    add_row(f"ratio to {base.run.variant}, pair by pair", lambda result: f"{_time(result, base):.3f}")
    add_row(
        f"{CONFIDENCE:.0%} interval",
        lambda result: format_interval(None if result is base else time_ratio(result.steps, base.steps).interval),
        end_section=True,
    )
    for index, (name, of) in enumerate(MEMORY_ROWS):
        add_row(name, lambda result, of=of: format_bytes(of(result)))
        if index < RATIO_ROWS:
            add_row(f"ratio to {base.run.variant}", lambda result, of=of: f"{of(result) / max(1, of(base)):.3f}")
    table.add_section()
    whole = next((result for result in results if result.run.title == "ssdtrain"), None)
    if whole is not None and any(result.run.regional for result in results):
        add_row("step time, ratio to ssdtrain", lambda result: f"{_time(result, whole):.3f}")
        for name, of in MEMORY_ROWS[:RATIO_ROWS]:
            add_row(f"{name}, ratio to ssdtrain", lambda result, of=of: f"{of(result) / max(1, of(whole)):.3f}")
        table.add_section()
    add_row("page faults per step (median)", lambda result: f"{result.page_faults:,.0f}")
    add_row("written to SSD, last step", lambda result: format_bytes(_last(result).bytes_written))
    add_row("read from SSD, last step", lambda result: format_bytes(_last(result).bytes_read))
    add_row("kept to save time, at most", lambda result: format_bytes(result.kept_for_time_bytes))
    add_row("waiting for the SSD", lambda result: f"{1e3 * _last(result).stall_s:,.1f} ms")
    add_row("path to the SSD", lambda result: _last(result).io_path, end_section=True)
    add_row("losses, gradients", lambda result: _bits(result, find_base(result, results)))
    doubts = ((result.run.title, _doubt(result, base)) for result in results)
    table.caption = "\n".join([*notes(results), *(f"{title}: {doubt}" for title, doubt in doubts if doubt)])
    return table


def describe(run: Run) -> str:
    """Model, sizes and device, as a title."""
    if is_own_model(run.model):
        return f"{run.model}, {run.device}"
    size = f"{run.layers} layers, hidden {run.hidden}, batch {run.batch} x {run.sequence}, dropout {run.dropout}"
    return f"{run.model}, {size}, {run.dtype}, {run.device}"


def find_base(result: Measurement, results: Sequence[Measurement]) -> Measurement:
    """The run of plain Inductor that ``result`` has to agree with to the bit."""
    return next(one for one in results if one.run.variant == BASE and one.run.regional == result.run.regional)


def format_interval(interval: tuple[float, float] | None) -> str:
    """As ``0.980 to 1.020``; ``-`` where there is none."""
    return "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"


def _time(result: Measurement, base: Measurement) -> float:
    return time_ratio(result.steps, base.steps).median


def _doubt(result: Measurement, base: Measurement) -> str:
    return "" if result is base else time_ratio(result.steps, base.steps).doubt


def _last(result: Measurement) -> Statistics:
    return result.steps[-1].statistics


def _bits(result: Measurement, base: Measurement) -> str:
    if result is base:
        return "-"
    return "equal" if result.equals(base) else "different"


def to_json(results: Sequence[Measurement], directories: Sequence[str]) -> dict[str, Any]:
    """Everything that was measured, and on what machine."""
    base = results[0]
    return {
        **describe_machine(base.run.device, directories),
        "results": [
            {**compare(result, base), "equal_to_inductor": result.equals(find_base(result, results))}
            for result in results
        ],
    }


def describe_machine(device: str, directories: Sequence[str]) -> dict[str, Any]:
    """When, on what machine and with what versions something is measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_model() or "unknown",
            "cores": os.cpu_count(),
            "gpu": None if device == "cpu" else device_functions(device).get_device_name(),
            "kernel": platform.release(),
            "ssd_file_systems": [file_system_type(directory) for directory in directories],
            "ssd_block_devices": [block_device(directory) or "unknown" for directory in directories],
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def compare(result: Measurement, base: Measurement) -> dict[str, Any]:
    """All figures of a run, and their ratios to those of ``base``."""
    return {
        "run": dataclasses.asdict(result.run),
        **result.to_plain(),
        "step_time_ratio": _time(result, base),
        "step_time_ratio_interval": time_ratio(result.steps, base.steps).interval,
        "step_time_doubt": _doubt(result, base),
        "process_peak_ratio": result.process_peak_bytes / max(1, base.process_peak_bytes),
        "growth_ratio": result.growth_bytes / max(1, base.growth_bytes),
        "statistics_last_step": dataclasses.asdict(_last(result)),
    }
