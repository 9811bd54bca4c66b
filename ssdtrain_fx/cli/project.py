"""``ssdtrain-fx project``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ssdtrain_fx.cli.common import EXIT_FAILED, JsonTarget, check_target, written
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.projection.catalog import drives, find_drive, find_gpu, gpus
from ssdtrain_fx.projection.machine import Efficiency
from ssdtrain_fx.projection.models import MODELS, find_model
from ssdtrain_fx.projection.page import render_page
from ssdtrain_fx.projection.parallelism import Parallelism
from ssdtrain_fx.projection.project import Cluster, Outcome, Projection, Workload
from ssdtrain_fx.projection.sweep import sweep
from ssdtrain_fx.report.endurance import TB, format_lifetime
from ssdtrain_fx.units import format_bytes

GIB = 1 << 30


def project(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}.")],
    gpu: Annotated[str, typer.Option(help="Name in the catalogue, or a part of it: --list shows all.")] = "h100-sxm",
    drive: Annotated[str, typer.Option(help="The same for a drive.")] = "990-pro-4tb",
    drives_per_gpu: Annotated[
        float, typer.Option("--drives", max=1024, help="Drives per GPU, striped; 0.5: two GPUs share one.")
    ] = 4,
    data: Annotated[int, typer.Option(min=1, help="Data-parallel GPUs.")] = 1,
    tensor: Annotated[int, typer.Option(min=1, help="Tensor-parallel GPUs.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Stages of the pipeline.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="GPUs that share the tokens of each sample.")] = 1,
    expert: Annotated[
        int, typer.Option(min=1, help="Data- and context-parallel GPUs over which the experts are spread.")
    ] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Tensor-parallel GPUs share the tokens between products, too.")
    ] = False,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of layers on each stage (virtual stages).")] = 1,
    fsdp: Annotated[bool, typer.Option(help="Data-parallel GPUs share parameters, gradients and states.")] = True,
    micro_batch: Annotated[int, typer.Option(min=1, max=1 << 16, help="Samples of one forward.")] = 1,
    micro_batches: Annotated[int, typer.Option(min=1, help="Forwards per optimizer step and data-parallel GPU.")] = 1,
    sequence: Annotated[
        int | None, typer.Option(min=1, max=1 << 24, help="Tokens of a sample. Default: that of the model.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, max=10_000, help="Default: those of the model.")] = None,
    max_slowdown: Annotated[float, typer.Option(min=0, help="Share of the step time to trade for memory.")] = 0.02,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compare with recomputing each layer in backward, too.")
    ] = False,
    host_gib: Annotated[
        float, typer.Option(min=0, max=1 << 16, help="Pinned memory per GPU in which tensors may stay.")
    ] = 0.0,
    network_gb_per_s: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Per GPU and direction, between nodes.")
    ] = 50.0,
    products: Annotated[
        float, typer.Option(help="Share of the nominal rate that matrix products reach.")
    ] = Efficiency().products,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file; - prints it.")
    ] = None,
    page_path: Annotated[
        Path | None,
        typer.Option("--page", dir_okay=False, help="Write a page with sliders for drives, slowdown and GPUs."),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show the catalogue, and stop.")] = False,
) -> None:
    """Project memory, time and wear of drives for a model on machines that one does not have.

    One micro-batch on one GPU is traced without computing anything, and planned as the backend would, for rates of data
    sheets. Nothing is measured: the figures are projections.

    Example: ssdtrain-fx project llama-3-70b --data 32 --tensor 8 --pipeline 4 --micro-batches 16

    Exit code: 0 done, 2 wrong usage, 3 the sizes do not fit together.
    """
    target = JsonTarget(json_path)
    console = target.console
    if page_path is not None:
        check_target(page_path, "--page")
    if show_list:
        console.print(_catalogue())
        return
    try:
        shape = find_model(model)
        changes = {"layers": layers, "sequence": sequence}
        shape = dataclasses.replace(shape, **{name: value for name, value in changes.items() if value is not None})
        cluster = Cluster(
            gpu=find_gpu(gpu),
            drive=find_drive(drive),
            drives_per_gpu=drives_per_gpu,
            host_bytes_per_gpu=int(host_gib * GIB),
            network_bytes_per_s=network_gb_per_s * 1e9,
            efficiency=Efficiency(products=products),
        )
        parallelism = Parallelism(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=expert,
            sequence_parallel=sequence_parallel,
            chunks=chunks,
            fsdp=fsdp,
            micro_batches=micro_batches,
        )
        workload = Workload(
            shape,
            micro_batch=micro_batch,
            parallelism=parallelism,
            cluster=cluster,
            compare_recomputation=recompute,
        )
        projection = workload.project(cluster, max_slowdown=max_slowdown)
        page = "" if page_path is None else render_page(sweep(workload, cluster))
    except ConfigError as error:
        console.print(f"[red]{error}[/]", highlight=False)
        raise typer.Exit(EXIT_FAILED) from None
    on = f"{parallelism.gpus:,} x {cluster.gpu.name}"
    console.print(f"{model} on {on}: a projection, not a measurement", highlight=False)
    console.print(_table(projection))
    console.print(_below(projection), highlight=False)
    if page_path is not None:
        with written(page_path, "Page", console):
            page_path.write_text(page, encoding="utf-8")
    target.write(json.dumps(to_plain(projection), indent=1))


def to_plain(projection: Projection) -> dict[str, Any]:
    """All numbers that went in and came out."""
    lifetime_s = projection.lifetime_s if math.isfinite(projection.lifetime_s) else None  # JSON knows no infinity
    derived = {"lifetime_s": lifetime_s, "drive_cost_usd": projection.drive_cost_usd}
    return {"schema": 1, **dataclasses.asdict(projection), **derived}


def _table(projection: Projection) -> Table:
    gpu = projection.cluster.gpu
    outcomes = {"kept in memory": projection.keep, "offloaded": projection.offload}
    if projection.recompute is not None:
        outcomes["layers recomputed"] = projection.recompute
    table = Table("", *outcomes)

    def row(name: str, text: Callable[[Outcome], str]) -> None:
        table.add_row(name, *map(text, outcomes.values()))

    def memory(outcome: Outcome) -> str:
        fits = "" if outcome.fits else f" [red](more than {format_bytes(gpu.memory_bytes)})[/]"
        return format_bytes(outcome.memory_bytes) + fits

    row("activations, peak", lambda outcome: format_bytes(outcome.activation_bytes))
    row("memory of a GPU", memory)
    row("optimizer step", lambda outcome: f"{outcome.step_s:.3g} s")
    row("  exposed for drives", lambda outcome: f"{outcome.exposed_s:.3g} s")
    row("tokens/s", lambda outcome: f"{outcome.tokens_per_s:,.0f}")
    row("share of nominal FLOP/s", lambda outcome: f"{outcome.model_flops_share:.1%}")
    row("written per GPU and step", lambda outcome: format_bytes(outcome.written_bytes))
    row("written per GPU and day", lambda outcome: f"{outcome.written_bytes_per_day / TB:.1f} TB")
    return table


def _below(projection: Projection) -> str:
    cluster, parallelism = projection.cluster, projection.parallelism
    step_s = projection.keep.step_s
    price = projection.drive_cost_usd
    cost = "" if price is None else f", and cost {price:,.0f} USD for all GPUs"
    rated = f"{cluster.drive.endurance_bytes / TB:,.0f} TB each"
    return (
        f"Parameters, gradients and states take {format_bytes(projection.state_bytes)} per GPU. Of a step, the "
        f"pipeline waits {parallelism.bubble:.1%}, and collectives expose {projection.communication_s / step_s:.1%}.\n"
        f"{cluster.drives_per_gpu:g} x {cluster.drive.name} per GPU, rated for {rated}, last "
        f"{format_lifetime(projection.lifetime_s)}{cost}."
    )


def _catalogue() -> Table:
    table = Table("name", "memory", "bfloat16", "to the host", "write", "read", "rated for", title="The catalogue")
    for gpu in gpus():
        rate = f"{gpu.flops_per_s['bfloat16'] / 1e12:,.0f} TFLOP/s"
        host = f"{gpu.host_bytes_per_s / 1e9:.0f} GB/s"
        table.add_row(gpu.name, format_bytes(gpu.memory_bytes), rate, host, "", "", "")
    for drive in drives():
        rates = [f"{rate / 1e9:.1f} GB/s" for rate in (drive.write_bytes_per_s, drive.read_bytes_per_s)]
        rated = f"{drive.endurance_bytes / TB:,.0f} TB"
        table.add_row(drive.name, f"{drive.capacity_bytes / TB:.2f} TB", "", "", *rates, rated)
    return table
