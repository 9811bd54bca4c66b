"""The real KvikIO, on a stub of the CUDA driver whose only device uses host memory.

The library, its threads, its buffers between "device" and file, and its handles of a file without a name are real. The
GPU and GPUDirect Storage are not. Each test runs in a separate process with a time limit, because KvikIO can hang.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import stub_driver

import ssdtrain_fx

pytestmark = stub_driver.NEEDS_KVIKIO

PRELUDE = """
import sys
import rapids_logger
rapids_logger.load_library()  # libkvikio does so if the CUDA packages are installed
import kvikio
import kvikio.cufile_driver
import torch
from runtime_fakes import FakeCuda, fetch, offload
from ssdtrain_fx.errors import ActivationLostError
from ssdtrain_fx.runtime import kvikio_trial
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.threads.kvikio_choice import Kvikio
from ssdtrain_fx.runtime.lanes.threads.kvikio import KvikioLane, KvikioMover
from ssdtrain_fx.runtime.lanes.open_lanes import Parts
from ssdtrain_fx.runtime.storage.spill_file import SpillFile


class OnDevice:
    def __init__(self, x):
        self.x = x
        self.__cuda_array_interface__ = {
            "shape": (x.nbytes,), "typestr": "|u1", "data": (x.data_ptr(), False), "version": 3
        }


class CuFile(kvikio.CuFile):
    def pwrite(self, x, **options):
        return super().pwrite(OnDevice(x), **options)

    def pread(self, x, **options):
        return super().pread(OnDevice(x), **options)


class Module:
    CuFile = CuFile


def make_lane(lanes, device_type):
    return KvikioLane(lanes.ledger, Kvikio(Module, gds=False), KvikioMover(FakeCuda()), len(directories))


def DeviceEngine(config):
    return Engine(config, Parts(make_lane=make_lane))


assert kvikio.cufile_driver.get("is_gds_available") is False
directories = tuple(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def driver_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the stub."""
    return stub_driver.build(tmp_path_factory.mktemp("driver")).parent


def run(script: str, driver_directory: Path, directories: list[Path]) -> str:
    paths = [str(Path(ssdtrain_fx.__file__).parents[1]), str(Path(__file__).parents[1])]
    environment = os.environ | {
        "KVIKIO_COMPAT_MODE": "ON",  # otherwise it looks for libcufile, which may hang without a driver
        "LD_LIBRARY_PATH": str(driver_directory),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, "-c", PRELUDE + script, *map(str, directories)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for directory in directories:
        assert list(directory.iterdir()) == []
    return done.stdout


def test_tensors_come_back(driver_directory: Path, tmp_path: Path) -> None:
    """Contiguous and strided tensors of odd sizes, in two directories, read twice; one is dropped in flight."""
    directories = [tmp_path / name for name in ("one", "two")]
    for directory in directories:
        directory.mkdir()
    output = run(
        """
with DeviceEngine(EngineConfig(ssd_dir=directories)) as engine:
    tensors = [torch.randint(256, (size,), dtype=torch.uint8) for size in (1, 4097, 1_000_000, 9_000_001)]
    tensors.append(torch.randn(300, 500).t())
    copies = [x.clone() for x in tensors]
    tokens = [offload(engine, x) for x in tensors]
    engine.release(engine.offload(copies[3], "dropped"), copies[3])
    for _ in range(2):
        for token, x in zip(tokens, copies, strict=True):
            assert torch.equal(fetch(engine, token, x), x)
    engine.wait_until_idle()
    statistics = engine.statistics()
    assert statistics.bytes_read == 2 * sum(x.nbytes for x in copies)
    assert statistics.kept_bytes == 0
    assert all(part.size_bytes for part in engine._ledger.file._parts)
    print(statistics.io_path)
""",
        driver_directory,
        directories,
    )
    assert output == "KvikIO through host memory\n"


def test_faults(driver_directory: Path, tmp_path: Path) -> None:
    """The file is cut without the engine's knowledge; then it is closed, as if the drive had disappeared."""
    run(
        """
import os
with DeviceEngine(EngineConfig(ssd_dir=directories)) as engine:
    x = torch.arange(500_000)
    token = offload(engine, x.clone(), "gelu_3")
    engine.wait_until_idle()
    descriptor = engine._ledger.file.fileno()
    os.ftruncate(descriptor, 4096)
    try:
        fetch(engine, token, x)
    except ActivationLostError as error:
        assert "'gelu_3'" in str(error) and "KvikIO read" in str(error), error
    else:
        raise AssertionError("lost bytes came back")
    lane = engine._lanes.by_type["cpu"]
    lane._transport._device_file._handles[descriptor].close()  # KvikIO's handle
    other = offload(engine, x.clone())
    assert torch.equal(fetch(engine, other, x), x)
    assert engine.statistics().kept_bytes == x.nbytes
""",
        driver_directory,
        [tmp_path],
    )


def test_the_trial(driver_directory: Path, tmp_path: Path) -> None:
    run(
        """
file = SpillFile(directories[0])
kvikio_trial.check_bytes(Module, file, torch.device("cpu"))
file.close()
config = EngineConfig(ssd_dir=directories)
tensors = [torch.randint(256, (3_000_000,), dtype=torch.uint8) for _ in range(2)]
with DeviceEngine(config) as direct, Engine(config) as staged:
    trial = kvikio_trial.compare(direct, staged, tensors, gds=False)
assert trial.kvikio_s > 0 and trial.staged_s > 0 and trial.gds is False

kvikio.CuFile = CuFile
kvikio_trial.TENSOR_BYTES, kvikio_trial.TENSOR_COUNT = 1 << 20, 2
trial = kvikio_trial.run_trial(torch.device("cpu"), directories)  # which times two staged engines on a CPU
assert trial.kvikio_s > 0 and trial.staged_s > 0 and trial.gds is False


class Liar(CuFile):
    def pwrite(self, x, **options):
        return super().pwrite(torch.zeros_like(x), **options)


class LyingModule:
    CuFile = Liar


file = SpillFile(directories[0])
try:
    kvikio_trial.check_bytes(LyingModule, file, torch.device("cpu"))
except kvikio_trial.TrialError as error:
    assert "the file does not hold the bytes that KvikIO wrote" in str(error)
else:
    raise AssertionError("the changed bytes were not noticed")
file.close()
""",
        driver_directory,
        [tmp_path],
    )
