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
        (("--json", "/"), "/ is a directory; expected the path of a file"),
        (("--endurance-tbw", "0"), "Invalid value for '--endurance-tbw'"),
    ],
)
def test_a_wrong_option_is_named_and_nothing_runs(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = explain(tmp_path, *arguments)
    assert done.exit_code == 2
    assert message in done.output


OWN_MODELS = """
import torch

fine = lambda: (torch.nn.Linear(2, 2), (torch.randn(2, 2),))
number = 3

def no_inputs():
    return torch.nn.Linear(2, 2)

def tensor_for_inputs():
    return torch.nn.Linear(2, 2), torch.randn(2, 2)

def with_argument(batch):
    return fine()

def broken():
    raise ValueError("a mistake in the model")
"""


def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str) -> Result:
    (tmp_path / "own_models.py").write_text(OWN_MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    environment = {"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, [command, f"own_models:{name}"], env=environment)


@pytest.mark.parametrize(
    ("command", "name", "message"),
    [
        ("explain", "number", "3 is not a callable object"),
        ("explain", "absent", "has no attribute 'absent'"),
        ("explain", "no_inputs", "own_models:no_inputs returned Linear"),
        ("explain", "tensor_for_inputs", "expected a model and a tuple of its inputs"),
        ("explain", "with_argument", "own_models:with_argument cannot be called with 0 arguments"),
        ("rok", "fine", "own_models:fine cannot be called with 1 arguments"),
    ],
)
def test_a_function_that_makes_no_model_is_a_wrong_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, message: str
) -> None:
    done = own(tmp_path, monkeypatch, command, name)
    assert done.exit_code == 2, done.exception
    assert message in done.output


def test_an_error_within_the_function_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = own(tmp_path, monkeypatch, "explain", "broken")
    assert isinstance(done.exception, ValueError)
    assert str(done.exception) == "a mistake in the model"
