"""Tests with the argument ``sim`` run in another process, whose ``torch.cuda`` is a simulated device.

Their other arguments must be values that JSON can hold; ``ssd_dir`` is one.

With ``--real-device``, it is a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build
import pytest
from device_process import DeviceProcess, run_on_gpu
from real_cuda import SKIPPED

from ssdtrain_fx._torch_private.arena import ArenaUnavailableError

_processes: list[DeviceProcess] = []


@pytest.fixture(scope="session")
def _device_process() -> Iterator[list[DeviceProcess]]:  # pyright: ignore[reportUnusedFunction]
    yield _processes
    while _processes:
        _processes.pop().close()


@pytest.fixture
def sim(_device_process: list[DeviceProcess], real_device: bool) -> None:
    """In the other process: the :class:`simulated_cuda.Simulator`."""
    if real_device:
        return
    if _processes and not _processes[0].is_alive:
        _processes.pop().close()
    if not _processes:
        try:
            _processes.append(DeviceProcess(build.build()))
        except ArenaUnavailableError as error:
            pytest.skip(f"the simulated device cannot be built: {error}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.name == "test_device.py" and config.getoption("--real-device") else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if "sim" not in pyfuncitem.fixturenames:
        return None
    names: Any = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name != "sim"}
    run = _processes[0].run if _processes else run_on_gpu
    failure = run(Path(pyfuncitem.fspath).stem, pyfuncitem.originalname, arguments)
    if failure is not None and failure.startswith(SKIPPED):
        pytest.skip(failure.removeprefix(SKIPPED))
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return True
