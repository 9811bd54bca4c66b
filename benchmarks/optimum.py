"""Compare plans with the lowest peak that any choice can reach: whole storages, and parts of storages.

    python benchmarks/optimum.py                           # all models with two layers: twenty minutes
    python benchmarks/optimum.py --model gpt2 --layers 12  # the bounds of a large model take long

*exact* is the proven bound for every choice of keeping, offloading and recomputing whole storages, by mixed-integer
programming. *in parts* is the bound if any part of a storage could be moved and the rest kept. No plan is below it, so
moving parts can save at most the difference between the plan and this bound. Both bounds relax some rules of the
simulation (see ``ssdtrain_fx/passes/planning/solve_exactly.py``), so the true optimum is between bound and plan.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from traced_models import MODELS, SETTINGS, SIZES, Setting, TracedModel

from ssdtrain_fx.cli.common import progress_columns
from ssdtrain_fx.passes.analysis.pose_problem import pose_problem
from ssdtrain_fx.passes.decisions.propose_recomputations import pose_remakes
from ssdtrain_fx.passes.planning.solve_exactly import bound_in_parts_bytes, solve_exactly
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.units import format_bytes

LIMITED = [setting for setting in SETTINGS if setting.budget_share is None and setting.hardware.device == "cpu"]
"""The exact solver knows no budget and no host tier."""


def bounds(traced: TracedModel, setting: Setting, time_limit_s: float) -> dict[str, Any]:
    step = traced.plan(setting)
    analysis = traced.analyse(setting)
    problem = pose_problem(analysis, hardware=setting.hardware)
    remakes = pose_remakes(analysis, problem, hardware=setting.hardware, fused=True)
    limits: dict[str, Any] = {
        "max_slowdown": setting.options["max_slowdown"],
        "remakes": remakes,
        "time_limit_s": time_limit_s,
    }
    return {
        "setting": setting.name,
        "storages": len(problem.movables),
        "before_bytes": step.plan.peak_before_bytes,
        "planned_bytes": step.plan.peak_after_bytes,
        "exact_bytes": solve_exactly(problem, **limits).lower_bound_bytes,
        "in_parts_bytes": bound_in_parts_bytes(problem, **limits),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(zoo.MODELS), default=MODELS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--time-limit-s", type=float, default=30)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "optimum.json")
    chosen = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    console = Console(width=max(Console().width, 120))
    with Progress(*progress_columns(), console=console) as progress:
        bar = progress.add_task("tracing", total=len(chosen.model) * len(LIMITED))
        for model in chosen.model:
            traced = TracedModel(model, {**SIZES, "layers": chosen.layers})
            for setting in LIMITED:
                progress.update(bar, description=f"{model}, {setting.name}")
                rows.append({"model": model, **bounds(traced, setting, chosen.time_limit_s)})
                progress.update(bar, advance=1)
    table = Table(title=f"{chosen.layers} layers: planned peaks and bounds")
    for name in ("model", "setting", "storages", "without", "planned", "over exact", "over in parts"):
        table.add_column(name, justify="left" if name in ("model", "setting") else "right")
    for row in rows:
        table.add_row(
            row["model"],
            row["setting"],
            str(row["storages"]),
            format_bytes(row["before_bytes"]),
            format_bytes(row["planned_bytes"]),
            f"{row['planned_bytes'] / row['exact_bytes']:.3f}",
            f"{row['planned_bytes'] / row['in_parts_bytes']:.3f}",
        )
    console.print(table)
    chosen.json.parent.mkdir(exist_ok=True)
    chosen.json.write_text(json.dumps({"date": datetime.date.today().isoformat(), "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
