"""The real KvikIO between the simulated device and files: on a stub of the CUDA driver, in its compatibility mode.

The library, its threads, its buffers and its handles of a file without a name are real. The order of its transfers and
of the kernels on the streams is that of training.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import unittest.mock
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import stub_driver
import torch
from device_under_test import DEVICE
from test_training import compare

from ssdtrain_fx.runtime import kvikio_trial, ops
from ssdtrain_fx.runtime.lanes.threads import kvikio_choice
from ssdtrain_fx.runtime.storage.spill_file import SpillFile

if TYPE_CHECKING:
    from simulated_device import Simulator

pytestmark = [*stub_driver.NEEDS_KVIKIO, pytest.mark.only_cuda]
TRIAL = kvikio_choice.Trial(gds=False, kvikio_s=1.0, staged_s=2.0)
"""A trial runs in another process, which has no simulated device."""


def load_kvikio() -> Any:
    os.environ["KVIKIO_COMPAT_MODE"] = "ON"  # otherwise it looks for libcufile, which may hang without a driver
    with tempfile.TemporaryDirectory() as directory:
        ctypes.CDLL(str(stub_driver.build(Path(directory))))
    import rapids_logger

    rapids_logger.load_library()  # libkvikio does so if the CUDA packages are installed
    import kvikio

    return kvikio


@pytest.mark.parametrize("options", [{}, {"policy": "auto", "max_slowdown": 1.0}])
def test_training_through_kvikio(sim: Simulator, ssd_dir: str, options: dict[str, Any]) -> None:
    load_kvikio()
    sim.configure(seed=31, default_us=300, side_us=300, percent=30)
    with unittest.mock.patch.object(kvikio_choice, "run_trial_once", return_value=TRIAL):
        moved = compare(ssd_dir, "gpt", io="kvikio", recompute=False, **options)
        assert ops.statistics().io_path == "KvikIO through host memory"
    assert moved.bytes_written > 0
    assert moved.bytes_read > 0
    assert moved.kept_bytes == 0


def test_the_trial_compares_bytes_of_the_device(sim: Simulator, ssd_dir: str) -> None:
    file = SpillFile(ssd_dir)
    try:
        kvikio_trial.check_bytes(load_kvikio(), file, torch.device(DEVICE))
    finally:
        file.close()
