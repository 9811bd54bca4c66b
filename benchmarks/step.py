"""Paired comparison of one training step: plain Inductor, Inductor with checkpointing, and ssdtrain.

    python benchmarks/step.py --model gpt2 --layers 12 --hidden 384 --batch 8 --sequence 512 --vocab 2048

Every variant runs in a process of its own. For time, the processes take turns (A B C A B C ...) and the median of the
per-round ratios is reported, so that what else the machine does cancels out. Memory is measured in a second pass, one
process at a time. Every step has another batch, the same for all variants, and the losses and gradients of every step
are compared to the bit. (`checkpoint` recomputes what Inductor then fuses differently; where its bits differ, the table
says so and the exit code stays 0. For `ssdtrain` a difference is an error: exit code 1.)
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table

from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.measure import (
    Run,
    Step,
    Variant,
    Worker,
    WorkerError,
    choose_device,
    median_ms,
    median_ratio,
    take_turns,
)
from ssdtrain_fx.runtime.directory import check_directory, file_system_type
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.units import format_bytes
from ssdtrain_fx.zoo import MODELS

MEMORY_STEPS = 3
BASE: Variant = "inductor"


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


def measure(runs: list[Run], *, steps: int, console: Console) -> list[Result]:
    """Time all runs in turns, then the memory of each.

    Raises:
        WorkerError: a worker failed.
    """

    def show(worker: Worker, step: Step) -> None:
        memory = f"  peak {format_bytes(step.peak_bytes)}" if worker.run.measure == "memory" else ""
        line = f"{worker.run.measure:6} step {step.index}  {worker.run.variant:10} {step.duration_ms:9,.1f} ms"
        console.print(f"{line}  loss {step.loss:.6f}{memory}", style="dim", highlight=False)

    timed = _in_turns(runs, steps, show)
    sampled = [_in_turns([dataclasses.replace(run, measure="memory")], MEMORY_STEPS, show)[0] for run in runs]
    return [Result(run=run, timed=a, sampled=b) for run, a, b in zip(runs, timed, sampled, strict=True)]


def render_table(results: list[Result]) -> Table:
    base = results[0]
    run = base.run
    size = f"{run.layers} layers, hidden {run.hidden}, batch {run.batch} x {run.sequence}, dropout {run.dropout}"
    table = Table(title=f"{run.model}, {size}, {run.dtype}, {run.device}")
    table.add_column("")
    for result in results:
        table.add_column(result.run.variant, justify="right")

    def add_row(name: str, show: Callable[[Result], str], *, end_section: bool = False) -> None:
        table.add_row(name, *map(show, results), end_section=end_section)

    add_row("step time (median)", lambda result: f"{median_ms(result.timed):,.1f} ms")
    add_row(
        f"ratio to {base.run.variant}",
        lambda result: f"{median_ratio(result.timed, base.timed):.3f}",
        end_section=True,
    )
    add_row("peak memory of a step", lambda result: format_bytes(result.peak_bytes))
    add_row(
        f"ratio to {base.run.variant}",
        lambda result: f"{result.peak_bytes / max(1, base.peak_bytes):.3f}",
        end_section=True,
    )
    add_row("written to SSD, last step", lambda result: format_bytes(_last(result).bytes_written))
    add_row("read from SSD, last step", lambda result: format_bytes(_last(result).bytes_read))
    add_row("waiting for the SSD", lambda result: f"{1e3 * _last(result).stall_s:,.1f} ms")
    add_row("path to the SSD", lambda result: _last(result).io_path, end_section=True)
    add_row("losses, gradients", lambda result: "-" if result is base else _bits(result, base))
    return table


def _last(result: Result) -> Statistics:
    return result.timed[-1].statistics


def _bits(result: Result, base: Result) -> str:
    return "equal" if result.equals(base) else "different"


def to_json(results: list[Result], ssd_dir: str) -> dict[str, Any]:
    base = results[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if base.run.device == "cuda" else None,
            "kernel": platform.release(),
            "ssd_file_system": file_system_type(ssd_dir),
            "ssd_block_device": _block_device(ssd_dir),
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
        "results": [
            {
                "run": dataclasses.asdict(result.run),
                "median_step_ms": median_ms(result.timed),
                "step_time_ratio": median_ratio(result.timed, base.timed),
                "peak_bytes": result.peak_bytes,
                "peak_ratio": result.peak_bytes / max(1, base.peak_bytes),
                "process_bytes_before_step": result.sampled[-1].start_bytes,
                "equal_to_inductor": result.equals(base),
                "step_ms": [step.duration_ms for step in result.timed],
                "losses_hex": [step.loss_hex for step in result.timed],
                "gradients_sha256": [step.gradients for step in result.timed],
                "statistics_last_step": dataclasses.asdict(result.timed[-1].statistics),
            }
            for result in results
        ],
    }


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Paired comparison of step time and memory: inductor, ssdtrain, checkpoint.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", choices=list(MODELS), default="gpt2")
    parser.add_argument("--layers", type=int, default=12, help="t5: half of them in the encoder")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--variants", nargs="+", choices=get_args(Variant), default=list(get_args(Variant)))
    parser.add_argument("--steps", type=int, default=8, help="rounds; the first one compiles and does not count")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ssd-dir", help="directory on the SSD")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="option of the backend")
    parser.add_argument("--json", type=Path, help="where results go (benchmarks/results/MODEL-DATE.json if not given)")
    chosen = parser.parse_args(arguments)
    if chosen.steps < 2:
        parser.error("--steps must be at least 2: the first one compiles.")
    try:
        chosen.device = choose_device(chosen.device)
        chosen.options = _parse_options(chosen.option)
        if chosen.ssd_dir is not None:
            chosen.options["ssd_dir"] = str(Path(chosen.ssd_dir).resolve())
        OffloadConfig.from_options(chosen.options)
        chosen.ssd_dir = check_directory(chosen.options.get("ssd_dir"))
    except ValueError as error:
        parser.error(str(error))
    return chosen


def main(arguments: list[str]) -> int:
    chosen = parse_arguments(arguments)
    run = Run(
        **{name: getattr(chosen, name) for name in ("model", "layers", "hidden", "batch", "sequence", "vocab")},
        **{name: getattr(chosen, name) for name in ("dropout", "dtype", "device", "seed", "options")},
    )
    variants: list[Variant] = [BASE, *(variant for variant in dict.fromkeys(chosen.variants) if variant != BASE)]
    console = Console()
    try:
        results = measure(
            [dataclasses.replace(run, variant=variant) for variant in variants], steps=chosen.steps, console=console
        )
    except WorkerError as error:
        sys.exit(str(error))
    console.print(render_table(results))
    written = to_json(results, chosen.ssd_dir)
    path: Path = chosen.json or Path(__file__).parent / "results" / f"{run.model}-{written['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=2) + "\n")
    console.print(f"Results: {path.resolve()}", highlight=False, soft_wrap=True)
    different = [result for result in results if result.run.variant == "ssdtrain" and not result.equals(results[0])]
    return 1 if different else 0


def _in_turns(runs: list[Run], steps: int, show: Any) -> list[list[Step]]:
    workers: list[Worker] = []
    try:
        for run in runs:
            workers.append(Worker(run))
            # One after the other: two that compile or build at once would disturb each other.
            workers[-1].wait_ready()
        return take_turns(workers, show, steps=steps)
    finally:
        for worker in workers:
            worker.close()


def _parse_options(pairs: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"--option {pair!r} has no '='; expected NAME=VALUE.")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _block_device(directory: str) -> str:
    """Kernel name of the disk below a directory, such as "nvme0n1p2"; "unknown" where the kernel does not tell."""
    number = Path(directory).stat().st_dev
    entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return entry.resolve().name if entry.exists() else "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
