"""Compare projections with what was measured elsewhere, and project SSDTrain's nine cases.

    python benchmarks/projection.py --json benchmarks/stored/projection.json
    python benchmarks/projection.py --markdown benchmarks/stored/projection.json

1. *Validation.* The same model as ``ssdtrain-fx project`` predicts runs whose figures are published, or were measured
   with ``benchmarks/gpu.py``. The ratio of both is the error.
2. *The nine cases* of SSDTrain (Wu et al., arXiv 2408.10013): hidden size and layers (8192, 4), (12288, 3) and
   (16384, 2) of BERT, T5 and GPT, a micro-batch of 16 with 1024 tokens, two tensor-parallel A100 PCIe 40 GB at 765 MHz,
   float16, and seven Optane P5800X for both, as in the paper. The activation peak falls by 28 to 40 % there. Dropout,
   vocabulary and heads are guesses: 0.1, 32,768 and 128 wide.
3. *Exposed time* of a GPT-2 XL and a Llama-3 8B on an A100, an H100 and an H200, with one drive and four.

Nothing is measured here, so the machine does not matter. ``--markdown`` prints the tables of
docs/howto/projections.md, and a test compares them with the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from result_tables import markdown, rich_table
from rich.console import Console

from ssdtrain_fx.passes.planning.place_transfers import floor_bytes
from ssdtrain_fx.passes.planning.use_room import choose_within_time
from ssdtrain_fx.projection.catalog import find_drive, find_gpu
from ssdtrain_fx.projection.machine import Efficiency, machine
from ssdtrain_fx.projection.models import find_model
from ssdtrain_fx.projection.parallelism import Parallelism
from ssdtrain_fx.projection.project import Cluster, Workload
from ssdtrain_fx.projection.trace import trace
from ssdtrain_fx.projection.transformer import Family, Shape

GIB = 1 << 30
H200_GPT2 = Shape(family="gpt", layers=24, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=32768, sequence=512)
MEGATRON = Shape(family="gpt", layers=80, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocab=51200, sequence=2048)
CASES = ((8192, 4), (12288, 3), (16384, 2))
FAMILIES: tuple[Family, ...] = ("bert", "t5", "gpt")
LOCKED_SHARE = 765 / 1410
"""The paper locks the clock of its GPUs below the boost clock."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A run that somebody has measured: seconds of one step, or the share of the nominal FLOP/s."""

    name: str
    shape: Shape
    gpu: str
    micro_batch: int
    parallelism: Parallelism
    source: str
    flops_share: float | None = None
    step_s: float | None = None


PUBLISHED = (
    Published(
        name="Llama-3 405B, 8,192 H100",
        shape=find_model("llama-3-405b"),
        gpu="h100 sxm",
        micro_batch=1,
        parallelism=Parallelism(data=64, tensor=8, pipeline=14, chunks=9, micro_batches=32),
        source="arXiv 2407.21783, table 4; 16 stages there, which do not divide 126 layers",
        flops_share=0.43,
    ),
    Published(
        name="Llama-3 405B, 16,384 H100",
        shape=find_model("llama-3-405b"),
        gpu="h100 sxm",
        micro_batch=1,
        parallelism=Parallelism(data=128, tensor=8, pipeline=14, chunks=9, micro_batches=16),
        source="the same",
        flops_share=0.41,
    ),
    Published(
        name="Llama-3 405B, 131,072 tokens, 16,384 H100",
        shape=dataclasses.replace(find_model("llama-3-405b"), sequence=131072),
        gpu="h100 sxm",
        micro_batch=1,
        parallelism=Parallelism(
            data=8, tensor=8, pipeline=14, chunks=9, context=16, sequence_parallel=True, micro_batches=16
        ),
        source="the same, with context parallelism",
        flops_share=0.38,
    ),
    Published(
        name="GPT 145.6B, 1,536 A100",
        shape=MEGATRON,
        gpu="a100 sxm",
        micro_batch=1,
        parallelism=Parallelism(data=24, tensor=8, pipeline=8, micro_batches=96),
        source="Megatron-LM, arXiv 2104.04473, table 1; it counts the FLOPs of recomputation, which take the same time",
        flops_share=0.47,
    ),
    Published(
        name="GPT-2 of 24 layers, hidden 1024, one H200",
        shape=H200_GPT2,
        gpu="h200 sxm",
        micro_batch=16,
        parallelism=Parallelism(),
        source="benchmarks/gpu.py, torch 2.11, 2026-11-26",
        step_s=0.0764,
    ),
)


def validate() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for run in PUBLISHED:
        cluster = Cluster(gpu=find_gpu(run.gpu), drive=find_drive("990 pro 4tb"))
        workload = Workload(run.shape, micro_batch=run.micro_batch, parallelism=run.parallelism, cluster=cluster)
        keep = workload.project(cluster).keep
        row: dict[str, Any] = {"name": run.name, "source": run.source}
        if run.flops_share is not None:
            row |= {"flops_share": keep.model_flops_share, "published_flops_share": run.flops_share}
            row["time_ratio"] = run.flops_share / keep.model_flops_share
        else:
            assert run.step_s is not None
            row |= {"step_s": keep.step_s, "published_step_s": run.step_s, "time_ratio": keep.step_s / run.step_s}
        rows.append(row)
    return rows


