"""Every error of :mod:`mutants` is noticed by its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import build
import pytest
from device_process import DeviceProcess, run_on_gpu
from mutants import MUTANTS, QUICK, Mutant
from real_cuda import SKIPPED

from ssdtrain_fx._torch_private.arena import ArenaUnavailableError


def _marks(mutant: Mutant) -> list[pytest.MarkDecorator]:
    return [] if mutant.name in QUICK else [pytest.mark.slow]


def test_names_are_different() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert set(QUICK) <= set(names)


@pytest.fixture(scope="module")
def forking_process(real_device: bool) -> Iterator[DeviceProcess | None]:
    if real_device:
        yield None
        return
    try:
        process = DeviceProcess(build.build())
    except ArenaUnavailableError as error:
        pytest.skip(f"the simulated device cannot be built: {error}")
    yield process
    process.close()


@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=mutant.name, marks=_marks(mutant)) for mutant in MUTANTS])
def test_mutant_is_noticed(mutant: Mutant, forking_process: DeviceProcess | None, tmp_path: Path) -> None:
    mutant.apply(tmp_path)
    run = run_on_gpu if forking_process is None else forking_process.run
    failure = run("test_ordering", mutant.test, {"ssd_dir": str(tmp_path), **mutant.arguments}, tmp_path)
    if failure is not None and failure.startswith(SKIPPED):
        pytest.skip(failure.removeprefix(SKIPPED))
    assert failure is not None, f"{mutant.test} does not notice {mutant.name}"
    assert "Traceback (most recent call last)" in failure, failure  # the test has failed; nothing has died or hung
    for word in ("ImportError", "SyntaxError", "IndentationError", "NameError", "AttributeError"):
        assert word not in failure, failure
