"""Replay the plans of large models on a simulated GPU, and compare the time and memory with what was planned.

    python benchmarks/replayed_plans.py
    python benchmarks/replayed_plans.py --case "llama-3-8b, H100 SXM, 1 drive" --repeats 5
    python benchmarks/replayed_plans.py --markdown benchmarks/stored/replayed_plans.json

A micro-batch of the model is traced by shapes and planned for a GPU and its drives, as ``ssdtrain-fx project`` does.
The plan is then carried out on the simulated device (tests/simulated/replay.py): kernels, copies and the disk take the
planned time, and everything between is the package itself. A chunk has 32 KiB, and time is stretched, so that a step
takes ``--step-s`` seconds and what Python takes of it is small. On a real machine it counts: ``--times-slower 4`` shows
it, and what larger or smaller chunks (``--chunk-mib``) make of it.

Columns:

    moved          storages that the plan moves, and GiB of all of them
    kept           GiB that the engine kept in memory to save time: the median over steps
    peak           of the tensors that may move, without offloading, as planned with it, and as measured
    step           milliseconds of the step without offloading
    exposed        what offloading adds, as planned and as measured: the median and the range, in percent of the step
    ahead          the least and the median of how far the host was ahead of the device, in layers, where a layer begins
    late           by how much the device was late at most, of the step: if it is much, the machine was busy

Every tensor that comes back is compared with what left.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from result_tables import markdown, rich_table
from rich.console import Console
from simulated_clock import from_tests, run_on_device

DRIVE = "pm1743"
MICRO_BATCHES: Mapping[str, int] = {"gpt2-xl": 8, "llama-3-8b": 1}
CHUNK_BYTES = 32 << 10
"""Of the replay. A file has blocks of 4 KiB, which then stand for 1 MiB of a chunk of 8 MiB."""
WARM_UP_STEPS = 1
GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    model: str
    gpu: str
    drives: int
    io: str = "posix"

    @property
    def name(self) -> str:
        path = ", KvikIO" if self.io == "kvikio" else ""
        return f"{self.model}, {self.gpu}, {self.drives} drive{'s' if self.drives > 1 else ''}{path}"


CASES = tuple(
    Case(model=model, gpu=gpu, drives=drives, io=io)
    for model in MICRO_BATCHES
    for gpu, paths in (("A100 SXM 80GB", ("posix",)), ("H100 SXM", ("posix", "kvikio")), ("H200 SXM", ("posix",)))
    for io in paths
    for drives in (1, 4)
)


def run_case(simulator: Any, case: Case, problem: Any, layers: int, chosen: argparse.Namespace) -> dict[str, Any]:
    from ssdtrain_fx.config import UNPLANNED_SHARE
    from ssdtrain_fx.passes.planning.place_transfers import floor_bytes
    from ssdtrain_fx.passes.planning.use_room import choose_within_time
    from ssdtrain_fx.runtime.lanes.threads import kvikio

    replay = from_tests("replay")
    is_direct = case.io == "kvikio"
    if is_direct:
        problem = dataclasses.replace(
            problem, host=None, hardware=dataclasses.replace(problem.hardware, staging_bytes=0)
        )
    choice = choose_within_time(problem, max_slowdown=chosen.max_slowdown, floor_bytes=floor_bytes(problem))
    byte_share = CHUNK_BYTES / (chosen.chunk_mib << 20)
    scale = replay.Scale(byte_share, chosen.times_slower or chosen.step_s / problem.step_s)
    simulator.configure()
    with (
        tempfile.TemporaryDirectory() as directory,
        replay.Replay(
            simulator,
            problem,
            choice,
            scale,
            ssd_dir=directory,
            chunk_bytes=CHUNK_BYTES,
            max_stall_share=UNPLANNED_SHARE * chosen.max_slowdown,
            is_direct=is_direct,
        ) as replayed,
        mock.patch.object(kvikio, "CHUNK_BYTES", int(kvikio.CHUNK_BYTES * byte_share)),
    ):
        steps = [replayed.run() for _ in range(WARM_UP_STEPS + chosen.repeats)][WARM_UP_STEPS:]
    moving = replay.moving_bytes(problem, choice)
    ahead = [replay.layers_ahead(problem, step.ahead_s, layers) for step in steps]
    return {
        "case": case.name,
        **dataclasses.asdict(case),
        "max_slowdown": chosen.max_slowdown,
        "times_slower": scale.times_slower,
        "step_s": problem.step_s,
        "storages": len(choice.placements),
        "offloaded_bytes": sum(one.size_bytes for one in problem.movables if one.idx in choice.placements),
        "predicted_exposed_s": choice.simulation.exposed_s,
        "measured_exposed_s": [step.device_s - problem.step_s for step in steps],
        "kept_peak_bytes": moving.kept_peak_bytes,
        "predicted_peak_bytes": moving.peak_bytes,
        "measured_peak_bytes": [step.peak_bytes for step in steps],
        "wrong_bytes": sum(step.wrong_bytes for step in steps),
        "kept_for_time_bytes": [step.statistics.kept_for_time_bytes / byte_share for step in steps],
        "layers_ahead": {
            "forward": [one[0] for one in ahead],
            "backward": [one[1] for one in ahead],
        },
        "late_s": max(step.late_s for step in steps),
    }


def cells(result: Mapping[str, Any]) -> list[str]:
    def percent(seconds: float) -> str:
        return f"{seconds / result['step_s']:.2%}"

    def ahead(phase: str) -> str:
        found = [value for step in result["layers_ahead"][phase] for value in step]
        return f"{min(found):.1f}, {statistics.median(found):.1f}"

    exposed = sorted(result["measured_exposed_s"])
    return [
        result["case"],
        f"{result['storages']}, {result['offloaded_bytes'] / GIB:.1f}",
        f"{statistics.median(result['kept_for_time_bytes']) / GIB:.1f}",
        *(f"{result[name] / GIB:.1f}" for name in ("kept_peak_bytes", "predicted_peak_bytes")),
        f"{max(result['measured_peak_bytes']) / GIB:.1f}",
        f"{result['step_s'] * 1e3:.0f}",
        percent(result["predicted_exposed_s"]),
        f"{percent(statistics.median(exposed))} ({percent(exposed[0])} to {percent(exposed[-1])})",
        ahead("forward"),
        ahead("backward"),
        percent(result["late_s"]),
    ]


HEAD = (
    "case",
    "moved, GiB",
    "kept",
    "peak, GiB",
    "planned",
    "measured",
    "step, ms",
    "exposed",
    "measured",
    "ahead, forward",
    "backward",
    "late",
)


def table(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of cells, the head first."""
    return [list(HEAD), *map(cells, results)]


