"""Text files that are there completely or not at all: written under another name, and then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def written_beside(path: Path, text: str) -> Generator[Path]:
    """A file with ``text`` in the directory of ``path``, to be renamed or linked to it. What is not is gone at the end.

    Only its owner may read it.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write or replace ``path``, so that nobody ever reads half of it.

    Raises:
        OSError: it cannot be written; what was there still is.
    """
    with written_beside(path, text) as temporary:
        temporary.replace(path)
