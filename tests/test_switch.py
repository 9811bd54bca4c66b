"""``ssdtrain_fx.enable``: the name for Accelerate, and options for backends that are named by a string."""

from __future__ import annotations

import copy
import enum
import logging
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from steps import counted
from test_training_loops import Tower

import ssdtrain_fx
from ssdtrain_fx import ConfigError, OffloadConfig
from ssdtrain_fx.default_options import config_with_defaults
from ssdtrain_fx.switch import add_name

NO_ACCELERATE = "accelerate is not installed"


@pytest.fixture(autouse=True)
def _disabled() -> Iterator[None]:
    ssdtrain_fx.disable()
    yield
    ssdtrain_fx.disable()


class Names(str, enum.Enum):  # noqa: UP042, as in Accelerate
    NO = "NO"
    INDUCTOR = "INDUCTOR"


class NamesWithAnswers(str, enum.Enum):  # noqa: UP042
    """A list that answers for some undeclared values itself."""

    NO = "NO"

    @classmethod
    def _missing_(cls, value: object) -> NamesWithAnswers | None:
        return cls.NO if value == "none" else None


@pytest.mark.parametrize("names", [Names, NamesWithAnswers])
def test_a_name_is_added_and_taken_away_again(names: type[enum.Enum]) -> None:
    before = dict(vars(names))
    undo = add_name(names, "SSDTRAIN")
    member = names("SSDTRAIN")
    assert isinstance(member, names)
    assert (member.name, member.value, str.lower(member)) == ("SSDTRAIN", "SSDTRAIN", "ssdtrain")  # pyright: ignore[reportArgumentType]
    assert member != names.NO
    assert names("SSDTRAIN") is member is copy.deepcopy(member) is pickle.loads(pickle.dumps(member))
    with pytest.raises(ValueError, match="'OTHER' is not a valid"):
        names("OTHER")
    undo()
    with pytest.raises(ValueError, match="'SSDTRAIN' is not a valid"):
        names("SSDTRAIN")
    assert dict(vars(names)) == before


def test_answers_that_the_list_gives_itself_stay() -> None:
    undo = add_name(NamesWithAnswers, "SSDTRAIN")
    assert NamesWithAnswers("none") is NamesWithAnswers.NO
    undo()
    assert NamesWithAnswers("none") is NamesWithAnswers.NO


@pytest.mark.parametrize(("names", "known"), [(Names, "INDUCTOR"), (NamesWithAnswers, "none")])
def test_a_name_that_is_known_is_left_alone(names: type[enum.Enum], known: str) -> None:
    before = dict(vars(names))
    member = names(known)
    undo = add_name(names, known)
    assert dict(vars(names)) == before
    undo()
    assert names(known) is member


def test_accelerate_knows_the_name_from_enable_to_disable() -> None:
    accelerate_utils = pytest.importorskip("accelerate.utils", reason=NO_ACCELERATE)
    names = accelerate_utils.DynamoBackend
    before = dict(vars(names))
    with pytest.raises(ValueError, match="'SSDTRAIN' is not a valid DynamoBackend"):
        accelerate_utils.TorchDynamoPlugin(backend="ssdtrain")
    ssdtrain_fx.enable()
    plugin = accelerate_utils.TorchDynamoPlugin(backend="ssdtrain", options={"max_slowdown": 0.5})
    assert plugin.to_kwargs() == {"backend": "ssdtrain", "options": {"max_slowdown": 0.5}}
    assert accelerate_utils.TorchDynamoPlugin(backend="inductor").backend is names.INDUCTOR
    with pytest.raises(ValueError, match="'SSDTRIAN' is not a valid DynamoBackend"):
        accelerate_utils.TorchDynamoPlugin(backend="ssdtrian")
    ssdtrain_fx.disable()
    assert dict(vars(names)) == before


