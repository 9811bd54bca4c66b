"""Measure how long planning takes, and its share of a compilation.

    python benchmarks/planning.py             # growing graphs: seconds against nodes, and time per pass
    python benchmarks/planning.py --share     # 12-layer GPT-2: planning as a share of Inductor's compile time
    python benchmarks/planning.py --share --idle     # the same if no tensor is large enough to be moved

Growing graphs are deep networks of equal layers, up to about 10,000 nodes and 1,000 saved storages. AOTAutograd traces
them without computing anything. They run through the whole pipeline, from the two partitioned graphs to the two
rewritten ones. The exponent of growth is the exponent between the two largest graphs: 1 is linear.

All times are processor times, so that other load on the machine does not change them. Planning runs in one thread; the
time of a compilation includes all threads and the C++ compilers that it starts.

The share is measured in fresh processes with all compile caches off; plain Inductor and the backend take turns. The
backend not only plans but also compiles more: four more kinds of nodes, and, on a CPU, the graphs of plain Inductor up
to its scheduler, which tells the loops of each kernel. So three results are printed: the time of all passes, the time
for these loops, and the ratio of the whole compile times. The ratio grows by less than the sum of both, since what
Inductor has computed for one graph helps with the next.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib
import inspect
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from functorch.compile import aot_function, default_partition
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx._torch_private import FakeTensorMode
from ssdtrain_fx._torch_private.inductor_loops import LoopChoices
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.machine.system import cpu_model
from ssdtrain_fx.passes import pipeline
from ssdtrain_fx.studies import zoo

LAYERS = (15, 30, 60, 120, 240)
ROWS, WIDTH = 4096, 64
GOAL_S = 5.0
"""Goal for the largest graph on an idle machine."""
GOAL_SHARE = 0.1
GOAL_IDLE_RATIO = 1.03
"""Goal for the ratio of compile times if the plan moves nothing."""
ENDLESS_BYTES = 1 << 60
SETTINGS: dict[str, dict[str, Any]] = {
    "max_slowdown=0.1": {"max_slowdown": 0.1},
    "no recomputation": {"max_slowdown": 0.1, "recompute": False},
    "half the peak": {},
}
HARDWARE = Hardware(
    device="cpu",
    flops_per_s={"float32": 5e10},
    memory_bytes_per_s=1e10,
    elements_per_s={"float32": 1e10},
    kernel_s=1e-5,
    write=Channel(bytes_per_s=3e9, latency_s=1e-4),
    read=Channel(bytes_per_s=6e9, latency_s=1e-4),
    share_when_both=0.6,
    copy_out=Channel(bytes_per_s=2e10),
    copy_in=Channel(bytes_per_s=2e10),
    copies_block_compute=True,
    offload_s=1e-6,
    reload_s=1e-6,
    next_offload_s=2.5e-7,
    next_reload_s=2.5e-7,
    staging_bytes=1 << 26,
)
"""A machine that can offload most storages, so that the planner has choices."""
WHOLE = "offload_saved_tensors"


# -- growing graphs ----------------------------------------------------------------------------------------------------


def deep_network(layers: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward of a residual network whose only output is the loss."""

    def network(x: Tensor, *parameters: Tensor) -> Tensor:
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
            hidden = torch.tanh(x @ weight + bias)
            x = x + 0.5 * hidden * torch.rsqrt(1.0 + hidden.square().mean(-1, keepdim=True))
        return x.sum()

    found: list[tuple[fx.GraphModule, fx.GraphModule]] = []

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        found.append(default_partition(joint, inputs, **options))
        return found[0]

    def compile_nothing(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        return gm

    with FakeTensorMode():
        shapes = [shape for _ in range(layers) for shape in ((WIDTH, WIDTH), (WIDTH,))]
        parameters = [torch.empty(shape, requires_grad=True) for shape in shapes]
        traced = aot_function(network, fw_compiler=compile_nothing, bw_compiler=compile_nothing, partition_fn=partition)
        traced(torch.empty(ROWS, WIDTH), *parameters)
    return found[0]


def measure_growth(layers: Sequence[int], console: Console) -> list[dict[str, Any]]:
    """Return one row per graph and setting."""
    rows: list[dict[str, Any]] = []
    # Some modules are imported when a plan first needs them. The first figure must not include that.
    warm_up = OffloadConfig(**SETTINGS["max_slowdown=0.1"])
    pipeline.offload_saved_tensors(
        *deep_network(1), num_forward_outputs=1, config=warm_up, hardware=HARDWARE, budget=None
    )
    for count in layers:
        forward, backward = deep_network(count)
        peak_bytes = 0
        for name, options in SETTINGS.items():
            budget_bytes = None if options else peak_bytes // 2
            config = OffloadConfig(**options, memory_budget_bytes=budget_bytes)
            seconds = time_passes()
            plan = pipeline.offload_saved_tensors(
                forward,
                backward,
                num_forward_outputs=1,
                config=config,
                hardware=HARDWARE,
                budget=config.find_budget(),
            ).plan
            peak_bytes = plan.peak_before_bytes
            rows.append(
                {
                    "setting": name,
                    "nodes": len(forward.graph.nodes) + len(backward.graph.nodes),
                    "saved_storages": len([storage for storage in plan.storages if not storage.is_input]),
                    "offloaded": len(plan.offloaded),
                    "total_s": seconds.pop(WHOLE),
                    "pass_s": dict(seconds),
                }
            )
            console.print(f"{rows[-1]['nodes']:6} nodes, {name}: {rows[-1]['total_s']:.2f} s", style="dim")
    return rows


def time_passes() -> dict[str, float]:
    """Make every pass, and the whole pipeline, add its seconds to the returned dictionary."""
    seconds: dict[str, float] = {}
    for name, found in list(vars(pipeline).items()):
        function: Any = inspect.unwrap(found) if inspect.isfunction(found) else None
        if function is not None and not name.startswith("_") and function.__module__.startswith("ssdtrain_fx.passes."):
            setattr(pipeline, name, _timed(function, seconds))
    return seconds


def _timed(function: Callable[..., Any], seconds: dict[str, float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[function.__name__] = seconds.get(function.__name__, 0.0) + time.thread_time() - began_s

    return call


def exponents(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return by setting the exponent k with which time grows as nodes**k between the two largest graphs."""
    found: dict[str, float] = {}
    for name in SETTINGS:
        *_, small, large = [row for row in rows if row["setting"] == name]
        found[name] = math.log(large["total_s"] / small["total_s"]) / math.log(large["nodes"] / small["nodes"])
    return found


def growth_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one row per run and its three slowest passes."""
    table = Table(title="Planning time")
    for name in ("nodes", "saved", "offloaded", "setting", "seconds", "where"):
        table.add_column(name, justify="left" if name in ("setting", "where") else "right")
    for row in rows:
        longest = sorted(row["pass_s"].items(), key=lambda item: -item[1])[:3]
        table.add_row(
            str(row["nodes"]),
            str(row["saved_storages"]),
            str(row["offloaded"]),
            row["setting"],
            f"{row['total_s']:.2f}",
            ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest),
        )
    return table


def draw_growth(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot seconds against nodes on logarithmic axes; a slope of one is linear."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    for name, exponent in exponents(rows).items():
        mine = [row for row in rows if row["setting"] == name]
        label = f"{name}: at the end nodes^{exponent:.2f}"
        axes.loglog([row["nodes"] for row in mine], [row["total_s"] for row in mine], marker="o", label=label)
    nodes = sorted({row["nodes"] for row in rows})
    axes.loglog(nodes, [GOAL_S * count / nodes[-1] for count in nodes], "--", color="#999999", label="linear")
    axes.set_title(f"Planning time, up to {max(row['saved_storages'] for row in rows)} saved storages")
    axes.set_xlabel("nodes of forward and backward")
    axes.set_ylabel("seconds of one processor")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)


# -- share of a compilation --------------------------------------------------------------------------------------------


def compile_once(backend: str, layers: int, *, idle: bool) -> dict[str, Any]:
    """Compile the first step of GPT-2 in this process, and return the seconds it takes, in total and per pass."""
    torch.manual_seed(0)
    module, make_batch = zoo.build("gpt2", layers=layers, hidden=384, batch=8, sequence=512, vocab=2048)
    batch = make_batch(torch.Generator().manual_seed(0))
    config = OffloadConfig(max_slowdown=0.1)
    config = dataclasses.replace(config, min_tensor_bytes=ENDLESS_BYTES) if idle else config
    config.load_hardware("cpu")  # measured at most once per machine, so not part of a compilation
    torch.compile(torch.sin)(torch.ones(1))  # imports Inductor
    seconds = time_passes()
    loops_s = time_loops()
    backend_module: Any = importlib.import_module("ssdtrain_fx.compiler.inductor")
    backend_module.offload_saved_tensors = pipeline.offload_saved_tensors
    compiled: Any = torch.compile(module, backend="inductor" if backend == "inductor" else ssdtrain_fx.backend(config))
    times: list[float] = []
    for _ in range(2):  # the second step compiles nothing
        began_s = _processors_s()
        compiled(*batch).backward()
        times.append(_processors_s() - began_s)
    planning_s = seconds.pop(WHOLE, 0.0)
    return {
        "backend": backend,
        "compile_s": times[0] - times[1],
        "planning_s": planning_s,
        "loops_s": sum(loops_s),
        "pass_s": seconds,
    }


def time_loops() -> list[float]:
    """Make ``LoopChoices.record`` append its seconds to the result."""
    seconds: list[float] = []
    record: Any = LoopChoices.record

    def timed(*arguments: Any, **keywords: Any) -> Any:
        began_s = time.process_time()
        try:
            return record(*arguments, **keywords)
        finally:
            seconds.append(time.process_time() - began_s)

    cast(Any, LoopChoices).record = timed
    return seconds


def _processors_s() -> float:
    """Processor seconds used so far by this process and the compilers that it has started."""
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + compilers.ru_utime + compilers.ru_stime


def measure_share(layers: int, rounds: int, console: Console, *, idle: bool) -> dict[str, Any]:
    """Compile in fresh processes, in turns with plain Inductor and with the backend."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }
    runs: list[dict[str, Any]] = []
    for _ in range(rounds):
        for backend in ("inductor", "ssdtrain"):
            command = [sys.executable, __file__, "--compile-once", backend, "--layers", str(layers)]
            command += ["--idle"] if idle else []
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            line = f"{backend}: {runs[-1]['compile_s']:.1f} s, passes {runs[-1]['planning_s']:.2f} s, "
            line += f"loops {runs[-1]['loops_s']:.2f} s"
            console.print(line, style="dim", highlight=False)
    plain, ours = ([run for run in runs if run["backend"] == name] for name in ("inductor", "ssdtrain"))
    pairs = list(zip(ours, plain, strict=True))
    return {
        "layers": layers,
        "idle": idle,
        "planning_share_of_inductor": statistics.median(a["planning_s"] / b["compile_s"] for a, b in pairs),
        "loops_share_of_inductor": statistics.median(a["loops_s"] / b["compile_s"] for a, b in pairs),
        "compile_time_ratio": statistics.median(a["compile_s"] / b["compile_s"] for a, b in pairs),
        "runs": runs,
    }


def share_table(result: dict[str, Any]) -> Table:
    table = Table(title=f"Compiling {result['layers']}-layer GPT-2{', nothing moves' if result['idle'] else ''}")
    table.add_column("")
    table.add_column("", justify="right")
    ours = [run for run in result["runs"] if run["backend"] == "ssdtrain"]
    table.add_row("all passes, share of Inductor's compile time", f"{result['planning_share_of_inductor']:.1%}")
    table.add_row("goal", "" if result["idle"] else f"at most {GOAL_SHARE:.0%}")
    table.add_row("loops of plain Inductor, share", f"{result['loops_share_of_inductor']:.1%}")
    table.add_row("whole compilation, ratio to Inductor", f"{result['compile_time_ratio']:.3f}")
    table.add_row("goal", f"at most {GOAL_IDLE_RATIO}" if result["idle"] else "", end_section=True)
    for name in ours[0]["pass_s"]:
        table.add_row(name, f"{statistics.median(run['pass_s'][name] for run in ours):.3f} s")
    return table


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", action="store_true", help="planning as a share of Inductor's compile time")
    parser.add_argument("--idle", action="store_true", help="with --share: nothing is large enough to be moved")
    parser.add_argument(
        "--layers", type=int, help="layers of GPT-2 (default: 12) or of the largest growing graph (default: 240)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="with --share: compilations of each kind")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/planning.json"))
    parser.add_argument("--png", type=Path, default=Path("benchmarks/results/planning.png"))
    parser.add_argument("--compile-once", choices=["inductor", "ssdtrain"], help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    console = Console()
    if chosen.compile_once is not None:
        print(json.dumps(compile_once(chosen.compile_once, chosen.layers, idle=chosen.idle)))
        return 0
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    if chosen.share:
        result = measure_share(chosen.layers or 12, chosen.rounds, console, idle=chosen.idle)
        console.print(share_table(result))
        if chosen.idle:
            reached = result["compile_time_ratio"] <= GOAL_IDLE_RATIO
        else:
            reached = result["planning_share_of_inductor"] <= GOAL_SHARE
    else:
        rows = measure_growth([count for count in LAYERS if count <= (chosen.layers or LAYERS[-1])], console)
        result = {"goal_s": GOAL_S, "exponents": exponents(rows), "rows": rows}
        console.print(growth_table(rows))
        draw_growth(rows, chosen.png)
        console.print(f"Picture: {chosen.png.resolve()}", highlight=False, soft_wrap=True)
        reached = all(row["total_s"] <= GOAL_S for row in rows)
    machine = {"cpu": cpu_model(), "cores": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    chosen.json.write_text(json.dumps({"date": date, "machine": machine, **result}, indent=2) + "\n")
    console.print(f"JSON: {chosen.json.resolve()}", highlight=False, soft_wrap=True)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
