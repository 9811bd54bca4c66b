"""Paired comparison of one training step: plain Inductor, Inductor with checkpointing, and ssdtrain.

Every variant runs in a separate process. For time, the processes take turns (A B C A B C ...) and the median of the
per-round ratios is reported, so that what else the machine does cancels out. Memory is measured in a second pass, one
process at a time. Every step has another batch, the same for all variants, and the losses and gradients of every step
are compared to the bit. (`checkpoint` recomputes what Inductor then fuses differently; where its bits differ, the table
says so. For `ssdtrain` a difference is an error. What is compiled layer by layer is compared with Inductor layer by
layer, since other graphs are fused differently.)
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

from ssdtrain_fx.machine.system import block_device, cpu_model
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.runtime.storage.directory import file_system_type
from ssdtrain_fx.studies.measure import (
    CONFIDENCE,
    Run,
    Step,
    Turn,
    Variant,
    Worker,
    median_ms,
    median_ratio,
    plan_turns,
    take_turns,
    time_ratio,
)
from ssdtrain_fx.units import format_bytes

MEMORY_STEPS = 3
"""Steps of a memory run: the first compiles, the later ones count."""
BASE: Variant = "inductor"
"""What every other variant is compared with."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One variant, measured."""

    run: Run
    timed: list[Step]
    sampled: list[Step]

    @property
    def peak_bytes(self) -> int:
        return max(step.peak_bytes for step in self.sampled[1:])

    def equals(self, base: Result) -> bool:
        """Same loss and same gradients, to the bit, in every step of both passes."""
        pairs = [*zip(self.timed, base.timed, strict=True), *zip(self.sampled, base.sampled, strict=True)]
        return all(a.loss_hex == b.loss_hex and a.gradients == b.gradients for a, b in pairs)


def count_steps(runs: Sequence[Run], steps: int) -> int:
    """Steps that :func:`measure` makes altogether, for a progress bar."""
    return len(runs) * (steps + MEMORY_STEPS)


def plan(runs: Sequence[Run], steps: int) -> list[Turn]:
    """The steps that :func:`measure` makes, in their order."""
    turns = plan_turns(runs, steps)
    for run in runs:
        turns += plan_turns([_sampling(run)], MEMORY_STEPS)
    return turns


def measure(runs: Sequence[Run], *, steps: int, on_step: Callable[[Run, Step], None]) -> list[Result]:
    """Time all runs in turns, then the memory of each. The first run is what the others are compared with.

    Raises:
        WorkerError: a worker failed.
    """
    timed = _in_turns(runs, steps, on_step)
    sampled = [_sample(run, on_step) for run in runs]
    return [Result(run=run, timed=a, sampled=b) for run, a, b in zip(runs, timed, sampled, strict=True)]


def measure_in_pairs(
    base: Run, others: Sequence[Run], *, steps: int, on_step: Callable[[Run, Step], None]
) -> list[tuple[Result, Result]]:
    """Each of ``others`` in turns with ``base``: the results of both. At most two processes at a time, for when memory
    would not hold all of them.

    Raises:
        WorkerError: a worker failed.
    """
    base_sampled = _sample(base, on_step)
    pairs: list[tuple[Result, Result]] = []
    for run in others:
        base_timed, timed = _in_turns([base, run], steps, on_step)
        result = Result(run=run, timed=timed, sampled=_sample(run, on_step))
        pairs.append((Result(run=base, timed=base_timed, sampled=base_sampled), result))
    return pairs


