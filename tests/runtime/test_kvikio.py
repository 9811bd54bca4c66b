"""The KvikIO path, on a stand-in for the module. The real one: test_kvikio_real.py."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runtime_fakes import FakeCuda, fetch, offload
from torch import Tensor

from ssdtrain_fx.errors import ActivationLostError, ConfigError
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.kvikio_choice import Kvikio
from ssdtrain_fx.runtime.kvikio_io import KvikioLane, KvikioMover
from ssdtrain_fx.runtime.lane import Lane


class FakeFuture:
    def __init__(self, result: int | RuntimeError) -> None:
        self._results = [result]

    def get(self) -> int:
        result = self._results.pop()  # a second call raises, as in KvikIO
        if isinstance(result, RuntimeError):
            raise result
        return result


class FakeKvikio:
    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.short: set[str] = set()
        self.calls: list[tuple[str, int, int]] = []
        self.closed = False

    def CuFile(self, path: str, flags: str) -> "FakeKvikio":
        self._descriptor = os.open(path, os.O_RDWR)
        return self

    def _transfer(self, verb: str, data: Tensor, size: int, file_offset: int) -> FakeFuture:
        self.calls.append((verb, size, file_offset))
        if verb in self.failing:
            return FakeFuture(RuntimeError("POSIX error: no space"))
        if verb in self.short:
            return FakeFuture(size - 1)
        if verb == "pwrite":
            return FakeFuture(os.pwrite(self._descriptor, memoryview(data.numpy()), file_offset))
        return FakeFuture(os.preadv(self._descriptor, [memoryview(data.numpy())], file_offset))

    def pwrite(self, data: Tensor, size: int, file_offset: int) -> FakeFuture:
        return self._transfer("pwrite", data, size, file_offset)

    def pread(self, data: Tensor, size: int, file_offset: int) -> FakeFuture:
        return self._transfer("pread", data, size, file_offset)

    def close(self) -> None:
        self.closed = True
        os.close(self._descriptor)


class StandInEngine(Engine):
    """CPU tensors take the path of CUDA tensors."""

    def __init__(self, directory: str, kvikio: FakeKvikio) -> None:
        self.fake_kvikio = kvikio
        super().__init__(EngineConfig(ssd_dir=directory))

    def _make_lane(self, device_type: str) -> Lane:
        return KvikioLane(self._ledger, Kvikio(self.fake_kvikio, gds=True), KvikioMover(FakeCuda()))


@pytest.fixture
def kvikio() -> FakeKvikio:
    return FakeKvikio()


@pytest.fixture
def engine(tmp_path: Path, kvikio: FakeKvikio) -> Iterator[StandInEngine]:
    with StandInEngine(str(tmp_path), kvikio) as engine:
        yield engine
    assert kvikio.closed


def test_round_trip_without_staging(engine: StandInEngine, kvikio: FakeKvikio) -> None:
    token = offload(engine, torch.arange(10_000))
    for _ in range(2):
        assert torch.equal(fetch(engine, token, torch.arange(10_000)), torch.arange(10_000))
    assert kvikio.calls == [("pwrite", 80_000, 0), ("pread", 80_000, 0), ("pread", 80_000, 0)]
    statistics = engine.statistics()
    assert (statistics.bytes_written, statistics.bytes_read, statistics.staging_bytes) == (80_000, 160_000, 0)
    assert statistics.io_path == "KvikIO with GPUDirect Storage"


@pytest.mark.parametrize("fault", ["failing", "short"])
def test_a_failed_write_is_kept(engine: StandInEngine, kvikio: FakeKvikio, fault: str) -> None:
    getattr(kvikio, fault).add("pwrite")
    token = offload(engine, torch.arange(10_000))
    assert torch.equal(fetch(engine, token, torch.arange(10_000)), torch.arange(10_000))
    assert engine.statistics().kept_bytes == 80_000


@pytest.mark.parametrize(
    ("fault", "message"),
    [("failing", "KvikIO pread: POSIX error"), ("short", "short KvikIO pread: 79999 of 80000 bytes")],
)
def test_a_failed_read_stops_backward(engine: StandInEngine, kvikio: FakeKvikio, fault: str, message: str) -> None:
    getattr(kvikio, fault).add("pread")
    token = offload(engine, torch.arange(10_000))
    with pytest.raises(ActivationLostError, match=message.replace("pread", "read")):
        fetch(engine, token, torch.arange(10_000))


def test_checksums_need_posix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match='checksum=True needs io="posix"'):
        Engine(EngineConfig(ssd_dir=str(tmp_path), io="kvikio", checksum=True), cuda=FakeCuda())
