"""A sweep as one self-contained HTML page: the template next to this file, with the sweep and its texts as data.

Every number that the page shows is formatted here, so that it reads as in other reports. The script only draws.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from typing import Any

from ssdtrain_fx.projection.catalog import Drive, Gpu
from ssdtrain_fx.projection.machine import SHARE_WHEN_BOTH, STAGING_BYTES
from ssdtrain_fx.projection.project import CONTEXT_BYTES, STATE_BYTES, WEIGHT_BYTES, Outcome, Projection
from ssdtrain_fx.projection.sweep import Sweep
from ssdtrain_fx.report.endurance import TB, format_lifetime
from ssdtrain_fx.units import format_bytes, format_seconds

PLACE_OF_DATA = "/*SWEEP*/"
ASSUMED_SLOWDOWN = 0.02
"""Where the slider starts: the default of ``Workload.project``."""
ROUNDING_S = 1e-7
"""What is exposed for less was hidden: sums of seconds are not exact."""


def render_page(sweep: Sweep) -> str:
    """Return the page as text."""
    template = importlib.resources.files("ssdtrain_fx.projection").joinpath("page.html").read_text(encoding="utf-8")
    before, after = template.split(PLACE_OF_DATA)
    # An unescaped "<" could close the script element that holds the data.
    data = json.dumps(_page_data(sweep), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return before + data + after


def _page_data(sweep: Sweep) -> dict[str, Any]:
    return {
        "sweep": json.loads(sweep.to_json()),
        "start": {
            "drives": _nearest(sweep.drives_per_gpu, sweep.cluster.drives_per_gpu),
            "slowdown": _nearest(sweep.max_slowdowns, ASSUMED_SLOWDOWN),
            "data": sweep.data.index(sweep.parallelism.data),
        },
        "labels": {
            "drives": [_drives_text(drives) for drives in sweep.drives_per_gpu],
            "slowdown": [_percent(slowdown) for slowdown in sweep.max_slowdowns],
            "data": [_gpus_text(sweep.at(0, 0, data).parallelism.gpus) for data in range(len(sweep.data))],
        },
        "schedule": _schedule(sweep),
        "gpu_memory": format_bytes(sweep.cluster.gpu.memory_bytes),
        "rows": _ROWS,
        "texts": [_texts(projection) for projection in sweep.projections],
        "footer": _footer(sweep),
    }


def _nearest(axis: tuple[float, ...], wanted: float) -> int:
    return min(range(len(axis)), key=lambda position: abs(axis[position] - wanted))


_ROWS = (
    ("step", "Step", "one optimizer step"),
    ("exposed", "Exposed", "of it: GPUs wait for drives"),
    ("bubble", "Pipeline bubble", "share of the schedule in which a stage waits for others"),
    ("tokens", "Tokens/s", "of the cluster"),
    ("share", "Nominal FLOP/s", "share reached, by FLOPs of the model"),
    ("written", "Written", "per GPU and day"),
    ("lifetime", "Lifetime", "of the drives, at rated endurance"),
    ("cost", "Drives", "cost of all"),
)
"""Of the table: key, title, explanation."""


def _texts(projection: Projection) -> dict[str, Any]:
    return {
        "keep": _column(projection, projection.keep) | {"lifetime": "no drives", "cost": "none"},
        "offload": _column(projection, projection.offload)
        | {"lifetime": format_lifetime(projection.lifetime_s), "cost": _cost(projection.drive_cost_usd)},
        "saved": _saved(projection),
        "batch": f"{projection.micro_batch * projection.parallelism.micro_batches * projection.parallelism.data:,}",
    }


def _column(projection: Projection, outcome: Outcome) -> dict[str, str]:
    room = projection.cluster.gpu.memory_bytes - outcome.memory_bytes
    return {
        "memory": format_bytes(outcome.memory_bytes),
        "states": format_bytes(projection.state_bytes),
        "activations": format_bytes(outcome.activation_bytes),
        "context": format_bytes(CONTEXT_BYTES),
        "fits": "fits" if outcome.fits else "does not fit",
        "room": f"{format_bytes(room)} free" if outcome.fits else f"{format_bytes(-room)} too much",
        "step": format_seconds(outcome.step_s),
        "exposed": format_seconds(outcome.exposed_s) if outcome.exposed_s > ROUNDING_S else "none",
        "bubble": _percent(projection.parallelism.bubble),
        "tokens": f"{outcome.tokens_per_s:,.0f}",
        "share": _percent(outcome.model_flops_share),
        "written": _terabytes(outcome.written_bytes_per_day),
    }


def _saved(projection: Projection) -> str:
    """What offloading does, in one sentence."""
    keep, offload = projection.keep, projection.offload
    less = 1 - offload.activation_bytes / keep.activation_bytes
    slower = offload.step_s / keep.step_s - 1
    return f"Offloading takes {_percent(less)} off the activations and adds {_percent(slower)} to the step."


def _terabytes(written_bytes: float) -> str:
    """Of 10**12 bytes, as in the ratings of drives."""
    if not written_bytes:
        return "nothing"
    return f"{written_bytes / TB:,.0f} TB" if written_bytes >= 100 * TB else f"{written_bytes / TB:.3g} TB"


def _cost(usd: float | None) -> str:
    return "no price is known" if usd is None else f"${usd:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if abs(share) >= 0.0005 else "0 %"


def _drives_text(drives: float) -> str:
    if drives < 1 and (1 / drives).is_integer():
        return f"{drives:g} (one for {1 / drives:.0f} GPUs)"
    return f"{drives:g}"


def _gpus_text(gpus: int) -> str:
    return f"{gpus:,} GPU" if gpus == 1 else f"{gpus:,} GPUs"


def _schedule(sweep: Sweep) -> dict[str, str]:
    """What does not change with the sliders."""
    parallelism, shape = sweep.parallelism, sweep.projections[0].shape
    gpus = [f"tensor {parallelism.tensor}", f"pipeline {parallelism.pipeline}"]
    if parallelism.context > 1:
        gpus.append(f"context {parallelism.context}")
    sizes = [
        f"{sweep.projections[0].micro_batch} x {shape.sequence:,} tokens per micro-batch",
        f"{parallelism.micro_batches} micro-batches per step",
    ]
    if parallelism.chunks > 1:
        sizes.append(f"{parallelism.chunks} chunks per stage")
    if parallelism.expert > 1:
        sizes.append(f"experts over {parallelism.expert} GPUs")
    if parallelism.sequence_parallel:
        sizes.append("sequence parallelism")
    if parallelism.data > 1:
        sizes.append("FSDP" if parallelism.fsdp else "no FSDP")
    return {"gpus": " x ".join(gpus), "sizes": ", ".join(sizes)}


def _footer(sweep: Sweep) -> list[dict[str, Any]]:
    """Title and lines of each part."""
    shape, cluster = sweep.projections[0].shape, sweep.cluster
    efficiency = cluster.efficiency
    plain: dict[str, Any] = json.loads(sweep.to_json())["model"]
    sizes = (
        f"{shape.family}, {shape.parameters / 1e9:.3g} billion parameters, {shape.layers} layers, hidden "
        f"{shape.hidden:,}, {shape.heads} heads ({shape.kv_heads} for keys and values), feed-forward {shape.ffn:,}, "
        f"vocabulary {shape.vocab:,}, sequence {shape.sequence:,}"
    )
    if shape.experts:
        sizes += f", {shape.experts} experts of which a token visits {shape.experts_per_token}"
        sizes += f" and {shape.shared_experts} shared ones" if shape.shared_experts else ""
    model = [sizes] if plain["source"] is None else [sizes, plain["source"]]
    shares = ", ".join(f"{name} {_percent(share)}" for name, share in dataclasses.asdict(efficiency).items())
    rates = (
        f"Shares of nominal rates that are reached: {shares}. A drive that reads and writes at once reaches "
        f"{_percent(SHARE_WHEN_BOTH)} in each direction."
    )
    memory = (
        f"Per parameter: {WEIGHT_BYTES} bytes, {WEIGHT_BYTES} for its gradient, {STATE_BYTES} for optimizer states. "
        f"Context of a GPU: {format_bytes(CONTEXT_BYTES)}. Host memory in which tensors may stay: "
        f"{format_bytes(cluster.host_bytes_per_gpu)} per GPU, besides {format_bytes(STAGING_BYTES)} on the way to "
        "drives."
    )
    left_out = (
        "Not in the model: stragglers, data loading, checkpoints, evaluation, and memory that the allocator cannot use."
    )
    network = f"Network between nodes: {cluster.network_bytes_per_s / 1e9:g} GB/s per GPU and direction."
    assumptions = [rates, network, memory, left_out]
    return [
        {"title": f"Model: {sweep.model}", "lines": model},
        {"title": f"GPU: {cluster.gpu.name}", "lines": [_gpu_line(cluster.gpu), *_sources(cluster.gpu)]},
        {"title": f"Drive: {cluster.drive.name}", "lines": [_drive_line(cluster.drive), *_sources(cluster.drive)]},
        {"title": "Assumptions", "lines": assumptions},
    ]


def _gpu_line(gpu: Gpu) -> str:
    return (
        f"{format_bytes(gpu.memory_bytes)}, {gpu.flops_per_s['bfloat16'] / 1e12:,.4g} TFLOP/s in bfloat16, memory "
        f"{gpu.memory_bytes_per_s / 1e12:.3g} TB/s, host {gpu.host_bytes_per_s / 1e9:g} GB/s, other GPUs "
        f"{gpu.link_bytes_per_s / 1e9:g} GB/s, {gpu.gpus_per_node} per node"
    )


def _drive_line(drive: Drive) -> str:
    price = "no price is known" if drive.price_usd is None else f"${drive.price_usd:,.2f}"
    return (
        f"{drive.capacity_bytes / TB:g} TB, writes {drive.write_bytes_per_s / 1e9:g} GB/s, reads "
        f"{drive.read_bytes_per_s / 1e9:g} GB/s, rated for {drive.endurance_bytes / TB:,.6g} TB written, {price}"
    )


def _sources(device: Gpu | Drive) -> list[str]:
    return [*device.sources, *([] if device.note is None else [device.note])]
