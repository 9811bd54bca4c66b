"""Every notebook runs from top to bottom; what it claims, it asserts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))

RUN = """
import sys
import nbclient
import nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": sys.argv[2]}}).execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        print(output.get("text", ""), end="")
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    # In a process of its own: the notebook client leaves event loops open, and warnings are errors here.
    command = [sys.executable, "-c", RUN, str(path), str(path.parent.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_notebooks_are_stored_without_outputs() -> None:
    assert NOTEBOOKS
    assert [path.name for path in NOTEBOOKS if '"output_type"' in path.read_text()] == []
