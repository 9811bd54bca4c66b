"""The demo: train one GPT-2 twice on the same text, with plain Inductor and with offloading, and compare.

Each of the two is trained in a separate process. Both see the same weights and the same batches, so the losses of every
step and all gradients must agree to the bit. The two take turns, step by step. After each pair of steps the results are
compared while both processes still hold them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ssdtrain_fx.accelerators import device_functions
from ssdtrain_fx.studies.comparison import (
    CONFIDENCE,
    Difference,
    TimeRatio,
    find_difference,
    format_change,
    time_ratio,
)
from ssdtrain_fx.studies.measure import (
    MEMORY_ROWS,
    Measurement,
    Run,
    Step,
    Turn,
    Variant,
    Worker,
    notes,
    plan_turns,
    take_turns,
)
from ssdtrain_fx.studies.memory_picture import draw_memory
from ssdtrain_fx.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Both runs, and whether they computed the same."""

    run: Run
    plain: Measurement
    offloaded: Measurement
    difference: Difference | None
    """The first difference, where there is one."""

    @property
    def equal(self) -> bool:
        """Whether every loss and every gradient of every step agrees to the bit."""
        return self.difference is None

    @property
    def losses_equal(self) -> list[bool]:
        pairs = zip(self.plain.steps, self.offloaded.steps, strict=True)
        return [a.loss_hex == b.loss_hex for a, b in pairs]

    @property
    def gradients_equal(self) -> bool:
        return self.plain.gradients_digest == self.offloaded.gradients_digest

    @property
    def time_ratio(self) -> TimeRatio:
        return time_ratio(self.offloaded.steps, self.plain.steps)


def default_run(device: str) -> Run:
    """A GPT-2 that trains in seconds per step here: the more memory there is, the larger the batch."""
    # On a CPU the processor itself copies, so every byte costs time: with the default much would stay in memory.
    options: dict[str, Any] = {"max_slowdown": 0.1 if device == "cpu" else 0.01}
    run = Run(model="gpt2", layers=12, vocab=256, text=True, optimizer="adamw", device=device, options=options)
    if device != "cpu":
        roomy = device_functions(device).mem_get_info()[0] > 20 << 30
        return dataclasses.replace(run, hidden=768, sequence=1024, batch=16 if roomy else 4)
    roomy = _available_memory_bytes() > 8 << 30 and (os.cpu_count() or 1) > 1
    return dataclasses.replace(run, layers=4, hidden=384, sequence=512, batch=8 if roomy else 2)


def describe(run: Run, *, steps: int, offloading: Variant) -> str:
    """What `compare` is going to do, for people."""
    return (
        f"{_title(run)}. It is trained with plain Inductor and with {offloading}, each in a separate process: {steps} "
        "steps in turns, then one more of each to draw the course of memory. This takes a few minutes; the first step "
        "of each process compiles."
    )


def plan(run: Run, *, steps: int, offloading: Variant) -> list[Turn]:
    """The steps that `compare` is going to make, in their order."""
    return plan_turns(_runs(run, offloading), steps)


def compare(run: Run, *, steps: int, offloading: Variant, on_step: Callable[[Run, Step], None]) -> Comparison:
    """Train `run` without and with offloading.

    Raises:
        WorkerError: a process failed.
    """
    difference: Difference | None = None

    def compare_round(workers: Sequence[Worker], round_steps: Sequence[Step]) -> None:
        nonlocal difference
        (plain, offloaded), (base_step, step) = workers, round_steps
        difference = difference or find_difference(offloaded, plain, step, base_step)

    plain, offloaded = take_turns(_runs(run, offloading), steps=steps, on_step=on_step, on_round=compare_round)
    return Comparison(run=run, plain=plain, offloaded=offloaded, difference=difference)


def _runs(run: Run, offloading: Variant) -> list[Run]:
    variants: tuple[Variant, ...] = ("inductor", offloading)
    return [dataclasses.replace(run, variant=variant) for variant in variants]


