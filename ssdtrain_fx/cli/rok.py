"""``ssdtrain-fx rok``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from rich.table import Table

from ssdtrain_fx.cli.common import EXIT_FAILED, JsonTarget, check_target, load_callable, progress_columns, written
from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.studies.measure import Run, WorkerError
from ssdtrain_fx.studies.own_models import is_own_model
from ssdtrain_fx.studies.rok_curve import MAX_SLOWDOWNS, MakeModel, RokCurve
from ssdtrain_fx.studies.rok_curve import rok as predict
from ssdtrain_fx.studies.rok_measurement import measure_rok
from ssdtrain_fx.studies.rok_picture import draw_rok, table_rows
from ssdtrain_fx.studies.zoo import MODELS, build, checkpoint_every_layer

BATCH_SIZES = (2, 4, 8)


def rok(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}; or module:callable, see below.")],
    layers: Annotated[int, typer.Option(min=1)] = 4,
    hidden: Annotated[int, typer.Option(min=64)] = 256,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated. Default: 2, 4 and 8.")] = None,
    sequence: Annotated[int, typer.Option(min=8, help="Tokens, or pixels along one side of an image.")] = 256,
    vocab: Annotated[int, typer.Option(min=2)] = 1024,
    dropout: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    max_slowdown: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Share of the step time to trade for memory; may be repeated. Default: 0.02 and 0.1."),
    ] = None,
    memory_budgets_bytes: Annotated[
        list[int] | None,
        typer.Option(
            "--budget", min=1, help="Bytes that a step may add to the memory of the process; may be repeated."
        ),
    ] = None,
    min_tensor_bytes: Annotated[int, typer.Option(min=0, help="Smaller storages stay in memory.")] = 1 << 20,
    hardware: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Plan for this hardware profile (from probe --json) instead of this machine.",
        ),
    ] = None,
    recomputing: Annotated[
        str | None,
        typer.Option(help="module:callable as for MODEL, with every layer checkpointed. Adds the strategy recompute."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also train each point, which takes minutes each.")
    ] = False,
    steps: Annotated[int, typer.Option(min=2, help="With --measure: steps of each run. The first one compiles.")] = 5,
    ssd_dir: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, writable=True, help="With --measure: directory on the SSD."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all points to this file; - prints them.")
    ] = None,
    png_path: Annotated[Path, typer.Option("--png", dir_okay=False, help="Write the plot to this file.")] = Path(
        "ssdtrain-rok.png"
    ),
) -> None:
    """Compare recompute, offload and keep: peak memory against throughput, over batch sizes and limits.

    Points are predicted from traced graphs. Without --measure, nothing is computed or written to the SSD.
    module:callable names your own function that takes a batch size and returns a model and a tuple of its inputs.

    Example: ssdtrain-fx rok gpt2 --layers 12 --batch 4 --batch 8 --batch 16 --max-slowdown 0.05 --max-slowdown 0.2

    Exit code: 0 done, 2 wrong usage, 3 the model cannot be traced or a run failed.
    """
    target = JsonTarget(json_path)
    console = target.console
    check_target(png_path, "--png")
    own = is_own_model(model)
    if own and measure:
        raise typer.BadParameter(f"only works for {', '.join(MODELS)}.", param_hint="--measure")
    if recomputing is not None and not own:
        raise typer.BadParameter("--recomputing is only for a MODEL given as module:callable.", param_hint=model)
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "sequence": sequence, "vocab": vocab}
    try:
        if own:
            make, make_recomputing = (
                load_callable(model),
                None if recomputing is None else load_callable(recomputing, hint="--recomputing"),
            )
        else:
            make, make_recomputing = _zoo_makers(model, {**sizes, "dropout": dropout})
            make(1)
    except (ValueError, ImportError, AttributeError) as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from error
    try:
        with Progress(*progress_columns(), console=console) as progress:
            bar = progress.add_task("", total=None)

            def on_progress(description: str, done: int, total: int) -> None:
                progress.update(bar, description=description, completed=done, total=total)

            curve = predict(
                make,
                batch_sizes=batch or BATCH_SIZES,
                max_slowdowns=max_slowdown or MAX_SLOWDOWNS,
                memory_budgets_bytes=memory_budgets_bytes or (),
                make_recomputing_model=make_recomputing,
                config=OffloadConfig(hardware=hardware, min_tensor_bytes=min_tensor_bytes),
                on_progress=on_progress,
            )
            if measure:
                options: dict[str, Any] = {"min_tensor_bytes": min_tensor_bytes}
                options |= {} if hardware is None else {"hardware": str(hardware)}
                options |= {} if ssd_dir is None else {"ssd_dir": str(ssd_dir)}
                run = Run(model=model, **sizes, dropout=dropout, options=options)
                curve = measure_rok(curve, run, steps=steps, on_progress=on_progress)
    except (ConfigError, WorkerError) as error:
        console.print(str(error), style="bold red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAILED) from error
    console.print(_table(curve))
    for reason in curve.skipped:
        console.print(f"Skipped: {reason}", markup=False, highlight=False, soft_wrap=True)
    title = model if own else f"{model}, {layers} layers, hidden {hidden}, sequence {sequence}"
    with written(png_path, "Picture", console):
        draw_rok(curve, png_path, title=title)
    target.write(curve.to_json())


def _zoo_makers(model: str, sizes: dict[str, Any]) -> tuple[MakeModel, MakeModel]:
    """Functions that build the named model without and with every layer checkpointed."""

    def make(batch: int) -> tuple[Any, tuple[Any, ...]]:
        module, make_batch = build(model, **sizes, batch=batch)
        return module, make_batch(torch.Generator().manual_seed(0))

    def make_recomputing(batch: int) -> tuple[Any, tuple[Any, ...]]:
        module, inputs = make(batch)
        checkpoint_every_layer(module)
        return module, inputs

    return make, make_recomputing


def _table(curve: RokCurve) -> Table:
    measured = all(point.measured is not None for point in curve.points)
    table = Table(title="measured" if measured else "predicted", caption="*: no point is both smaller and faster")
    for name in ("strategy", "batch", "limit", "peak", "step", "samples/s", ""):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for row in table_rows(curve):
        table.add_row(*row)
    return table
