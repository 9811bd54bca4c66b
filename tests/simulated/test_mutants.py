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
def forking_processes() -> Iterator[dict[str, DeviceProcess]]:
    """By the type of their device."""
    processes: dict[str, DeviceProcess] = {}
    yield processes
    for process in processes.values():
        process.close()


@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=mutant.name, marks=_marks(mutant)) for mutant in MUTANTS])
def test_mutant_is_noticed(
    mutant: Mutant, forking_processes: dict[str, DeviceProcess], real_device: bool, tmp_path: Path
) -> None:
    device_type = mutant.device_type
    if real_device and device_type != "cuda":
        pytest.skip("the device is CUDA's")
    if not real_device and device_type not in forking_processes:
        try:
            forking_processes[device_type] = DeviceProcess(build.build(device_type), device_type)
        except ArenaUnavailableError as error:
            pytest.skip(f"the simulated device cannot be built: {error}")
    mutant.apply(tmp_path)
    run = run_on_gpu if real_device else forking_processes[device_type].run
    failure = run("test_ordering", mutant.test, {"ssd_dir": str(tmp_path), **mutant.arguments}, tmp_path)
    if failure is not None and failure.startswith(SKIPPED):
        pytest.skip(failure.removeprefix(SKIPPED))
    assert failure is not None, f"{mutant.test} does not notice {mutant.name}"
    assert "Traceback (most recent call last)" in failure, failure  # the test has failed; nothing has died or hung
    for word in ("ImportError", "SyntaxError", "IndentationError", "NameError", "AttributeError"):
        assert word not in failure, failure
