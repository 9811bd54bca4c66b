"""``ssdtrain-fx pass``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ssdtrain_fx.cli.common import EXIT_FAILED, EXIT_PROBLEM, JsonTarget, check_target, parse_options
from ssdtrain_fx.default_options import config_with_defaults
from ssdtrain_fx.errors import BudgetError, ConfigError, InternalError
from ssdtrain_fx.passes.graph.graph_json import from_json, to_json
from ssdtrain_fx.report.pass_runner import PASSES, PassResult, run_pass


def _list_passes(wanted: bool) -> None:
    if wanted:
        for name, function in PASSES.items():
            typer.echo(f"{name:16} {function.__doc__}")
        raise typer.Exit


def run_one_pass(
    name: Annotated[str, typer.Argument(metavar="NAME", help="See --list.")],
    graph: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="Graph saved by `ssdtrain-fx explain MODEL --save-graph`."),
    ],
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option", metavar="NAME=VALUE", help="Backend option; may be repeated. Others: $SSDTRAIN_OPTIONS."
        ),
    ] = None,
    save_graph: Annotated[
        Path | None, typer.Option("--save-graph", dir_okay=False, help="Write the graph after the pass to this file.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file; - prints it.")
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", callback=_list_passes, is_eager=True, help="List the passes and exit.")
    ] = False,
) -> None:
    """Run a single pass on a saved graph, and print its result and the rewritten graph, if there is one.

    Example: ssdtrain-fx pass plan graph.json --option max_slowdown=0.1 --option hardware=profile.json

    Nothing is computed and no GPU is needed, even for a graph traced on a GPU. Costs and plans for another machine need
    its hardware profile (ssdtrain-fx probe --json). Only --option costs=measured runs ops, on the device of the graph.

    Exit code: 0 done, 1 the graph breaks an invariant, 2 wrong usage, 3 the graph cannot be read or the pass cannot be
    run.
    """
    del show_list  # handled by its callback
    target = JsonTarget(json_path)
    console = target.console
    if name not in PASSES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(PASSES)}.", param_hint="NAME")
    check_target(save_graph, "--save-graph")
    try:
        config = config_with_defaults(parse_options(options or []))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--option") from error
    try:
        with console.status(name):
            joint = from_json(graph.read_text(encoding="utf-8"))
            result = run_pass(name, joint, config)
            after = result.rewritten or joint
            if save_graph is not None:
                save_graph.write_text(to_json(after) + "\n", encoding="utf-8")
    except (ConfigError, BudgetError, InternalError, OSError, UnicodeDecodeError) as error:
        console.print(str(error), style="bold red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_PROBLEM if isinstance(error, InternalError) else EXIT_FAILED) from error
    text = None if result.rewritten is None else result.rewritten.text()
    console.print(_render(name, result))
    console.print(result.summary, markup=False, highlight=False, soft_wrap=True)
    if text is not None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    target.write(json.dumps({"pass": name, "summary": result.summary, "rows": result.rows, "graph": text}, indent=1))


def _render(name: str, result: PassResult) -> Table:
    table = Table(title=name)
    for key in result.rows[0] if result.rows else ():
        is_number = all(isinstance(row[key], (int, float)) and not isinstance(row[key], bool) for row in result.rows)
        table.add_column(key, justify="right" if is_number else "left", overflow="fold")
    for row in result.rows:
        table.add_row(*(Text(_show(value)) for value in row.values()))
    return table


def _show(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}"
        case list():
            return ", ".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case _:
            return str(value)
