"""The command `ssdtrain-fx explain`, called in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from layered import HARDWARE
from typer.testing import CliRunner, Result

from ssdtrain_fx import Report
from ssdtrain_fx.cli import app

SIZE = ("--layers", "2", "--hidden", "64", "--batch", "2", "--sequence", "64", "--vocab", "64")


def explain(tmp_path: Path, *arguments: str) -> Result:
    profile = tmp_path / "profile.json"
    profile.write_text(HARDWARE.to_json())
    command = ["explain", "gpt2", *SIZE, "--hardware", str(profile), *arguments]
    return CliRunner().invoke(app, command, env={"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"})


def test_it_writes_what_was_asked_for(tmp_path: Path) -> None:
    page, document = tmp_path / "plan.html", tmp_path / "plan.json"
    arguments = ("--html", str(page), "--json", str(document), "--sort", "size", "--diff", "--endurance-tbw", "1200")
    done = explain(tmp_path, *arguments)
    assert done.exit_code == 0, done.output
    report = Report.from_json(document.read_text())
    assert report.rated_endurance_bytes == 1200 * 10**12
    assert report.text("size") in done.output
    assert report.text("size") != report.text()
    assert report.diff() in done.output
    assert report.graphs[0].summary(report.rated_endurance_bytes) in page.read_text()
    assert str(page.resolve()) in done.output and str(document.resolve()) in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sort", "colour"), "'colour' is not one of"),
        (("--html", "/nowhere/at/all.html"), "The directory of /nowhere/at/all.html does not exist"),
        (("--json", "/nowhere/at/all.json"), "The directory of /nowhere/at/all.json does not exist"),
        (("--endurance-tbw", "0"), "Invalid value for '--endurance-tbw'"),
    ],
)
def test_a_wrong_option_is_named_and_nothing_runs(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = explain(tmp_path, *arguments)
    assert done.exit_code == 2
    assert message in done.output
