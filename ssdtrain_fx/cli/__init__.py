"""Commands: the ``ssdtrain-fx`` program, one file per subcommand."""

from __future__ import annotations

from typing import Annotated

import typer

from ssdtrain_fx import __version__
from ssdtrain_fx.cli.bench import bench
from ssdtrain_fx.cli.demo import demo
from ssdtrain_fx.cli.doctor import doctor
from ssdtrain_fx.cli.explain import explain
from ssdtrain_fx.cli.probe import probe
from ssdtrain_fx.cli.project import project
from ssdtrain_fx.cli.rok import rok
from ssdtrain_fx.cli.run_pass import run_one_pass

app = typer.Typer(
    help="Offload activations to SSD with torch.compile: bit-identical gradients, lower peak memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ssdtrain-fx {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version  # handled by its callback


for command in (bench, demo, doctor, explain, probe, project, rok):
    app.command()(command)
app.command("pass")(run_one_pass)
