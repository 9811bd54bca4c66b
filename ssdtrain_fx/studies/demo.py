"""The demo: train one GPT-2 twice on the same text, with plain Inductor and with offloading, and compare.

Each of the two is trained in two fresh processes: one measures time, the other memory. All four see the same weights
and the same batches, so the losses of every step and all gradients must agree to the bit. The two that measure time
take turns, step by step, and after them the two that measure memory do. After each pair of steps the results are
compared while both processes still hold them.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.studies.measure import (
    CONFIDENCE,
    Difference,
    Run,
    Step,
    TimeRatio,
    Turn,
    Variant,
    Worker,
    digest_of,
    find_difference,
    format_change,
    median_ms,
    plan_turns,
    rounds,
    time_ratio,
)
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
    def gradients_digest(self) -> str:
        """One SHA-256 for all gradients of all steps of both processes."""
        return digest_of(step.gradients_digest for step in (*self.timed, *self.sampled))

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
    differences: list[Difference]
    """The first difference of the timed runs and that of the sampled runs, where there is one."""

    @property
    def equal(self) -> bool:
        """Whether every loss and every gradient of every step agrees to the bit."""
        return not self.differences

    @property
    def losses_equal(self) -> list[bool]:
        pairs = zip(self.plain.timed, self.offloaded.timed, strict=True)
        return [a.loss_hex == b.loss_hex for a, b in pairs]

    @property
    def gradients_equal(self) -> bool:
        return self.plain.gradients_digest == self.offloaded.gradients_digest

    @property
    def time_ratio(self) -> TimeRatio:
        return time_ratio(self.offloaded.timed, self.plain.timed)


def default_run(device: str) -> Run:
    """A GPT-2 that trains in seconds per step here: the more memory there is, the larger the batch."""
    # On a CPU the processor itself copies, so every byte costs time: with the default much would stay in memory.
    options: dict[str, Any] = {"max_slowdown": 0.01 if device == "cuda" else 0.1}
    run = Run(model="gpt2", layers=12, vocab=256, text=True, optimizer="adamw", device=device, options=options)
    if device == "cuda":
        roomy = torch.cuda.mem_get_info()[0] > 20 << 30
        return dataclasses.replace(run, hidden=768, sequence=1024, batch=16 if roomy else 4)
    roomy = _available_memory_bytes() > 8 << 30 and (os.cpu_count() or 1) > 1
    return dataclasses.replace(run, layers=4, hidden=384, sequence=512, batch=8 if roomy else 2)


def describe(run: Run, *, steps: int, offloading: Variant) -> str:
    """What `compare` is going to do, for people."""
    return (
        f"{_title(run)}. It is trained with plain Inductor and with {offloading}, each in a separate process: {steps} "
        f"steps in turns to measure time, then {MEMORY_STEPS} steps in turns to measure memory. This takes a few "
        "minutes; the first step of each process compiles."
    )


def plan(run: Run, *, steps: int, offloading: Variant) -> list[Turn]:
    """The steps that `compare` is going to make, in their order."""
    return [turn for runs, count in _pairs(run, steps, offloading) for turn in plan_turns(runs, count)]


def compare(run: Run, *, steps: int, offloading: Variant, on_step: Callable[[Run, Step], None]) -> Comparison:
    """Train `run` without and with offloading.

    Raises:
        WorkerError: a process failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        planned_run = _with_one_profile(run, Path(directory)) if offloading == "ssdtrain" else run
        return _compare(run, _pairs(planned_run, steps, offloading), on_step)


def _with_one_profile(run: Run, directory: Path) -> Run:
    """`run` with a hardware profile from a file, so that both of its processes make the same plan, and the second one
    finds compiled code. A busy machine is measured anew in each process otherwise."""
    path = directory / "hardware.json"
    path.write_text(OffloadConfig.from_options(run.options).load_hardware(run.device).to_json())
    return dataclasses.replace(run, options={**run.options, "hardware": str(path)})


def _compare(
    run: Run, pairs: Sequence[tuple[tuple[Run, Run], int]], on_step: Callable[[Run, Step], None]
) -> Comparison:
    differences: list[Difference] = []
    trained: list[list[list[Step]]] = []
    first_plain, first_offloaded = pairs[0][0]
    for (plain_run, offloaded_run), count in pairs:
        difference: Difference | None = None
        done: list[tuple[Step, ...]] = []
        with Worker(plain_run) as plain, Worker(offloaded_run) as offloaded:
            for pair in rounds([plain, offloaded], lambda worker, step: on_step(worker.run, step), steps=count):
                done.append(pair)
                base_step, step = pair
                difference = difference or find_difference(offloaded, plain, step, base_step)
        differences += [difference] if difference else []
        trained.append([list(its_steps) for its_steps in zip(*done, strict=True)])
    timed, sampled = trained
    return Comparison(
        run=run,
        plain=Trained(variant=first_plain.variant, timed=timed[0], sampled=sampled[0]),
        offloaded=Trained(variant=first_offloaded.variant, timed=timed[1], sampled=sampled[1]),
        differences=differences,
    )


def _pairs(run: Run, steps: int, offloading: Variant) -> list[tuple[tuple[Run, Run], int]]:
    """The two runs that take turns, and how many steps they make. First those that measure time: those that measure
    memory then find the compiled graphs in Inductor's cache."""
    plain, offloaded = (dataclasses.replace(run, variant=variant) for variant in ("inductor", offloading))
    sampled = (dataclasses.replace(plain, measure="memory"), dataclasses.replace(offloaded, measure="memory"))
    return [((plain, offloaded), steps), (sampled, MEMORY_STEPS)]


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
        plain.gradients_digest[:12],
        offloaded.gradients_digest[:12],
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
    ratio = comparison.time_ratio
    table.add_row("change pair by pair (median)", "", "", f"{ratio.median - 1:+.1%}")
    table.add_row(
        f"  {CONFIDENCE:.0%} interval", "", "-" if ratio.interval is None else format_change(ratio.interval), ""
    )
    allowed = comparison.run.options.get("max_slowdown")
    if allowed is not None:
        table.add_row("allowed (max_slowdown)", "", "", f"{allowed:+.1%}")
    last = offloaded.timed[-1].statistics
    table.add_row("waiting for the SSD, last step", "", f"{1e3 * last.stall_s:,.0f} ms", "")
    table.add_row("written to SSD, last step", "", format_bytes(last.bytes_written), "")
    table.add_row("read from SSD, last step", "", format_bytes(last.bytes_read), "")
    table.add_row("path to the SSD", "", last.io_path, "")
    table.caption = ratio.doubt
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
            "gradients_sha256": [step.gradients_digest for step in value.timed],
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
        "differences": [dataclasses.asdict(difference) for difference in comparison.differences],
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


def _both(plain: Trained, offloaded: Trained, name: str) -> Sequence[str]:
    before, after = getattr(plain, name), getattr(offloaded, name)
    return format_bytes(before), format_bytes(after), _change(before, after)


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ""


def _available_memory_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