def nine_cases(max_slowdown: float, cases: Sequence[tuple[int, int]] = CASES) -> list[dict[str, Any]]:
    whole = find_gpu("a100 pcie 40")
    locked = dataclasses.replace(
        whole, flops_per_s={name: LOCKED_SHARE * rate for name, rate in whole.flops_per_s.items()}
    )
    hardware = machine(locked, find_drive("p5800x"), 3.5, efficiency=Efficiency())
    rows: list[dict[str, Any]] = []
    for hidden, layers in cases:
        for family in FAMILIES:
            shape = Shape(
                family=family,
                layers=layers,
                hidden=hidden,
                heads=hidden // 128,
                kv_heads=hidden // 128,
                ffn=4 * hidden,
                vocab=32768,
                sequence=1024,
                dropout=0.1,
            )
            problem = trace(
                shape, micro_batch=16, hardware=hardware, parallelism=Parallelism(tensor=2), dtype=torch.float16
            )
            choice = choose_within_time(problem, max_slowdown=max_slowdown, floor_bytes=floor_bytes(problem))
            before, moved = int(problem.kept_live_bytes.max()), {one.idx: one.size_bytes for one in problem.movables}
            offloaded = sum(moved[idx] for idx in choice.placements)
            rows.append(
                {
                    "family": family,
                    "hidden": hidden,
                    "layers": layers,
                    "peak_bytes": before,
                    "offload_peak_bytes": choice.peak_bytes,
                    "reduction": 1.0 - choice.peak_bytes / before,
                    "floor_bytes": floor_bytes(problem),
                    "offloaded_bytes": offloaded,
                    "saved_bytes": int(problem.kept_live_bytes[problem.marker]),
                    "step_s": problem.step_s,
                    "exposed_s": choice.simulation.exposed_s,
                    "needed_write_bytes_per_s": offloaded / (problem.step_s / 2),
                }
            )
    return rows


def exposed_times() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, micro_batch in (("gpt2-xl", 8), ("llama-3-8b", 1)):
        for gpu in ("a100 sxm", "h100 sxm", "h200 sxm"):
            cluster = Cluster(gpu=find_gpu(gpu), drive=find_drive("pm1743"))
            shape = find_model(name)
            workload = Workload(shape, micro_batch=micro_batch, parallelism=Parallelism(), cluster=cluster)
            for count in (1, 4):
                for max_slowdown in (0.02, 0.1):
                    here = dataclasses.replace(cluster, drives_per_gpu=count)
                    found = workload.project(here, max_slowdown=max_slowdown)
                    rows.append(
                        {
                            "model": name,
                            "micro_batch": micro_batch,
                            "sequence": shape.sequence,
                            "gpu": cluster.gpu.name,
                            "drives": count,
                            "max_slowdown": max_slowdown,
                            "peak_bytes": found.keep.activation_bytes,
                            "offload_peak_bytes": found.offload.activation_bytes,
                            "micro_batch_s": found.keep.step_s - found.update_s,
                            "exposed_s": found.offload.exposed_s,
                            "written_bytes": found.offload.written_bytes,
                        }
                    )
    return rows


def tables(results: Mapping[str, list[dict[str, Any]]]) -> dict[str, list[list[str]]]:
    """The tables of docs/howto/projections.md: rows of cells, by the key of the results, the head first."""
    validation = [["run", "projected", "published", "projected time / published", "source"]]
    for row in results["validation"]:
        kind, form = ("flops_share", "{:.1%}") if "flops_share" in row else ("step_s", "{:.4f} s")
        figures = form.format(row[kind]), form.format(row[f"published_{kind}"])
        validation.append([row["name"], *figures, f"{row['time_ratio']:.2f}", row["source"]])
    cases = [["case", "peak", "offloaded", "reduction", "exposed", "write rate"]]
    for row in results["nine_cases"]:
        cases.append(
            [
                f"{row['family'].upper()} ({row['hidden']}, {row['layers']})",
                *(f"{row[name] / GIB:.1f} GiB" for name in ("peak_bytes", "offload_peak_bytes")),
                f"{row['reduction']:.0%}" + (", the floor" if row["offload_peak_bytes"] <= row["floor_bytes"] else ""),
                f"{row['exposed_s'] / row['step_s']:.1%}",
                f"{row['needed_write_bytes_per_s'] / 1e9:.1f} GB/s",
            ]
        )
    exposed = [["model", "GPU", "drives", "allowed", "peak", "offloaded", "exposed, of a micro-batch"]]
    for row in results["exposed"]:
        exposed.append(
            [
                f"{row['model']}, {row['micro_batch']} x {row['sequence']}",
                row["gpu"],
                str(row["drives"]),
                f"{row['max_slowdown']:.0%}",
                *(f"{row[name] / GIB:.1f} GiB" for name in ("peak_bytes", "offload_peak_bytes")),
                f"{row['exposed_s'] * 1e3:.0f} of {row['micro_batch_s'] * 1e3:.0f} ms",
            ]
        )
    return {"validation": validation, "nine_cases": cases, "exposed": exposed}


def show(results: Mapping[str, list[dict[str, Any]]], console: Console) -> None:
    for rows in tables(results).values():
        console.print(rich_table(rows))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Projections against published figures.")
    parser.add_argument("--max-slowdown", type=float, default=0.02, help="of the nine cases (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--markdown", type=Path, help="print the tables of these results, and project nothing")
    chosen = parser.parse_args(arguments)
    if chosen.markdown is not None:
        for rows in tables(json.loads(chosen.markdown.read_text())).values():
            print(markdown(rows), end="\n\n")
        return 0
    results = {
        "validation": validate(),
        "nine_cases": nine_cases(chosen.max_slowdown),
        "exposed": exposed_times(),
    }
    show(results, Console())
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"max_slowdown": chosen.max_slowdown, **results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
