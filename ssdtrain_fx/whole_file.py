"""Text files that exist completely or not at all: written under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def written_beside(path: Path, text: str) -> Generator[Path]:
    """A temporary file with ``text`` in the directory of ``path``, to be renamed or linked to ``path``.

    Its temporary name is deleted at the end. Only the owner may read the file.

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
    """Write or replace ``path`` in one step, so that a reader never sees half of it.

    Raises:
        OSError: it cannot be written; the previous file is unchanged.
    """
    with written_beside(path, text) as temporary:
        temporary.replace(path)
