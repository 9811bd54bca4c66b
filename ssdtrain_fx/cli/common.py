"""What several commands share: exit codes, progress bars, how a model is named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

EXIT_DIFFERENT = 1
EXIT_FAILED = 3


def load_callable(name: str) -> Callable[[], tuple[Any, tuple[Any, ...]]]:
    """``package.module:function``; the working directory is searched too."""
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
