"""Shared parts of the commands: exit codes, options, progress bars, loading of models, JSON output."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from ssdtrain_fx.studies.measure import Run, Step, Turn
from ssdtrain_fx.studies.own_models import ModelFunction, OwnModelError, load_model_function
from ssdtrain_fx.units import format_bytes

TAKING_TURNS = "The processes take turns, so that other load slows all of them alike."
EXIT_DIFFERENT = 1
EXIT_PROBLEM = 1
EXIT_FAILED = 3

DeviceOption = Annotated[
    str, typer.Option(help="auto: use an accelerator if there is one. cpu, cuda, or the type of another accelerator.")
]
SsdDirOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Directory on the SSD; repeat for several drives. Default: $SSDTRAIN_DIR, else the temporary directory."
    ),
]


def load_callable(name: str, *, hint: str = "MODEL") -> ModelFunction:
    """:func:`~ssdtrain_fx.studies.own_models.load_model_function`, with errors as those of the argument ``hint``.

    Raises:
        typer.BadParameter: when this is called, or when the function that it returns is.
    """

    @contextlib.contextmanager
    def reported() -> Generator[None]:
        try:
            yield
        except OwnModelError as error:
            raise typer.BadParameter(str(error), param_hint=hint) from error

    with reported():
        make = load_model_function(name)

    @functools.wraps(make)
    def make_reported(*arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        with reported():
            return make(*arguments)

    return make_reported


def progress_columns() -> tuple[ProgressColumn, ...]:
    return (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )


class StepProgress:
    """Prints a line for every step that has ended, with what comes next and how long that may take.

    On a terminal there is a bar below these lines as well. Elsewhere (a log, a pipe) only the lines are written, each
    of them at once.
    """

    def __init__(self, console: Console, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._done = 0
        self._seconds: dict[bool, float] = {}
        self._since_s = time.monotonic()
        self._progress = Progress(*progress_columns(), console=console, disable=not console.is_terminal)
        self._bar = self._progress.add_task("", total=len(turns))

    def __enter__(self) -> Self:
        self._progress.start()
        self._announce_next(TAKING_TURNS)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step_done(self, run: Run, step: Step) -> None:
        now_s = time.monotonic()
        self._seconds[step.index == 0] = now_s - self._since_s
        self._since_s = now_s
        figures = f"{step.duration_ms:,.0f} ms, peak {format_bytes(step.process_peak_bytes)}, loss {step.loss:.6f}"
        title = _step_title(self._turns[self._done])
        self._done += 1
        self._announce_next(f"[{self._done}/{len(self._turns)}] {title}: {figures}.")

    def _announce_next(self, line: str) -> None:
        self._progress.update(self._bar, completed=self._done)
        if self._done == len(self._turns):
            self._print(line)
            return
        turn = self._turns[self._done]
        following = f"{_step_title(turn)}, {self._expected(turn)}"
        self._progress.update(self._bar, description=following)
        self._print(f"{line} Next: {following}.")

    def _print(self, line: str) -> None:
        self._progress.console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)

    def _expected(self, turn: Turn) -> str:
        """How long a step may take: as long as the latest step of its kind."""
        first = turn.index == 0
        if (seconds := self._seconds.get(first)) is not None:
            return f"about {seconds:.0f} s"
        return "which compiles: about a minute" if first else "some seconds"


def _step_title(turn: Turn) -> str:
    which = "step for the course of memory" if turn.sampled else f"step {turn.index + 1} of {turn.steps}"
    return f"{turn.run.title}, {which}"


def check_target(path: Path | None, option: str) -> None:
    """Raise typer.BadParameter if no file can be written to ``path``. Call it before any work is done."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"The directory of {path} does not exist.", param_hint=option)
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a directory; expected the path of a file.", param_hint=option)


@contextlib.contextmanager
def written(path: Path, title: str, console: Console) -> Generator[None]:
    """A block that writes ``path``. Prints where it is.

    If it cannot be written, one line says why, and the command ends with EXIT_FAILED. On a full disk, nothing of the
    file is left.
    """
    try:
        yield
    except OSError as error:
        # Other errors come before a byte was written, so the file that was there is whole.
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and path.is_file():  # not a device
            path.unlink()
        reason = error.strerror or str(error)
        console.print(f"{path} cannot be written: {reason}.", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAILED) from error
    console.print(f"{title}: {path.resolve()}", highlight=False, soft_wrap=True, markup=False)


class JsonTarget:
    """The destination of `--json PATH`: a file, `-` for stdout, or none.

    With `-`, all other output goes to stderr, so that stdout contains only JSON.

    Raises:
        typer.BadParameter: the path is a directory, or that of the file does not exist. Raised before any work is done.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._to_stdout = path == Path("-")
        check_target(path, "--json")
        self.console = Console(stderr=self._to_stdout)

    def write(self, text: str) -> None:
        """Write `text` to its destination, and print the path of a file; see :func:`written`."""
        if self._to_stdout:
            typer.echo(text)
        elif self._path is not None:
            with written(self._path, "JSON", self.console):
                self._path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


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
