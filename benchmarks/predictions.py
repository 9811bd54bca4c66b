"""Is what a plan predicts right? Step time and activation peak, with ``costs="steps"``, before and after measuring.

    python benchmarks/predictions.py                                       # eight families, half an hour
    python benchmarks/predictions.py --model gpt2 --model t5 --steps 34 --json predictions.json
    python benchmarks/predictions.py --markdown predictions.json           # a table of stored results

Each family trains in two processes, one after the other. The first one plans by roofline and measures its steps. The
second one plans with what was measured. Both are compared with the plan that they carry out: the median time of forward
and backward (the optimizer is no part of a plan), with the quartiles, and the most that compiled steps allocate. What
earlier processes have measured does not count, and nothing is stored for later ones.

The exit code is 3 if a process fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from result_tables import Rows, markdown, rich_table
from rich.console import Console

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.cli.common import EXIT_FAILED, parse_options
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.units import format_bytes

MODELS = ("gpt2", "bert", "t5", "llama", "mixtral", "vit", "resnet", "mamba")
SIZES: Mapping[str, int] = {"layers": 6, "hidden": 384, "batch": 8, "sequence": 256, "vocab": 2048}
WARM_UP_STEPS = 3


def train(job: Mapping[str, Any]) -> dict[str, Any]:
    """Explain one model, train it, and return what was predicted and what was measured."""
    torch.manual_seed(0)
    module, make_batch = zoo.build(job["model"], **job["sizes"])
    batch = make_batch(torch.Generator().manual_seed(0))
    config = OffloadConfig.from_options(job["options"])
    report = ssdtrain_fx.explain(module, *batch, config=config)
    (graph,) = report.graphs
    compiled = torch.compile(module, backend=ssdtrain_fx.backend(config))

    def step() -> float:
        began_s = time.perf_counter()
        compiled(*batch).backward()
        seconds = time.perf_counter() - began_s
        module.zero_grad(set_to_none=True)
        return seconds

    for _ in range(WARM_UP_STEPS):
        step()
    ssdtrain_fx.reset_peak_memory_stats()
    before = ssdtrain_fx.statistics()
    step_s = [step() for _ in range(job["steps"])]
    seen = ssdtrain_fx.statistics().since(before)
    return {
        "roofline_ratio": graph.costs.roofline_ratio,
        "planned_compute_s": graph.plan.step_s,
        "planned_step_s": graph.plan.step_s + graph.plan.exposed_s,
        "step_s": step_s,
        "peak_without_bytes": graph.plan.peak_before_bytes,
        "planned_peak_bytes": graph.plan.peak_after_bytes,
        "peak_bytes": ssdtrain_fx.memory_stats().allocated_peak_bytes,
        "written_bytes_per_step": seen.bytes_written // job["steps"],
        "kept_for_time": seen.kept_for_time,
    }


def table(results: Sequence[Mapping[str, Any]]) -> Rows:
    """What was measured, and what the plan predicts as a share of it."""
    rows = [("model, plan", "moved", "step time (quartiles)", "predicted", "peak", "predicted")]
    for result in results:
        for plan, run in (("roofline", result["first"]), ("steps", result["second"])):
            low_s, median_s, high_s = statistics.quantiles(run["step_s"], n=4)
            time_off = run["planned_step_s"] / median_s
            peak_off = run["planned_peak_bytes"] / run["peak_bytes"]
            kept = f", {run['kept_for_time']} kept" if run["kept_for_time"] else ""
            rows.append(
                (
                    f"`{result['model'].rpartition(':')[2]}`, {plan}",
                    format_bytes(run["written_bytes_per_step"]) + kept,
                    f"{1e3 * median_s:,.0f} ms ({1e3 * low_s:,.0f} to {1e3 * high_s:,.0f})",
                    f"{time_off:.2f}",
                    f"{format_bytes(run['peak_bytes'])} of {format_bytes(run['peak_without_bytes'])}",
                    f"{peak_off:.2f}",
                )
            )
    return rows


def run_job(job: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """Train in a fresh process, whose measurements are stored in ``directory``."""
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    ended = subprocess.run(
        command, env={**os.environ, "SSDTRAIN_PROFILE_DIR": directory}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(ended.stdout.splitlines()[-1])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"may be repeated; default: {', '.join(MODELS)}")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--steps", type=int, default=18, help="measured steps of each process")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE for ssdtrain; may be repeated")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--markdown", type=Path, help="print a table of these results, and measure nothing")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.job is not None:
        print(json.dumps(train(chosen.job)))
        return 0
    if chosen.markdown is not None:
        print(markdown(table(json.loads(chosen.markdown.read_text()))))
        return 0
    options: dict[str, Any] = {"max_slowdown": 0.05, "costs": "steps", **parse_options(chosen.option)}
    hardware = OffloadConfig.from_options(options).load_hardware("cpu")
    results: list[dict[str, Any]] = []
    failures: list[str] = []
    progress = Console(stderr=True)
    with tempfile.TemporaryDirectory() as directory:
        profile = Path(directory, "hardware.json")
        profile.write_text(hardware.to_json())
        for model in chosen.model or MODELS:
            job = {
                "model": model,
                "sizes": {name: getattr(chosen, name) for name in SIZES},
                "steps": chosen.steps,
                "options": {**options, "hardware": str(profile)},
            }
            try:
                first = run_job(job, directory)
                results.append({"model": model, "first": first, "second": run_job(job, directory)})
            except subprocess.CalledProcessError as error:
                failures.append(f"{model}: the process ended with {error.returncode}")
                continue
            if chosen.json is not None:  # after each model, so that an interrupt loses only one
                chosen.json.write_text(json.dumps(results, indent=1))
            progress.print(f"{model}: measured", style="dim")
    Console(width=200).print(rich_table(table(results)))
    for failure in failures:
        progress.print(failure, markup=False)
    return EXIT_FAILED if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
