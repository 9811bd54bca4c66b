"""Tests with the argument ``sim`` run in another process, whose ``torch.cuda`` is a simulated device.

Their other arguments must be values that JSON can hold; ``ssd_dir`` is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from device_process import DeviceProcess

from ssdtrain_fx._torch_private.arena import ArenaUnavailableError

_processes: list[DeviceProcess] = []


@pytest.fixture(scope="session")
def _device_process() -> Iterator[list[DeviceProcess]]:  # pyright: ignore[reportUnusedFunction]
    yield _processes
    while _processes:
        _processes.pop().close()


@pytest.fixture
def sim(_device_process: list[DeviceProcess]) -> None:
    """In the other process: the :class:`simulated_cuda.Simulator`."""
    if _processes and not _processes[0].is_alive:
        _processes.pop().close()
    if not _processes:
        try:
            _processes.append(DeviceProcess())
        except ArenaUnavailableError as error:
            pytest.skip(f"the simulated device cannot be built: {error}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if "sim" not in pyfuncitem.fixturenames:
        return None
    names: Any = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name != "sim"}
    failure = _processes[0].run(Path(pyfuncitem.fspath).stem, pyfuncitem.originalname, arguments)
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return True
