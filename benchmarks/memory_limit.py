"""Train under a memory limit that the kernel enforces: what still trains, how fast, and how large a batch can be.

    python benchmarks/memory_limit.py --model gpt2 --limit-mib 900 --limit-mib 1400
    python benchmarks/memory_limit.py --model gpt2 --limit-mib 2048 --largest-batch

A new cgroup holds each contender with everything that it starts, also the compiler. Swap is off in it. Contenders with
equal options share Inductor's cache, so only the first of them compiles; it does so without a limit, because what a
compilation needs says nothing about training. ``--cold`` compiles under the limit too.

With ``--unlimited``, each contender that trains takes turns with the same contender without a limit: the ratio says
what the limit costs. ``ssdtrain`` plans with ``max_slowdown``, which may be given: ``--option max_slowdown=0.05``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console
from rich.table import Table

from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.cli.common import parse_options
from ssdtrain_fx.studies.comparison import time_ratio
from ssdtrain_fx.studies.limited_process import NotEnforced, find_kind, limit
from ssdtrain_fx.studies.measure import Run, Step, Variant, Worker, WorkerError, counted, median_ms
from ssdtrain_fx.units import format_bytes

console = Console()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one contender did under one limit."""

    run: Run
    limit_bytes: int
    steps: list[Step]
    error: str
    """Why it ended early; "" if it made all steps."""
    unlimited: list[Step]
    """The steps of the same contender without a limit, which took turns with it; empty without ``--unlimited``."""

    @property
    def trained(self) -> bool:
        return not self.error


def train(run: Run, kind: str, limit_bytes: int, *, steps: int, unlimited: bool) -> Outcome:
    """Make ``steps`` steps under a limit."""
    made: list[Step] = []
    beside: list[Step] = []
    error = ""
    with limit(kind, limit_bytes) as prefix:
        limited = Worker(run, prefix=prefix)
        free = Worker(run) if unlimited else None
        try:
            for _ in range(steps):
                made.append(limited.step())
                if free is not None:
                    beside.append(free.step())
        except WorkerError as reason:
            error = str(reason).partition(". It wrote:")[0]
        finally:
            limited.close()
            if free is not None:
                free.close()
    return Outcome(run=run, limit_bytes=limit_bytes, steps=made, error=error, unlimited=beside)


def compile_before(run: Run) -> None:
    """Fill the compile cache without a limit."""
    with Worker(run) as worker:
        worker.step()


def largest_batch(run: Run, kind: str, limit_bytes: int, *, steps: int, cold: bool, most: int) -> tuple[int, Outcome]:
    """The largest batch that makes ``steps`` steps, found by bisection, and what happened with it. 0: not even one."""

    def attempt(batch: int) -> Outcome:
        this = dataclasses.replace(run, batch=batch)
        if not cold:
            compile_before(this)
        outcome = train(this, kind, limit_bytes, steps=steps, unlimited=False)
        console.print(f"{run.title}, batch {batch}: {outcome.error or 'trains'}")
        return outcome

    best, best_outcome, batch = 0, attempt(1), 1
    outcome = best_outcome
    while outcome.trained and batch <= most:
        best, best_outcome = batch, outcome
        batch *= 2
        outcome = attempt(batch)
    low, high = best, batch
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        outcome = attempt(middle)
        if outcome.trained:
            low, best_outcome = middle, outcome
        else:
            high = middle
    return low, best_outcome


def render(outcomes: Sequence[Outcome], kind: str) -> Table:
    table = Table(title=f"trained in a {kind}")
    for name in (
        "contender",
        "batch",
        "limit",
        "steps",
        "peak of the process",
        "time of a step",
        "limited / unlimited",
    ):
        table.add_column(name)
    for outcome in outcomes:
        peak = time = ratio = "-"
        if outcome.trained:
            peak = format_bytes(max(step.process_peak_bytes for step in counted(outcome.steps)))
            time = f"{median_ms(outcome.steps):,.0f} ms"
        if outcome.trained and outcome.unlimited:
            found = time_ratio(outcome.steps, outcome.unlimited)
            interval = "" if found.interval is None else f" ({found.interval[0]:.3f} to {found.interval[1]:.3f})"
            ratio = f"{found.median:.3f}{interval}"
        table.add_row(
            outcome.run.title,
            str(outcome.run.batch),
            format_bytes(outcome.limit_bytes),
            str(len(outcome.steps)) if outcome.trained else f"killed in step {len(outcome.steps) + 1}",
            peak,
            time,
            ratio,
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2")
    for name, default in (("layers", 12), ("hidden", 384), ("batch", 8), ("sequence", 512), ("vocab", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--variant", action="append", choices=get_args(Variant), help="default: inductor, ssdtrain")
    parser.add_argument("--limit-mib", type=int, action="append", required=True, help="may be repeated")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE for ssdtrain; may be repeated")
    parser.add_argument("--largest-batch", action="store_true", help="search the largest batch for each limit")
    parser.add_argument("--most", type=int, default=256, help="batch at which the search ends")
    parser.add_argument("--unlimited", action="store_true", help="compare times with a run without a limit")
    parser.add_argument("--cold", action="store_true", help="compile under the limit as well")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    chosen = parser.parse_args()
    kind = find_kind()
    if isinstance(kind, NotEnforced):
        console.print(kind.reason)
        return 1
    sizes = {name: getattr(chosen, name) for name in ("layers", "hidden", "batch", "sequence", "vocab")}
    options: dict[str, Any] = parse_options(chosen.option)
    with tempfile.TemporaryDirectory(prefix="ssdtrain-limit-") as directory:
        # All processes plan with one profile, so that they share compiled code. A busy machine stores none.
        profile = Path(directory) / "hardware.json"
        profile.write_text(OffloadConfig().load_hardware("cpu").to_json())
        outcomes = measure(chosen, kind, sizes, {"hardware": str(profile), **options})
    Console(width=max(console.width, 140)).print(render(outcomes, kind))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=1))
    return 0


def measure(chosen: argparse.Namespace, kind: str, sizes: Mapping[str, Any], options: dict[str, Any]) -> list[Outcome]:
    """All contenders under all limits."""
    outcomes: list[Outcome] = []
    for variant in chosen.variant or ["inductor", "ssdtrain"]:
        run = Run(
            model=chosen.model,
            variant=cast(Variant, variant),
            options=options if variant == "ssdtrain" else {},
            **sizes,
        )
        if not (chosen.cold or chosen.largest_batch):
            compile_before(run)
        for limit_mib in chosen.limit_mib:
            if chosen.largest_batch:
                _, outcome = largest_batch(
                    run, kind, limit_mib << 20, steps=chosen.steps, cold=chosen.cold, most=chosen.most
                )
            else:
                outcome = train(run, kind, limit_mib << 20, steps=chosen.steps, unlimited=chosen.unlimited)
            outcomes.append(outcome)
            console.print(f"{run.title}, {limit_mib} MiB: {outcome.error or 'trained'}")
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
