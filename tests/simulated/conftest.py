"""Tests with the argument ``sim`` run in another process, which has a simulated device.

They run twice: once the device is ``torch.cuda``, and once one that torch does not know. With the mark ``only_cuda``,
they run once; with ``quick_on_cuda``, only the first run is quick. Their other arguments must be values that JSON can
hold; ``ssd_dir`` is one.

With ``--real-device``, it is a GPU. With ``--repetitions 20``, each of these tests runs 20 times, with other delays.
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

_processes: dict[str, DeviceProcess] = {}
"""By the type of their device."""


@pytest.fixture(scope="session")
def _device_processes() -> Iterator[dict[str, DeviceProcess]]:  # pyright: ignore[reportUnusedFunction]
    yield _processes
    while _processes:
        _processes.popitem()[1].close()


@pytest.fixture
def sim(request: pytest.FixtureRequest, _device_processes: dict[str, DeviceProcess], real_device: bool) -> str:
    """In the other process: the :class:`simulated_device.Simulator`."""
    device_type: str = request.param
    if real_device:
        return device_type
    if device_type in _processes and not _processes[device_type].is_alive:
        _processes.pop(device_type).close()
    if device_type not in _processes:
        try:
            _processes[device_type] = DeviceProcess(build.build(device_type), device_type)
        except ArenaUnavailableError as error:
            pytest.skip(f"the simulated device cannot be built: {error}")
    return device_type


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sim" in metafunc.fixturenames:
        definition = metafunc.definition
        once = metafunc.config.getoption("--real-device") or any(definition.iter_markers("only_cuda"))
        marks = [pytest.mark.slow] if any(definition.iter_markers("quick_on_cuda")) else []
        other = [] if once else [pytest.param("simulated", marks=marks)]
        metafunc.parametrize("sim", ["cuda", *other], indirect=True)
        repetitions = metafunc.config.getoption("--repetitions")
        if repetitions > 1:  # each has a time limit of its own
            metafunc.fixturenames.append("repetition")
            metafunc.parametrize("repetition", range(repetitions))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return (
        True
        if collection_path.name in ("test_device.py", "test_clock.py") and config.getoption("--real-device")
        else None
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if "sim" not in pyfuncitem.fixturenames:
        return None
    names: Any = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name != "sim"}
    device_type = pyfuncitem.funcargs["sim"]
    run = _processes[device_type].run if device_type in _processes else run_on_gpu
    repetition = pyfuncitem.callspec.params.get("repetition", 0)
    failure = run(Path(pyfuncitem.fspath).stem, pyfuncitem.originalname, arguments, repetition=repetition)
    if failure is not None and failure.startswith(SKIPPED):
        pytest.skip(failure.removeprefix(SKIPPED))
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return True
