"""The demo: train one GPT-2 twice on the same text, with plain Inductor and with offloading, and compare.

Each of the two is trained in two fresh processes: one measures time, the other memory. All four see the same weights
and the same batches, so the losses of every step and all gradients must agree to the bit. The two that measure time
take turns, step by step; those that measure memory run one after the other.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ssdtrain_fx.studies.measure import Run, Step, Variant, Worker, median_ms, median_ratio, take_turns
from ssdtrain_fx.units import format_bytes

MEMORY_STEPS = 3
"""Steps of a memory run: the first compiles, the later ones count."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What one variant did, by both of its processes."""

    variant: Variant
    timed: list[Step]
    sampled: list[Step]

    @property
    def peak_bytes(self) -> int:
        return self._highest.peak_bytes

    @property
    def process_peak_bytes(self) -> int:
        """Everything that the process holds at the peak: also parameters and the staging memory of the backend."""
        return self._highest.start_bytes + self._highest.peak_bytes

    @property
    def course(self) -> list[tuple[float, int]]:
        return self.sampled[-1].samples

    @property
    def _highest(self) -> Step:
        return max(self.sampled[1:], key=lambda step: step.peak_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Both runs, and whether they computed the same."""

    run: Run
    plain: Trained
    offloaded: Trained

    @property
    def losses_equal(self) -> list[bool]:
        pairs = zip(self.plain.timed, self.offloaded.timed, strict=True)
        return [a.loss_hex == b.loss_hex for a, b in pairs]

    @property
    def gradients_equal(self) -> bool:
        """All gradients of all steps, in the runs that measured time and in those that measured memory."""
        pairs = [*zip(self.plain.timed, self.offloaded.timed, strict=True)]
        pairs += zip(self.plain.sampled, self.offloaded.sampled, strict=True)
        return all(a.gradients == b.gradients for a, b in pairs)

    @property
    def equal(self) -> bool:
        return all(self.losses_equal) and self.gradients_equal


def default_run(device: str) -> Run:
    """A GPT-2 that trains in seconds per step here: the more memory there is, the larger the batch."""
    # On a CPU the processor itself copies, so every byte costs time: with the default much would stay in memory.
    options: dict[str, Any] = {"max_slowdown": 0.01 if device == "cuda" else 0.1}
    run = Run(model="gpt2", layers=12, vocab=256, text=True, optimizer="adamw", device=device, options=options)
    if device == "cuda":
        roomy = torch.cuda.mem_get_info()[0] > 20 << 30
        return dataclasses.replace(run, hidden=768, sequence=1024, batch=16 if roomy else 4)
    roomy = _available_memory_bytes() > 8 << 30 and (os.cpu_count() or 1) > 1
    return dataclasses.replace(run, hidden=384, sequence=512, batch=8 if roomy else 2)


def count_steps(steps: int) -> int:
    """Steps of all four runs together, for a progress bar."""
    return 2 * (steps + MEMORY_STEPS)


def compare(
    run: Run, *, steps: int, offloading: Variant = "ssdtrain", on_step: Callable[[str, Step | None], None]
) -> Comparison:
    """Train `run` without and with offloading.

    `on_step` is called with a line for people when processes start (step: None) and after each of their steps.

    Raises:
        WorkerError: a process failed.
    """

    plain_run, offloaded_run = (dataclasses.replace(run, variant=variant) for variant in ("inductor", offloading))
    # Time first: the memory runs then find the compiled graphs in Inductor's cache.
    on_step("step time (compiling)", None)
    with Worker(plain_run) as plain, Worker(offloaded_run) as offloaded:
        timed = take_turns(
            [plain, offloaded], lambda worker, step: on_step(f"step time, {worker.run.variant}", step), steps=steps
        )
    sampled: list[list[Step]] = []
    for one in (plain_run, offloaded_run):
        title = f"memory, {one.variant}"
        on_step(title, None)
        with Worker(dataclasses.replace(one, measure="memory")) as worker:
            sampled += take_turns([worker], lambda _, step, title=title: on_step(title, step), steps=MEMORY_STEPS)
    return Comparison(
        run=run,
        plain=Trained(variant=plain_run.variant, timed=timed[0], sampled=sampled[0]),
        offloaded=Trained(variant=offloaded_run.variant, timed=timed[1], sampled=sampled[1]),
    )


def render_table(comparison: Comparison) -> Table:
    """Losses side by side, then memory, time and traffic."""
    plain, offloaded = comparison.plain, comparison.offloaded
    table = Table(title=_title(comparison.run), title_style="bold")
    table.add_column("")
    table.add_column(plain.variant, justify="right")
    table.add_column(offloaded.variant, justify="right")
    table.add_column("", justify="right")
    for a, b, same in zip(plain.timed, offloaded.timed, comparison.losses_equal, strict=True):
        table.add_row(f"loss, step {a.index + 1}", f"{a.loss:.7f}", f"{b.loss:.7f}", _equal(same))
    table.add_row(
        "all gradients, SHA-256",
        plain.timed[-1].gradients[:12],
        offloaded.timed[-1].gradients[:12],
        _equal(comparison.gradients_equal),
        end_section=True,
    )
    table.add_row("peak memory of a step", *_both(plain, offloaded, "peak_bytes"))
    table.add_row("whole process at its peak", *_both(plain, offloaded, "process_peak_bytes"), end_section=True)
    table.add_row(
        "step time (median)",
        f"{median_ms(plain.timed):,.0f} ms",
        f"{median_ms(offloaded.timed):,.0f} ms",
        "",
    )
    # Where other programs run, this tells more than the two medians: each pair of steps met the same conditions.
    table.add_row("change pair by pair (median)", "", "", f"{median_ratio(offloaded.timed, plain.timed) - 1:+.1%}")
    allowed = comparison.run.options.get("max_slowdown")
    if allowed is not None:
        table.add_row("allowed (max_slowdown)", "", "", f"{allowed:+.1%}")
    last = offloaded.timed[-1].statistics
    table.add_row("waiting for the SSD, last step", "", f"{1e3 * last.stall_s:,.0f} ms", "")
    table.add_row("written to SSD, last step", "", format_bytes(last.bytes_written), "")
    table.add_row("read from SSD, last step", "", format_bytes(last.bytes_read), "")
    table.add_row("path to the SSD", "", last.io_path, "")
    return table


def draw_memory(comparison: Comparison, path: Path) -> None:
    """Draw memory over one step, both runs in one picture, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    for trained, color in ((comparison.plain, "#555555"), (comparison.offloaded, "#d95f02")):
        label = f"{trained.variant}: peak {format_bytes(trained.sampled[-1].peak_bytes)}"
        times_ms = [ms for ms, _ in trained.course]
        used_mib = [size / (1 << 20) for _, size in trained.course]
        axes.plot(times_ms, used_mib, color=color, linewidth=1.8, label=label)
        axes.fill_between(times_ms, used_mib, color=color, alpha=0.12, linewidth=0)
    what = "resident memory of the process" if comparison.run.device == "cpu" else "allocated GPU memory"
    axes.set_title(f"Memory over one training step\n{_title(comparison.run)}")
    axes.set_xlabel("time since the step began [ms]; measuring memory makes it longer")
    axes.set_ylabel(f"{what},\nover its value before the step [MiB]")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper right")
    figure.savefig(path)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The whole comparison as plain values; losses as exact hexadecimal floats too."""

    def trained(value: Trained) -> dict[str, Any]:
        return {
            "variant": value.variant,
            "losses": [step.loss for step in value.timed],
            "losses_hex": [step.loss_hex for step in value.timed],
            "gradients_sha256": [step.gradients for step in value.timed],
            "step_ms": [step.duration_ms for step in value.timed],
            "median_step_ms": median_ms(value.timed),
            "peak_bytes": value.peak_bytes,
            "process_peak_bytes": value.process_peak_bytes,
            "statistics": [dataclasses.asdict(step.statistics) for step in value.timed],
            "memory_course_ms_bytes": value.course,
        }

    return {
        "equal": comparison.equal,
        "losses_equal": comparison.losses_equal,
        "gradients_equal": comparison.gradients_equal,
        "step_time_ratio": median_ratio(comparison.offloaded.timed, comparison.plain.timed),
        "run": dataclasses.asdict(comparison.run),
        "plain": trained(comparison.plain),
        "offloaded": trained(comparison.offloaded),
    }


def _title(run: Run) -> str:
    batch = f"batch {run.batch} x {run.sequence} bytes of text"
    return f"GPT-2, {run.layers} layers, hidden {run.hidden}, {batch}, {run.device}"


def _equal(same: bool) -> str:
    return "[green]equal[/]" if same else "[bold red]DIFFERENT[/]"


def _both(plain: Trained, offloaded: Trained, name: str) -> Sequence[str]:
    before, after = getattr(plain, name), getattr(offloaded, name)
    return format_bytes(before), format_bytes(after), _change(before, after)


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ""


def _available_memory_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
