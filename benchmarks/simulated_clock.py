"""Compare the planner's predictions with steps on a simulated device that takes exactly the planned time.

    python benchmarks/simulated_clock.py
    python benchmarks/simulated_clock.py --case "H100, 1 drive" --repeats 5
    python benchmarks/simulated_clock.py --markdown benchmarks/stored/simulated_clock.json

A real GPU is never as fast as a roofline says, so a step that takes longer than predicted shows little. Here, every
node takes the time that the planner assumes (tests/simulated/paced.py): copies and the disk have the planned rates,
and everything between is the package itself. A difference is a fault of the runtime or of the planner's model.

The model is a small GPT. Its rates are scaled, so that compute, bytes and memory have the proportions of a layer of a
large model (``HIDDEN``, ``SEQUENCE``) on the named GPU and drives, and so that a step takes ``--step-s`` seconds. What
Python takes for a step is then negligible.

Columns:

    moved (host)    storages that the plan moves, and how many of them stay in pinned memory; MiB of all of them
    kept, demoted   MiB that the engine kept in memory to save time, and that left the host tier, in a step
    step, forward   seconds that were predicted, and measured by the clock of the device
    slowdown        what moving adds, as a share of the step without it
    off by          measured less predicted slowdown: the median over repeats, and the range
    ahead           how far the host was ahead of the device when it enqueued the first node of a layer, in layers: the
                    least and the median. At the first layer of forward it cannot be ahead, so that one does not count
    late            by how much the device was late at most: if it is many ms, the machine was too busy

``--in-step`` and ``--no-read-ahead`` show why a case is off: with both, the host does what the simulation assumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from result_tables import markdown, rich_table
from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "simulated"), str(ROOT / "tests" / "runtime"), str(ROOT / "tests")]

HIDDEN, SEQUENCE = 8192, 4096
"""Of the model whose proportions the small one has: a Llama of 70B parameters."""
WIDTH, LENGTH, BATCH, VOCAB = 64, 64, 4, 64
CHUNK_BYTES = 16 << 10
"""The small model has tensors of 64 KiB and more."""
WARM_UP_STEPS = 2


def from_tests(name: str) -> Any:
    """A module of ``tests/simulated``, which is no package."""
    return importlib.import_module(name)


def run_on_device(program: str, arguments: Sequence[str]) -> int:
    """Run ``program`` again, in a process with the device, which has to be there before torch is imported."""
    variables = from_tests("device_process").environment(from_tests("build").build())
    command = [sys.executable, str(Path(program).resolve()), *arguments]
    return subprocess.run(command, env=variables, check=False).returncode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A machine, and what is asked of it."""

    name: str
    gpu: str = "H100 SXM"
    drives: float = 1
    staging_share: float = 0.1
    """Staging, as a share of the bytes that can move."""
    policy: str = "auto"
    max_slowdown: float = 0.02
    disk_times: float = 1.0
    """How much faster the disk is than these drives."""
    pcie_times: float = 1.0
    moves: bool = True
    """False: to see what else takes time."""
    given_staging: float = 1.0
    """What the engine gets of the planned staging."""


DRIVE = "Samsung PM1743 15.36TB"
CASES = (
    Case(name="nothing moves", moves=False),
    Case(name="A100, 1 drive", gpu="A100 SXM 80GB"),
    Case(name="A100, 4 drives", gpu="A100 SXM 80GB", drives=4),
    Case(name="H100, 1 drive"),
    Case(name="H100, 4 drives", drives=4),
    Case(name="H200, 1 drive", gpu="H200 SXM"),
    Case(name="H200, 4 drives", gpu="H200 SXM", drives=4),
    Case(name="all, fast disk", policy="all", disk_times=12, drives=4),
    Case(name="all, 4 drives", policy="all", drives=4),
    Case(name="all, 1 drive", policy="all"),
    Case(name="host tier, 4 drives", drives=4, staging_share=0.5),
    Case(name="host tier, all", policy="all", drives=4, staging_share=0.5),
    Case(name="host tier, demoted", drives=4, staging_share=0.5, given_staging=0.5),
    Case(name="PCIe", policy="all", drives=4, disk_times=12, pcie_times=0.25),
    Case(name="PCIe, host tier", policy="all", drives=4, disk_times=12, pcie_times=0.25, staging_share=0.5),
)