def render_table(results: Sequence[Result]) -> Table:
    """One column per variant."""
    base = results[0]
    run = base.run
    size = f"{run.layers} layers, hidden {run.hidden}, batch {run.batch} x {run.sequence}, dropout {run.dropout}"
    table = Table(title=f"{run.model}, {size}, {run.dtype}, {run.device}")
    table.add_column("")
    for result in results:
        table.add_column(result.run.title, justify="right")

    def add_row(name: str, show: Callable[[Result], str], *, end_section: bool = False) -> None:
        table.add_row(name, *map(show, results), end_section=end_section)

    add_row("step time (median)", lambda result: f"{median_ms(result.timed):,.1f} ms")
    add_row(
        f"ratio to {base.run.variant}, pair by pair",
        lambda result: f"{median_ratio(result.timed, base.timed):.3f}",
    )
    add_row(
        f"{CONFIDENCE:.0%} interval",
        lambda result: format_interval(None if result is base else time_ratio(result.timed, base.timed).interval),
        end_section=True,
    )
    add_row("peak memory of a step", lambda result: format_bytes(result.peak_bytes))
    add_row(
        f"ratio to {base.run.variant}",
        lambda result: f"{result.peak_bytes / max(1, base.peak_bytes):.3f}",
        end_section=True,
    )
    whole = next((result for result in results if result.run.title == "ssdtrain"), None)
    if whole is not None and any(result.run.regional for result in results):
        add_row("step time, ratio to ssdtrain", lambda result: f"{median_ratio(result.timed, whole.timed):.3f}")
        add_row(
            "peak memory, ratio to ssdtrain",
            lambda result: f"{result.peak_bytes / max(1, whole.peak_bytes):.3f}",
            end_section=True,
        )
    add_row("page faults, last step", lambda result: f"{result.timed[-1].page_faults:,}")
    add_row("written to SSD, last step", lambda result: format_bytes(_last(result).bytes_written))
    add_row("read from SSD, last step", lambda result: format_bytes(_last(result).bytes_read))
    add_row("kept to save time", lambda result: format_bytes(_last(result).kept_for_time_bytes))
    add_row("waiting for the SSD", lambda result: f"{1e3 * _last(result).stall_s:,.1f} ms")
    add_row("path to the SSD", lambda result: _last(result).io_path, end_section=True)
    add_row("losses, gradients", lambda result: _bits(result, find_base(result, results)))
    doubts = ((result.run.title, _doubt(result, base)) for result in results)
    table.caption = "\n".join(f"{title}: {doubt}" for title, doubt in doubts if doubt)
    return table


def find_base(result: Result, results: Sequence[Result]) -> Result:
    """The run of plain Inductor that ``result`` has to agree with to the bit."""
    return next(one for one in results if one.run.variant == BASE and one.run.regional == result.run.regional)


def format_interval(interval: tuple[float, float] | None) -> str:
    """As ``0.980 to 1.020``; ``-`` where there is none."""
    return "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"


def _doubt(result: Result, base: Result) -> str:
    return "" if result is base else time_ratio(result.timed, base.timed).doubt


def _last(result: Result) -> Statistics:
    return result.timed[-1].statistics


def _bits(result: Result, base: Result) -> str:
    if result is base:
        return "-"
    return "equal" if result.equals(base) else "different"


def to_json(results: Sequence[Result], directories: Sequence[str]) -> dict[str, Any]:
    """Everything that was measured, and on what machine."""
    base = results[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_model() or "unknown",
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if base.run.device == "cuda" else None,
            "kernel": platform.release(),
            "ssd_file_systems": [file_system_type(directory) for directory in directories],
            "ssd_block_devices": [block_device(directory) or "unknown" for directory in directories],
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
        "results": [
            {
                "run": dataclasses.asdict(result.run),
                "median_step_ms": median_ms(result.timed),
                "step_time_ratio": median_ratio(result.timed, base.timed),
                "step_time_ratio_interval": time_ratio(result.timed, base.timed).interval,
                "step_time_doubt": _doubt(result, base),
                "peak_bytes": result.peak_bytes,
                "peak_ratio": result.peak_bytes / max(1, base.peak_bytes),
                "process_bytes_before_step": result.sampled[-1].start_bytes,
                "equal_to_inductor": result.equals(find_base(result, results)),
                "step_ms": [step.duration_ms for step in result.timed],
                "page_faults": [step.page_faults for step in result.timed],
                "losses_hex": [step.loss_hex for step in result.timed],
                "gradients_sha256": [step.gradients_digest for step in result.timed],
                "statistics_last_step": dataclasses.asdict(result.timed[-1].statistics),
            }
            for result in results
        ],
    }


def _sample(run: Run, on_step: Callable[[Run, Step], None]) -> list[Step]:
    (steps,) = _in_turns([_sampling(run)], MEMORY_STEPS, on_step)
    return steps


def _sampling(run: Run) -> Run:
    return dataclasses.replace(run, measure="memory")


def _in_turns(runs: Sequence[Run], steps: int, on_step: Callable[[Run, Step], None]) -> list[list[Step]]:
    workers: list[Worker] = []
    try:
        for run in runs:
            workers.append(Worker(run))
            # One after the other: two that compile or build at once would disturb each other.
            workers[-1].wait_ready()
        return take_turns(workers, lambda worker, step: on_step(worker.run, step), steps=steps)
    finally:
        for worker in workers:
            worker.close()
