"""``ssdtrain-fx explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ssdtrain_fx.cli.common import EXIT_FAILED, JsonTarget, check_target, load_callable, parse_options, written
from ssdtrain_fx.compiler.save_graphs import save_joint_graphs
from ssdtrain_fx.default_options import config_with_defaults
from ssdtrain_fx.errors import BudgetError, ConfigError
from ssdtrain_fx.report import explain as explain_model
from ssdtrain_fx.report.endurance import ASSUMED_ENDURANCE_BYTES, TB
from ssdtrain_fx.report.table import Sort
from ssdtrain_fx.studies.own_models import is_own_model
from ssdtrain_fx.studies.zoo import MODELS, build


def explain(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}; or module:callable, see below.")],
    layers: Annotated[int, typer.Option(min=1)] = 4,
    hidden: Annotated[int, typer.Option(min=64)] = 256,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    sequence: Annotated[int, typer.Option(min=8, help="Tokens, or pixels along one side of an image.")] = 256,
    vocab: Annotated[int, typer.Option(min=2)] = 1024,
    dropout: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    max_slowdown: Annotated[
        float | None,
        typer.Option(min=0, help="Share of the step time to trade for memory.", show_default="0.01"),
    ] = None,
    memory_budget_bytes: Annotated[
        int | None,
        typer.Option(
            "--budget", min=1, help="Bytes that a step may add to the memory of the process, with the least added time."
        ),
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Plan for this hardware profile (from probe --json) instead of this machine.",
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option", metavar="NAME=VALUE", help="Backend option; may be repeated. Others: $SSDTRAIN_OPTIONS."
        ),
    ] = None,
    save_graph: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write the graph before all passes, for ssdtrain-fx pass and bug reports."),
    ] = None,
    sort: Annotated[Sort, typer.Option(help="Order of the table; 'order' is the order of forward.")] = "order",
    diff: Annotated[bool, typer.Option("--diff", help="Also print the changes to the graph.")] = False,
    endurance_tbw: Annotated[
        float, typer.Option(min=1e-6, help="Rated endurance of the drive in terabytes written, from its data sheet.")
    ] = ASSUMED_ENDURANCE_BYTES / TB,
    optimal: Annotated[bool, typer.Option("--optimal", help="Also compare the plan with an exact solution.")] = False,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write an HTML page that needs no network.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file (see docs/report.md); - prints it.")
    ] = None,
) -> None:
    """Show what would be offloaded in one training step, and why the rest would not.

    Nothing is computed or written, except with --option costs=measured, which runs single ops and stores their times.
    module:callable names your own function without arguments that returns a model and a tuple of its inputs.

    Example: ssdtrain-fx explain gpt2 --layers 12 --hidden 384 --batch 8 --max-slowdown 0.05 --html plan.html

    Exit code: 0 done, 2 wrong usage, 3 the model cannot be traced or the budget cannot be met.
    """
    target = JsonTarget(json_path)
    console = target.console
    check_target(save_graph, "--save-graph")
    check_target(html, "--html")
    sizes = {"layers": layers, "hidden": hidden, "batch": batch, "sequence": sequence, "vocab": vocab}
    if is_own_model(model):
        module, inputs = load_callable(model)()
    else:
        try:
            module, make_batch = build(model, **sizes, dropout=dropout)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="MODEL") from error
        inputs = make_batch(torch.Generator().manual_seed(0))
    named: dict[str, Any] = {
        "max_slowdown": max_slowdown,
        "memory_budget_bytes": memory_budget_bytes,
        "hardware": hardware,
    }
    chosen = {name: value for name, value in named.items() if value is not None}
    try:
        config = config_with_defaults({**chosen, **parse_options(options or [])})
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--option") from error
    if save_graph is not None and config.chunk_loss != "off":
        raise typer.BadParameter(
            "A graph whose loss is computed in chunks cannot be saved. Leave out chunk_loss.", param_hint="--save-graph"
        )
    try:
        if save_graph is not None:
            with console.status("tracing"):
                saved = save_joint_graphs(save_graph, module, *inputs)
            for path in saved:
                console.print(f"Graph: {path.resolve()}", highlight=False, soft_wrap=True, markup=False)
        with console.status("tracing"):
            report = explain_model(module, *inputs, config=config, rated_endurance_bytes=round(endurance_tbw * TB))
    except (ConfigError, BudgetError) as error:
        console.print(str(error), style="bold red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAILED) from error
    console.print(report.text(sort), markup=False, highlight=False, soft_wrap=True)
    if optimal:
        for graph in report.graphs:
            with console.status("solving exactly"):
                line = graph.optimality(config)
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if diff:
        console.print(report.diff(), markup=False, highlight=False, soft_wrap=True)
    if json_path is not None:
        target.write(report.to_json())
    if html is not None:
        with written(html, "Page", console):
            report.save(html)