def scaled_hardware(case: Case, layers: int, step_s: float, explain: Callable[[Any], Any]) -> Any:
    """The rates for the small model. ``explain`` returns its planning problem for a hardware profile."""
    from ssdtrain_fx.hardware import Channel
    from ssdtrain_fx.projection.catalog import find_drive, find_gpu
    from ssdtrain_fx.projection.machine import machine

    nominal = machine(find_gpu(case.gpu), find_drive(DRIVE), case.drives)
    # Of one token in one layer. A product of matrices multiplies and adds three times, in forward and in backward.
    flops = 72 * HIDDEN**2 + 12 * SEQUENCE * HIDDEN
    saved_bytes = 34 * HIDDEN
    flop_rate = nominal.flops_per_s["bfloat16"]
    # A small model has fewer operations per byte of a kernel's traffic, so memory has to be faster.
    shape = dataclasses.replace(
        nominal,
        device="simulated",
        flops_per_s={"float32": flop_rate},
        memory_bytes_per_s=nominal.memory_bytes_per_s * 2 * HIDDEN / WIDTH,
        elements_per_s={"float32": nominal.elements_per_s["float32"] * HIDDEN / WIDTH},
        kernel_s=0.0,
        offload_s=0.0,
        reload_s=0.0,
        next_offload_s=0.0,
        next_reload_s=0.0,
    )
    problem = explain(shape)
    moved_bytes = sum(movable.size_bytes for movable in problem.movables)
    real_bytes_per_s = saved_bytes / (flops / flop_rate)
    stretched = (moved_bytes / step_s) / real_bytes_per_s
    slow = shape.computing_slower(step_s / problem.step_s)

    def channel(bytes_per_s: float, latency_s: float = 0.0) -> Channel:
        return Channel(bytes_per_s=bytes_per_s * stretched, latency_s=latency_s)

    out_bytes_per_s = nominal.copy_out.bytes_per_s * case.pcie_times
    in_bytes_per_s = nominal.copy_in.bytes_per_s * case.pcie_times
    return dataclasses.replace(
        slow,
        # These end where the tensor is needed, so they are never faster than copies.
        write=channel(min(nominal.write.bytes_per_s * case.disk_times, out_bytes_per_s), 1e-3),
        read=channel(min(nominal.read.bytes_per_s * case.disk_times, in_bytes_per_s), 1e-3),
        copy_out=channel(out_bytes_per_s),
        copy_in=channel(in_bytes_per_s),
        staging_bytes=int(case.staging_share * moved_bytes) // CHUNK_BYTES * CHUNK_BYTES,
    )


def layers_ahead(step: Any, forward: bool, layers: int) -> list[float]:
    """At the first node of each layer."""
    nodes = [one for one in step.ahead if one.is_forward == forward]
    per_layer = len(nodes) / (layers + 1)  # and the loss
    found: list[float] = []
    before = None
    for one in nodes:
        layer = next((part for part in one.module.split(".") if part.isdigit()), None)
        if layer is not None and layer != before:
            if found or before is not None or not forward:
                found.append(one.nodes / per_layer)
            before = layer
    return found


def run_case(
    simulator: Any, case: Case, layers: int, step_s: float, repeats: int, trace: str = "", *, admission: bool = True
) -> dict[str, Any]:
    import torch

    import ssdtrain_fx
    from ssdtrain_fx import OffloadConfig
    from ssdtrain_fx.runtime.lanes.threads.staged import BUFFERS_FOR_READS

    paced, models = from_tests("paced"), from_tests("test_training")
    torch.manual_seed(0)
    simulator.configure()
    model = models.Gpt(layers, WIDTH, VOCAB).cuda()
    tokens = torch.randint(VOCAB, (BATCH, LENGTH)).cuda()
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {
            "inner": "aot_eager",
            "policy": case.policy,
            "max_slowdown": case.max_slowdown,
            "min_tensor_bytes": CHUNK_BYTES,
            "recompute": False,
            "replan": "off",
            "io": "posix",
            "ssd_dir": directory,
        }

        def explain(hardware: Any) -> Any:
            config = OffloadConfig(**options, hardware=hardware)
            (graph,) = ssdtrain_fx.explain(model, tokens, config=config).graphs
            return graph.problem

        hardware = scaled_hardware(case, layers, step_s, explain)
        # The engine keeps a buffer for reads. Of a thousand buffers it does not count, of forty it would.
        budget_bytes = int(hardware.staging_bytes * case.given_staging) + BUFFERS_FOR_READS * CHUNK_BYTES
        if not case.moves:
            options["min_tensor_bytes"] = 1 << 40
        config = OffloadConfig(**options, host_budget_bytes=hardware.staging_bytes, hardware=hardware)
        training = paced.PacedTraining(
            simulator, model, config, hardware, chunk_bytes=CHUNK_BYTES, staging_bytes=budget_bytes, admission=admission
        )
        with training.running():
            for _ in range(WARM_UP_STEPS):
                training.train(tokens)
                model.zero_grad(set_to_none=True)
            steps: list[Any] = []
            for number in range(repeats):
                if trace and number == 0:
                    with ssdtrain_fx.trace(trace):
                        steps.append(training.train(tokens))
                else:
                    steps.append(training.train(tokens))
                model.zero_grad(set_to_none=True)
            planned = training.step
    return summary(case, layers, planned, steps)


def forward_s(planned: Any, steps: Sequence[Any]) -> tuple[float, list[float]]:
    """When backward begins, as predicted and as measured."""
    starts_s = {node.name: node.start_s for node in planned.timeline.after.nodes}
    first = next(at for at, one in enumerate(steps[0].ahead) if not one.is_forward)
    return starts_s[steps[0].ahead[first].node], [step.start_s[first] for step in steps]