def test_options_are_the_defaults_until_disable(tmp_path: Path) -> None:
    ssdtrain_fx.enable(max_slowdown=0.1, ssd_dir=tmp_path)
    assert config_with_defaults() == OffloadConfig(max_slowdown=0.1, ssd_dir=tmp_path)
    assert config_with_defaults({"max_slowdown": 0.2}) == OffloadConfig(max_slowdown=0.2, ssd_dir=tmp_path)
    assert ssdtrain_fx.backend().config == OffloadConfig(max_slowdown=0.1, ssd_dir=tmp_path)
    assert ssdtrain_fx.backend(OffloadConfig()).config == OffloadConfig()
    ssdtrain_fx.disable()
    assert config_with_defaults() == OffloadConfig()


def test_options_reach_a_backend_named_by_string() -> None:
    ssdtrain_fx.enable(policy="all", min_tensor_bytes=0, inner="aot_eager")
    compiled = torch.compile(Tower(), backend="ssdtrain")
    assert counted(lambda: compiled(torch.randn(8, 32)).backward()).offloads > 0


def test_a_second_call_replaces_the_options_of_the_first() -> None:
    ssdtrain_fx.enable(policy="all", max_slowdown=0.1)
    ssdtrain_fx.enable(memory_budget_bytes=1 << 30)  # contradicts policy="all"
    assert config_with_defaults() == OffloadConfig(memory_budget_bytes=1 << 30)
    ssdtrain_fx.disable()
    assert config_with_defaults() == OffloadConfig()
    ssdtrain_fx.disable()  # undoes nothing twice


def test_the_environment_counts_less_than_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSDTRAIN_OPTIONS", '{"max_slowdown": 0.05, "checksum": true}')
    ssdtrain_fx.enable(max_slowdown=0.1)
    assert config_with_defaults() == OffloadConfig(max_slowdown=0.1, checksum=True)


def test_a_wrong_option_is_an_error_at_once_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssdtrain_fx.enable(max_slowdown=0.1)
    with pytest.raises(ConfigError, match="Did you mean 'max_slowdown'"):
        ssdtrain_fx.enable(max_slowdon=0.2)
    with pytest.raises(ConfigError, match="does not exist"):
        ssdtrain_fx.enable(ssd_dir=tmp_path / "missing")
    with monkeypatch.context() as patch:
        patch.setenv("SSDTRAIN_OPTIONS", "{")
        with pytest.raises(ConfigError, match="SSDTRAIN_OPTIONS"):
            ssdtrain_fx.enable()
    assert config_with_defaults() == OffloadConfig(max_slowdown=0.1)


def test_without_accelerate_the_rest_is_enabled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ssdtrain_fx.enable(max_slowdown=0.1)
    assert config_with_defaults() == OffloadConfig(max_slowdown=0.1)
    assert caplog.records == []


def test_an_accelerate_that_cannot_be_imported_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "accelerate.py").write_text("raise RuntimeError('needs another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    ssdtrain_fx.enable(max_slowdown=0.1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Accelerate is installed but cannot be imported (needs another torch)" in record.message
    assert config_with_defaults() == OffloadConfig(max_slowdown=0.1)


def test_an_accelerate_without_a_list_of_names_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    open_accelerate, utils = types.ModuleType("accelerate"), types.ModuleType("accelerate.utils")
    open_accelerate.__spec__ = types.SimpleNamespace()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "accelerate", open_accelerate)
    monkeypatch.setitem(sys.modules, "accelerate.utils", utils)
    ssdtrain_fx.enable(max_slowdown=0.1)
    assert config_with_defaults() == OffloadConfig(max_slowdown=0.1)


def test_importing_the_package_imports_neither_trainers_nor_compilers() -> None:
    """Dynamo takes as long to import as torch itself, and a process that does not compile needs none of it."""
    code = """
import sys
import ssdtrain_fx

trainers = ("accelerate", "lightning", "peft", "transformers", "trl")
unwanted = (*trainers, "scipy", "sympy", "torch._dynamo", "torch._inductor")
print([name for name in unwanted if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
