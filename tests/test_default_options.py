"""Options without code: ``$SSDTRAIN_OPTIONS``, below what the program itself gives."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import counted
from test_training_loops import Tower
from typer.testing import CliRunner

import ssdtrain_fx
from ssdtrain_fx import ConfigError, OffloadConfig, backend
from ssdtrain_fx.cli import app
from ssdtrain_fx.default_options import _log_overridden, config_with_defaults

EVERYTHING = {"policy": "all", "min_tensor_bytes": 0, "inner": "aot_eager"}


@pytest.fixture(autouse=True)
def _nothing_logged_yet() -> Iterator[None]:
    _log_overridden.cache_clear()
    yield
    _log_overridden.cache_clear()


def set_options(monkeypatch: pytest.MonkeyPatch, options: object) -> None:
    monkeypatch.setenv("SSDTRAIN_OPTIONS", options if isinstance(options, str) else json.dumps(options))


def train(**options: Any) -> int:
    """Compile and run one step of a small model. Returns the number of tensors that were offloaded."""
    torch._dynamo.reset()
    compiled = torch.compile(Tower(), **options)
    return counted(lambda: compiled(torch.randn(8, 32)).backward()).offloads


def test_a_backend_named_by_string_takes_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(backend="ssdtrain") == 0  # everything is smaller than the default of min_tensor_bytes
    set_options(monkeypatch, EVERYTHING)
    assert train(backend="ssdtrain") > 0
    assert train(backend=backend()) > 0
    assert train(backend=backend(OffloadConfig())) == 0  # a configuration is complete


def test_options_of_the_program_count_more_key_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, {"max_slowdown": 0.05, "min_tensor_bytes": 7})
    assert config_with_defaults({"max_slowdown": 0.1, "checksum": True}) == OffloadConfig(
        max_slowdown=0.1, min_tensor_bytes=7, checksum=True
    )


def test_the_log_says_once_which_options_were_overridden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_options(monkeypatch, {"max_slowdown": 0.05, "min_tensor_bytes": 7})
    with caplog.at_level(logging.INFO, logger="ssdtrain_fx"):
        for _ in range(3):
            config_with_defaults({"max_slowdown": 0.1, "min_tensor_bytes": 7})
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.message == (
        "the program sets options that SSDTRAIN_OPTIONS sets too; those of the program count: max_slowdown=0.1 "
        "(not 0.05)"
    )


def test_nothing_is_logged_where_nothing_is_overridden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_options(monkeypatch, {"max_slowdown": 0.05})
    with caplog.at_level(logging.INFO, logger="ssdtrain_fx"):
        config_with_defaults({"checksum": True})
    assert caplog.records == []


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_variable_sets_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, text)
    assert config_with_defaults() == OffloadConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"max_slowdon": 0.05}', "Unknown option 'max_slowdon' for backend 'ssdtrain'. Did you mean 'max_slowdown'?"),
        ('{"max_slowdown": "fast"}', "Option 'max_slowdown' of backend 'ssdtrain' is 'fast'; expected a number"),
        ('{"max_slowdown": NaN}', "expected a finite number >= 0"),
        ('{"passes": ["mine"]}', "expected a sequence of functions"),
        ("max_slowdown=0.05", "which is not JSON (Expecting value: line 1 column 1 (char 0)); expected a JSON object"),
        ("{'max_slowdown': 0.05}", "which is not JSON"),
        ("[0.05]", "which is not a JSON object; expected a JSON object"),
        ("null", "which is not a JSON object"),
    ],
)
def test_an_error_names_the_variable(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, text)
    with pytest.raises(ConfigError) as caught:
        config_with_defaults({"max_slowdown": 0.1})
    assert str(caught.value).startswith("The environment variable SSDTRAIN_OPTIONS ")
    assert expected in str(caught.value)
    with pytest.raises(Exception, match="SSDTRAIN_OPTIONS"):
        train(backend="ssdtrain")


def test_an_error_of_the_program_does_not_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, {"max_slowdown": 0.05})
    with pytest.raises(ConfigError) as caught:
        config_with_defaults({"checksum": 1})
    assert "SSDTRAIN_OPTIONS" not in str(caught.value)


def test_options_that_contradict_each_other_across_the_two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, {"memory_budget_bytes": 1 << 30})
    with pytest.raises(ConfigError) as caught:
        config_with_defaults({"policy": "all"})
    assert str(caught.value).startswith(
        "The environment variable SSDTRAIN_OPTIONS sets memory_budget_bytes, which does not suit the options of the "
        "program. Options policy='all' and memory_budget_bytes of backend 'ssdtrain' contradict each other"
    )


def test_the_directory_in_the_options_counts_more_than_the_one_in_ssdtrain_dir(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSDTRAIN_DIR", str(tmp_path / "missing"))
    set_options(monkeypatch, {"ssd_dir": str(tmp_path)})
    assert backend().config.ssd_dir == str(tmp_path)


def test_the_variable_is_part_of_the_key_of_compile_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: set[str] = set()
    for options in ({}, {"max_slowdown": 0.05}, {"max_slowdown": 0.06}):
        set_options(monkeypatch, options)
        keys.add(config_with_defaults().cache_key())
    assert len(keys) == 3


@pytest.mark.usefixtures("one_thread")
def test_a_warm_compile_cache_never_answers_for_other_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same model three times, with the caches on disk warm from the second one on."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    moved: list[int] = []
    for min_tensor_bytes in (0, 1 << 20, 0):
        set_options(monkeypatch, {"policy": "all", "min_tensor_bytes": min_tensor_bytes})
        moved.append(train(backend="ssdtrain"))
    assert moved[0] == moved[2] > 0
    assert moved[1] == 0


def test_explain_and_rok_show_what_training_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 32)

    def moved() -> int:
        return sum(graph.plan.offloaded_bytes for graph in ssdtrain_fx.explain(Tower(), x).graphs)

    assert moved() == 0
    set_options(monkeypatch, {"policy": "all", "min_tensor_bytes": 0})
    assert moved() > 0
    set_options(monkeypatch, {"min_tensor_bytes": "all"})
    with pytest.raises(ConfigError, match="SSDTRAIN_OPTIONS"):
        ssdtrain_fx.rok(lambda batch: (Tower(), (x,)), batch_sizes=[1])


def test_the_command_explain_uses_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--layers", "1", "--hidden", "64", "--batch", "1", "--sequence", "32"]
    set_options(monkeypatch, {"max_slowdown": -1})
    done = CliRunner().invoke(app, ["explain", "gpt2", *sizes])
    assert done.exit_code == 2
    assert "SSDTRAIN_OPTIONS" in done.output
    set_options(monkeypatch, {"policy": "all", "min_tensor_bytes": 0})
    done = CliRunner().invoke(app, ["explain", "gpt2", *sizes, "--json", "-"])
    assert done.exit_code == 0, done.output
    assert sum(graph.plan.offloaded_bytes for graph in ssdtrain_fx.Report.from_json(done.stdout).graphs) > 0
