"""What is installed into site-packages, and what a clone contains."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from the sources, without network and without leaving anything in the checkout."""
    sources = tmp_path_factory.mktemp("sources")
    copied = ("ssdtrain_fx", "passes", "runtime", "tests", "benchmarks", "pyproject.toml", "README.md", "LICENSE")
    subprocess.run(["cp", "-a", *(str(ROOT / name) for name in copied), str(sources)], check=True)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(sources)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_package_and_nothing_else_at_top_level(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in wheel.namelist()} == {"ssdtrain_fx", "ssdtrain_fx-0.1.0.dist-info"}


def test_the_wheel_holds_every_module_of_the_package(wheel: zipfile.ZipFile) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ssdtrain_fx").rglob("*.py")}
    assert {name for name in wheel.namelist() if name.endswith(".py")} == modules
    assert "ssdtrain_fx/passes/__init__.py" in modules
    assert "ssdtrain_fx/runtime/__init__.py" in modules
    assert "ssdtrain_fx/report/page.html" in wheel.namelist()


def test_the_wheel_is_typed_and_licensed(wheel: zipfile.ZipFile) -> None:
    assert "ssdtrain_fx/py.typed" in wheel.namelist()
    assert "ssdtrain_fx-0.1.0.dist-info/licenses/LICENSE" in wheel.namelist()


def test_the_wheel_registers_the_backend_and_the_command(wheel: zipfile.ZipFile) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read("ssdtrain_fx-0.1.0.dist-info/entry_points.txt").decode())
    assert dict(entry_points["torch_dynamo_backends"]) == {"ssdtrain": "ssdtrain_fx.compiler.dynamo_backend:ssdtrain"}
    assert dict(entry_points["console_scripts"]) == {"ssdtrain-fx": "ssdtrain_fx.__main__:main"}


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_the_links_at_the_top_lead_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("ssdtrain_fx") / name
    assert (link / "__init__.py").is_file()


def test_every_constraint_is_one_exact_version() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    names = [line.split("==")[0].lower() for line in lines]
    assert all(line.count("==") == 1 and not set(line) & set("@/+ ") for line in lines)
    assert len(names) == len(set(names))
    assert "torch" in names
