"""When KvikIO is used, and that its trial cannot hang."""

import importlib
import importlib.util
import json
import logging
import sys
import types
from collections.abc import Callable

import pytest

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.runtime.lanes.threads.kvikio_choice import (
    Kvikio,
    Trial,
    TrialError,
    choose_kvikio,
    may_use_kvikio,
    run_in_child,
)

DIRECTORIES = ("/fast", "/faster")
FASTER = Trial(gds=True, kvikio_s=1.0, staged_s=2.0)


class Gpu:
    def __init__(self, available: bool = True) -> None:
        self.available = available

    def is_available(self) -> bool:
        return self.available

    def current_device(self) -> int:
        return 3


def shows(trial: Trial) -> Callable[[str, tuple[str, ...]], Trial]:
    def run(device: str, directories: tuple[str, ...]) -> Trial:
        assert (device, directories) == ("cuda:3", DIRECTORIES)
        return trial

    return run


def fails(device: str, directories: tuple[str, ...]) -> Trial:
    raise TrialError("the trial of KvikIO failed: no driver")


def must_not_run(device: str, directories: tuple[str, ...]) -> Trial:
    raise AssertionError("no trial is needed here")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("kvikio")
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return module


def test_without_a_gpu_it_is_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} must not be touched without a GPU")

    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.setattr(importlib.util, "find_spec", refuse)
    assert choose_kvikio("auto", DIRECTORIES, Gpu(False), must_not_run) is None
    assert choose_kvikio("posix", DIRECTORIES, Gpu(), must_not_run) is None
    assert choose_kvikio("aio", DIRECTORIES, Gpu(), must_not_run) is None
    with pytest.raises(ConfigError, match=r"torch finds no usable CUDA GPU.*pip install ssdtrain-fx\[gds\]"):
        may_use_kvikio("kvikio", Gpu(False))


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_kvikio("auto", DIRECTORIES, Gpu(), must_not_run) is None
    with pytest.raises(ConfigError, match="KvikIO is not installed"):
        may_use_kvikio("kvikio", Gpu())


@pytest.mark.parametrize(
    ("trial", "used"),
    [
        (FASTER, True),
        (Trial(gds=True, kvikio_s=2.0, staged_s=2.0), False),
        (Trial(gds=True, kvikio_s=3.0, staged_s=2.0), False),
        (Trial(gds=False, kvikio_s=1.0, staged_s=2.0), False),
    ],
)
def test_auto_takes_what_is_really_direct_and_faster(installed: types.ModuleType, trial: Trial, used: bool) -> None:
    chosen = choose_kvikio("auto", DIRECTORIES, Gpu(), shows(trial))
    assert chosen == (Kvikio(installed, gds=True) if used else None)


def test_kvikio_is_used_if_requested_even_if_it_is_slow(installed: types.ModuleType) -> None:
    trial = Trial(gds=False, kvikio_s=9.0, staged_s=1.0)
    assert choose_kvikio("kvikio", DIRECTORIES, Gpu(), shows(trial)) == Kvikio(installed, gds=False)


def test_a_trial_that_fails(installed: types.ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_kvikio("auto", DIRECTORIES, Gpu(), fails) is None
    assert "CUDA tensors go through host memory: the trial of KvikIO failed: no driver" in caplog.text
    with pytest.raises(ConfigError, match=r'io="kvikio": the trial of KvikIO failed: no driver\. Fix this'):
        choose_kvikio("kvikio", DIRECTORIES, Gpu(), fails)


def python(script: str, timeout_s: float = 60.0) -> Trial:
    return run_in_child([sys.executable, "-c", script], timeout_s)


def test_a_child_that_ends_well() -> None:
    content = json.dumps({"gds": True, "kvikio_s": 1.0, "staged_s": 2.0})
    assert python(f"print('a note'); print({content!r})") == FASTER


def test_a_child_that_hangs_is_killed() -> None:
    with pytest.raises(TrialError, match=r"did not finish within 0\.2 s and was killed"):
        python("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass", 0.2)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise OSError('no driver')", "failed: OSError: no driver"),
        ("import os; os.abort()", "failed: -6"),
        ("print('x')", "printed 'x'"),
        ("print('{}')", "printed '{}'"),
        ("", "printed ''"),
    ],
)
def test_a_child_that_fails(script: str, message: str) -> None:
    with pytest.raises(TrialError, match=message):
        python(script)


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(TrialError, match="could not start"):
        run_in_child(["/this/is/nowhere"])