def summary(case: Case, layers: int, planned: Any, steps: Sequence[Any]) -> dict[str, Any]:
    plan = planned.plan
    predicted_forward_s, measured_forward_s = forward_s(planned, steps)
    slowdowns = [step.device_s / plan.step_s - 1 for step in steps]
    predicted = plan.exposed_s / plan.step_s
    ahead = {
        "forward": [layers_ahead(step, True, layers) for step in steps],
        "backward": [layers_ahead(step, False, layers) for step in steps],
    }
    last = steps[-1].statistics
    return {
        "case": case.name,
        "step_s": plan.step_s,
        "predicted_step_s": plan.step_s + plan.exposed_s,
        "measured_step_s": [step.device_s for step in steps],
        "wall_s": [step.wall_s for step in steps],
        "predicted_forward_s": predicted_forward_s,
        "measured_forward_s": measured_forward_s,
        "predicted_slowdown": predicted,
        "measured_slowdown": slowdowns,
        "off_by": [one - predicted for one in slowdowns],
        "offloaded_bytes": plan.offloaded_bytes,
        "storages": len(plan.offloaded),
        "on_host": len(plan.on_host),
        "host_release_stall_s": [step.statistics.release_stall_s for step in steps],
        "host_wait_stall_s": [step.statistics.wait_stall_s for step in steps],
        "kept_bytes": last.kept_bytes,
        "kept_for_time_bytes": [step.statistics.kept_for_time_bytes for step in steps],
        "bytes_written": last.bytes_written,
        "bytes_read": last.bytes_read,
        "host_bytes": last.host_bytes,
        "demoted_bytes": last.demoted_bytes,
        "read_ahead_bytes": last.read_ahead_bytes,
        "layers_ahead": ahead,
        "device_late_s": max(step.latest_s for step in steps),
    }


def cells(result: dict[str, Any]) -> list[str]:
    off = sorted(result["off_by"])

    def ahead(phase: str) -> str:
        found = [value for step in result["layers_ahead"][phase] for value in step]
        return f"{min(found):.1f}, {statistics.median(found):.1f}" if found else "-"

    mib = 1 << 20
    return [
        result["case"],
        f"{result['storages']}" + (f" ({result['on_host']})" if result["on_host"] else ""),
        f"{result['offloaded_bytes'] / mib:.1f}",
        f"{statistics.median(result['kept_for_time_bytes']) / mib:.1f}",
        f"{result['demoted_bytes'] / mib:.1f}",
        f"{result['predicted_step_s']:.3f}",
        f"{statistics.median(result['measured_step_s']):.3f}",
        f"{result['predicted_forward_s']:.3f}",
        f"{statistics.median(result['measured_forward_s']):.3f}",
        f"{result['predicted_slowdown']:.1%}",
        f"{statistics.median(result['measured_slowdown']):.1%}",
        f"{statistics.median(off):+.2%} ({off[0]:+.2%} to {off[-1]:+.2%})",
        ahead("forward"),
        ahead("backward"),
        f"{1e3 * result['device_late_s']:.0f}",
    ]


HEAD = (
    "case",
    "moved (host)",
    "MiB",
    "kept",
    "demoted",
    "step, s",
    "measured",
    "forward, s",
    "measured",
    "slowdown",
    "measured",
    "off by",
    "ahead, forward",
    "backward",
    "late, ms",
)


def page_table(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The columns that docs/howto/gpu.md shows, the head first."""
    shown = [HEAD.index(name) for name in ("case", "moved (host)", "slowdown", "measured", "off by")]
    shown[3] = shown[2] + 1  # several columns have that name
    return [[row[at] for at in shown] for row in (list(HEAD), *map(cells, results))]


def work(chosen: argparse.Namespace) -> int:
    """In the process with the device."""
    simulator = from_tests("simulated_device").install()  # before torch
    import torch

    torch.set_num_threads(1)
    if chosen.in_step:
        from_tests("paced").PacedBackend.in_step = True
    if chosen.no_read_ahead:
        from ssdtrain_fx.runtime.lanes.threads.staged import StagedTransport

        StagedTransport._may_read_ahead = lambda self: False
    console = Console(width=200)
    results: list[dict[str, Any]] = []
    for case in CASES:
        if chosen.case and case.name not in chosen.case:
            continue
        results.append(
            run_case(
                simulator,
                case,
                chosen.layers,
                chosen.step_s,
                chosen.repeats,
                chosen.trace,
                admission=not chosen.no_admission,
            )
        )
        console.print("  ".join(cells(results[-1])), style="dim", highlight=False)
        written = {"date": datetime.date.today().isoformat(), "layers": chosen.layers, "results": results}
        chosen.json.parent.mkdir(exist_ok=True)
        chosen.json.write_text(json.dumps(written, indent=2) + "\n")
    console.print(rich_table([HEAD, *map(cells, results)], title="Simulated clock"))
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--step-s", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trace", default="", help="write a trace of the first measured step to this file")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "simulated_clock.json")
    parser.add_argument("--markdown", type=Path, help="print a table of these results, and measure nothing")
    parser.add_argument("--no-admission", action="store_true", help="move everything, whatever it costs")
    parser.add_argument("--in-step", action="store_true", help="let the host be where the device is, at every op")
    parser.add_argument("--no-read-ahead", action="store_true", help="read nothing before backward requests it")
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
