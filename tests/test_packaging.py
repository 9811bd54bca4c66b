"""What is installed into site-packages, and what a clone contains."""

from __future__ import annotations

import configparser
import os
import re
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
    data = ("gpus.json", "drives.json", "page.html")
    assert {f"ssdtrain_fx/projection/{name}" for name in data} <= set(wheel.namelist())


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
    assert "torch" not in names, "the Makefile's TORCH pins it"


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell: the tests themselves may run under ``make TORCH=...``, which it would inherit."""
    inherited = ("PYTHON", "TORCH", "VENV", "ARGS", "CONSTRAINTS", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    command = ["make", "--no-print-directory", "-C", str(ROOT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("target", "count"), [("test", 4), ("newest", 0)])
def test_only_the_newest_dependencies_have_no_constraints(target: str, count: int, tmp_path: Path) -> None:
    done = make("--dry-run", f"VENV={tmp_path}", target)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"pip install", done.stdout)) == 4
    assert done.stdout.count("--constraint constraints.txt") == count


@pytest.mark.parametrize(
    ("target", "extra"),
    [
        *[("demo", "demo"), ("bench", "demo"), ("test", "test"), ("test-all", "test"), ("gpu", "test")],
        *[("lint", "lint"), ("format", "lint"), ("docs", "docs")],
    ],
)
def test_a_target_installs_its_own_extra_only(target: str, extra: str, tmp_path: Path) -> None:
    done = make("--dry-run", f"VENV={tmp_path}", target)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"\.\[(\w+)\]", done.stdout) == [extra]
    assert ("kvikio" in done.stdout) == (extra == "test")
    assert f"touch {tmp_path}/.installed-{extra}" in done.stdout


def test_another_torch_is_installed_into_a_separate_environment() -> None:
    assert "torch==2.13.0 " in make("--dry-run", "--always-make", "test").stdout
    done = make("--dry-run", "--always-make", "TORCH=2.15.0", "test").stdout
    assert ".venv-torch-2.15.0/bin/python -m pip install " in done
    assert " torch==2.15.0 --editable '.[test]'" in done


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_python_that_is_too_old_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.version_info = (3, 10, 9); exec(sys.argv[1])"
    old = program(tmp_path / "old", f"""exec '{sys.executable}' -c '{code}' "$2\"""")
    done = make(f"PYTHON={old}", f"VENV={tmp_path / 'venv'}", "demo")
    assert done.returncode != 0
    assert "is Python 3.10; ssdtrain-fx needs 3.11 or newer. Name one: make PYTHON=python3.12 ..." in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_named_python_other_than_that_of_the_environment_is_refused(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    program(venv / "bin" / "pip", "")
    program(venv / "bin" / "python", "echo Python 3.11.7")
    other = program(tmp_path / "other", "echo Python 3.13.0")
    done = make(f"PYTHON={other}", f"VENV={venv}", "same-python")
    assert done.returncode != 0
    assert f"{venv} was made by Python 3.11.7, not by Python 3.13.0. Name another directory" in done.stderr
    assert make(f"PYTHON={venv / 'bin' / 'python'}", f"VENV={venv}", "same-python").returncode == 0
    assert make(f"VENV={venv}", "same-python").returncode == 0
