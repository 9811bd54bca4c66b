"""The folders of the package: what each is for, and which may import which."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ssdtrain_fx"


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    command = [program, "--no-cache"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package and its contracts, to be changed."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "ssdtrain_fx", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_map_says_of_every_folder_what_the_folder_says_itself() -> None:
    """Its docstring begins with one word, and stands in docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    folders = [path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    assert len(folders) > 15
    for folder in folders:
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert docstring is not None
        text = docstring.splitlines()[0].replace("``", "`")
        assert f"`{folder.relative_to(PACKAGE)}/` | {text} |" in page
        assert ":" in text and " " not in text.split(":")[0]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("passes/planning/plan.py", "from ssdtrain_fx.passes.graph import joint_graph"),
        ("passes/graph/alias_sets.py", "from ssdtrain_fx.runtime.engine import Engine"),
        ("runtime/book/ledger.py", "from ssdtrain_fx.runtime.lanes import lane"),
        ("machine/probe.py", "import ssdtrain_fx.compiler.inductor"),
        (
            "report/page.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ssdtrain_fx.report import report",
        ),
    ],
)
def test_an_import_that_goes_up_is_found(copy: Path, module: str, line: str) -> None:
    """Between folders, between files of one folder, and for types only."""
    path = copy / "ssdtrain_fx" / module
    path.write_text(f"{path.read_text()}\n{line}\n")
    found = lint_imports(copy)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "BROKEN" in found.stdout


def test_all_imports_go_down_and_none_is_ignored(copy: Path) -> None:
    found = lint_imports(copy)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "ignore_imports" not in (ROOT / "pyproject.toml").read_text()