def page_table(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """What docs/howto/gpu.md shows of it: a page is narrower than a terminal. The head first."""
    rows = [["case", "moved, GiB", "peak, GiB", "exposed", "measured", "ahead, forward", "backward"]]
    for case, moved, _, kept, planned, measured, _, *exposed, forward, backward, _ in map(cells, results):
        rows.append([case, moved, f"{kept}, {planned}, {measured}", *exposed, forward, backward])
    return rows


def work(chosen: argparse.Namespace) -> int:
    """In the process with the device."""
    simulator = from_tests("simulated_device").install()  # before torch
    import torch

    from ssdtrain_fx.projection.catalog import find_drive, find_gpu
    from ssdtrain_fx.projection.machine import machine
    from ssdtrain_fx.projection.models import find_model
    from ssdtrain_fx.projection.trace import trace

    torch.set_num_threads(1)
    console = Console(width=200)
    results: list[dict[str, Any]] = []
    problems: dict[tuple[str, str], Any] = {}
    for case in CASES:
        if chosen.case and case.name not in chosen.case:
            continue
        shape, gpu, drive = find_model(case.model), find_gpu(case.gpu), find_drive(DRIVE)
        if (case.model, case.gpu) not in problems:
            problems[case.model, case.gpu] = trace(
                shape, micro_batch=MICRO_BATCHES[case.model], hardware=machine(gpu, drive)
            )
        hardware = dataclasses.replace(machine(gpu, drive, case.drives), staging_chunk_bytes=chosen.chunk_mib << 20)
        problem = dataclasses.replace(problems[case.model, case.gpu], hardware=hardware)
        results.append(run_case(simulator, case, problem, shape.layers, chosen))
        console.print("  ".join(cells(results[-1])), style="dim", highlight=False)
        written = {"date": datetime.date.today().isoformat(), "results": results}
        chosen.json.parent.mkdir(exist_ok=True)
        chosen.json.write_text(json.dumps(written, indent=2) + "\n")
    console.print(rich_table(table(results), title="Replayed plans"))
    return 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--max-slowdown", type=float, default=0.02)
    parser.add_argument("--step-s", type=float, default=10.0, help="seconds of a replayed step (default: %(default)s)")
    parser.add_argument("--times-slower", type=float, help="how much longer it takes than planned; replaces --step-s")
    parser.add_argument(
        "--chunk-mib", type=int, default=8, help="MiB of a chunk of staging (default: %(default)s, as in training)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "replayed_plans.json")
    parser.add_argument("--markdown", type=Path, help="print the table of these results, and replay nothing")
    chosen = parser.parse_args(arguments)
    if chosen.markdown is not None:
        print(markdown(page_table(json.loads(chosen.markdown.read_text())["results"])))
        return 0
    if chosen.repeats < 1:
        parser.error(f"--repeats is {chosen.repeats}; expected at least 1")
    if "SIMULATED_DEVICE" in os.environ:
        return work(chosen)
    return run_on_device(__file__, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
