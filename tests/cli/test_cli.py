"""The command line: run in a separate process as users run it, or, where only words matter, in this one."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import click.testing
import pytest
import typer
from typer.testing import CliRunner

from ssdtrain_fx.__main__ import main
from ssdtrain_fx.cli import app
from ssdtrain_fx.cli.common import JsonTarget
from ssdtrain_fx.studies import measure

ROOT = Path(__file__).parents[2]
TINY = ("--steps", "3", "--layers", "2", "--hidden", "64", "--batch", "2", "--sequence", "64", "--device", "cpu")


PLAIN = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
"""Wide and without colour in any terminal."""


def invoke(*arguments: str) -> click.testing.Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, arguments, env=PLAIN)


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ssdtrain_fx", *arguments]
    environment = {**os.environ, **PLAIN}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_version() -> None:
    done = run_command("--version")
    assert (done.returncode, done.stdout) == (0, "ssdtrain-fx 0.1.0\n")


def test_help_lists_the_demo() -> None:
    done = invoke("--help")
    assert done.exit_code == 0
    assert "demo" in done.stdout


def test_help_of_the_demo_lists_its_options() -> None:
    done = invoke("demo", "--help")
    assert done.exit_code == 0
    options = "--steps --layers --hidden --batch --sequence --device --ssd-dir --json --png --seed"
    assert [option for option in options.split() if option not in done.stdout] == []
    assert "--backend" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stepps", "3"), "No such option"),
        (("--steps", "1"), "Invalid value for '--steps'"),
        (("--hidden", "100"), "100 is not a multiple of 64"),
        (("--device", "tpu"), "tpu is not one of"),
        (("--ssd-dir", "/nowhere/at/all"), "does not exist"),
        (("--json", "/nowhere/at/all.json"), "The directory of /nowhere/at/all.json does not exist"),
    ],
)
def test_a_wrong_option_is_named_and_nothing_runs(arguments: tuple[str, ...], message: str) -> None:
    done = invoke("demo", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else find_spec(name))
    with pytest.raises(SystemExit, match=r"typer not installed.* pip install 'ssdtrain-fx\[demo\]'"):
        main()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "ssdtrain"])
def test_demo_trains_both_to_the_same_bits_and_writes_its_files(tmp_path: Path, backend: str) -> None:
    results, picture = tmp_path / "results.json", tmp_path / "memory.png"
    done = run_command("demo", *TINY, "--json", str(results), "--png", str(picture), "--backend", backend)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss, step 3" in done.stdout
    assert "DIFFERENT" not in done.stdout
    assert str(picture) in done.stdout
    written = json.loads(results.read_text())
    assert written["equal"] is True
    assert written["losses_equal"] == [True] * 3
    assert len(set(written["plain"]["losses_hex"])) == 3
    for figures in (written["plain"], written["offloaded"]):
        assert figures["process_peak_bytes"] == max(figures["step_process_peak_bytes"][1:])
        assert figures["growth_bytes"] == figures["process_peak_bytes"] - figures["rest_bytes"] > 0
        assert figures["gradient_bytes"] == figures["rest_parameter_bytes"] > 0
        assert 2 <= figures["rest_optimizer_bytes"] / figures["rest_parameter_bytes"] < 2.1, "AdamW has two moments"
        assert len(figures["memory_course_ms_bytes"]) > 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_full_disk_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    target = JsonTarget(path)
    write_text = Path.write_text

    def fill_disk(path: Path, text: str, **options: Any) -> int:
        write_text(path, text[:1], **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fill_disk)
    with pytest.raises(typer.Exit) as exited:
        target.write("{}")
    assert exited.value.exit_code == 3
    assert capsys.readouterr().out.replace("\n", "") == f"{path} cannot be written: No space left on device."
    assert not path.exists()


def test_a_file_that_may_not_be_written_is_not_deleted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old", encoding="utf-8")
    monkeypatch.setattr(Path, "write_text", mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(typer.Exit):
        JsonTarget(path).write("{}")
    assert path.read_text(encoding="utf-8") == "old"


def test_a_device_that_is_full_is_not_deleted() -> None:
    with pytest.raises(typer.Exit):
        JsonTarget(Path("/dev/full")).write("{}")
    assert Path("/dev/full").is_char_device()


def test_a_run_that_fails_shows_what_it_wrote() -> None:
    with (
        pytest.raises(measure.WorkerError, match=r"(?s)The worker for 'ssdtrain' exited with 1.*Unknown model 'gpt3'"),
        measure.Worker(measure.Run(model="gpt3")) as worker,
    ):
        worker.step()
