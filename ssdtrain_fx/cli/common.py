"""Shared parts of the commands: exit codes, options, progress bars, loading of models, JSON output."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

EXIT_DIFFERENT = 1
EXIT_PROBLEM = 1
EXIT_FAILED = 3

DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: use a GPU if there is one.")]
SsdDirOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Directory on the SSD; repeat for several drives. Default: $SSDTRAIN_DIR, else the temporary directory."
    ),
]


def load_callable(name: str) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """Import ``package.module:function``. The working directory is searched too."""
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    finally:
        sys.path.remove("")


def progress_columns() -> tuple[ProgressColumn, ...]:
    return (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )


class JsonTarget:
    """The destination of `--json PATH`: a file, `-` for stdout, or none.

    With `-`, all other output goes to stderr, so that stdout contains only JSON.

    Raises:
        typer.BadParameter: the directory of the file does not exist. Raised before any work is done.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._to_stdout = path == Path("-")
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"The directory of {path} does not exist.", param_hint="--json")
        self.console = Console(stderr=self._to_stdout)

    def write(self, text: str) -> None:
        """Write `text` to its destination, and print the path of a file."""
        if self._to_stdout:
            typer.echo(text)
        elif self._path is not None:
            self._path.write_text(text.rstrip("\n") + "\n")
            self.console.print(f"JSON: {self._path.resolve()}", highlight=False, soft_wrap=True, markup=False)


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Parse `NAME=VALUE` pairs. A value is parsed as JSON, or taken as text if it is not valid JSON.

    Raises:
        ValueError: a pair has no "=".
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"--option {pair!r} has no '='; expected NAME=VALUE.")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options