def render_table(comparison: Comparison) -> Table:
    """Losses side by side, then memory, time and traffic."""
    plain, offloaded = comparison.plain, comparison.offloaded
    table = Table(title=_title(comparison.run), title_style="bold")
    table.add_column("")
    table.add_column(plain.run.variant, justify="right")
    table.add_column(offloaded.run.variant, justify="right")
    table.add_column("", justify="right")
    for a, b, same in zip(plain.steps, offloaded.steps, comparison.losses_equal, strict=True):
        table.add_row(f"loss, step {a.index + 1}", f"{a.loss:.7f}", f"{b.loss:.7f}", _equal(same))
    table.add_row(
        "all gradients, SHA-256",
        plain.gradients_digest[:12],
        offloaded.gradients_digest[:12],
        _equal(comparison.gradients_equal),
        end_section=True,
    )
    for name, of in MEMORY_ROWS:
        before, after = of(plain), of(offloaded)
        table.add_row(name, format_bytes(before), format_bytes(after), _change(before, after))
    table.add_section()
    table.add_row(
        "step time (median)",
        f"{plain.median_ms:,.0f} ms",
        f"{offloaded.median_ms:,.0f} ms",
        "",
    )
    # Where other programs run, this tells more than the two medians: each pair of steps met the same conditions.
    ratio = comparison.time_ratio
    table.add_row("change pair by pair (median)", "", "", f"{ratio.median - 1:+.1%}")
    table.add_row(
        f"  {CONFIDENCE:.0%} interval", "", "-" if ratio.interval is None else format_change(ratio.interval), ""
    )
    allowed = comparison.run.options.get("max_slowdown")
    if allowed is not None:
        table.add_row("allowed (max_slowdown)", "", "", f"{allowed:+.1%}")
    table.add_row("page faults per step (median)", f"{plain.page_faults:,.0f}", f"{offloaded.page_faults:,.0f}", "")
    last = offloaded.steps[-1].statistics
    table.add_row("waiting for the SSD, last step", "", f"{1e3 * last.stall_s:,.0f} ms", "")
    table.add_row("written to SSD, last step", "", format_bytes(last.bytes_written), "")
    table.add_row("read from SSD, last step", "", format_bytes(last.bytes_read), "")
    table.add_row("path to the SSD", "", last.io_path, "")
    table.caption = "\n".join([*notes([plain, offloaded]), *filter(None, [ratio.doubt])])
    return table


def draw(comparison: Comparison, path: Path) -> None:
    """Draw memory over one step, both runs in one picture, as a PNG."""
    draw_memory([comparison.plain, comparison.offloaded], path, title=_title(comparison.run))


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The whole comparison as plain values; losses as exact hexadecimal floats too."""

    def trained(value: Measurement) -> dict[str, Any]:
        return {
            "variant": value.run.variant,
            "losses": [step.loss for step in value.steps],
            **value.to_plain(),
            "statistics": [dataclasses.asdict(step.statistics) for step in value.steps],
        }

    return {
        "equal": comparison.equal,
        "losses_equal": comparison.losses_equal,
        "gradients_equal": comparison.gradients_equal,
        "difference": None if comparison.difference is None else dataclasses.asdict(comparison.difference),
        "step_time_ratio": comparison.time_ratio.median,
        "step_time_ratio_interval": comparison.time_ratio.interval,
        "step_time_doubt": comparison.time_ratio.doubt,
        "run": dataclasses.asdict(comparison.run),
        "plain": trained(comparison.plain),
        "offloaded": trained(comparison.offloaded),
    }


def _title(run: Run) -> str:
    batch = f"batch {run.batch} x {run.sequence} bytes of text"
    return f"GPT-2, {run.layers} layers, hidden {run.hidden}, {batch}, {run.device}"


def _equal(same: bool) -> str:
    return "[green]equal[/]" if same else "[bold red]DIFFERENT[/]"


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ""


def _available_memory_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
