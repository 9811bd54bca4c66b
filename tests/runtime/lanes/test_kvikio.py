"""The KvikIO path, on a stand-in for the module. test_kvikio_real.py tests the real module."""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runtime_fakes import FakeCuda, FakeEvent, KvikioStandInEngine, fetch, offload
from torch import Tensor

from ssdtrain_fx.errors import ActivationLostError, ConfigError
from ssdtrain_fx.runtime.book.records import Chunk
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.open_lanes import Parts
from ssdtrain_fx.runtime.lanes.threads.kvikio import KvikioLane


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
        self.now_s = 0.0
        """A transfer takes a second."""

    def CuFile(self, path: str, flags: str) -> "FakeKvikio":
        self._descriptor = os.open(path, os.O_RDWR)
        return self

    def _transfer(self, verb: str, data: Tensor, size: int, file_offset: int, task_size: int) -> FakeFuture:
        self.calls.append((verb, size, file_offset))
        assert task_size == size  # with several tasks, some would continue after one has failed
        self.now_s += 1
        if verb in self.failing:
            return FakeFuture(RuntimeError("POSIX error: no space"))
        if verb in self.short:
            return FakeFuture(size - 1)
        if verb == "pwrite":
            return FakeFuture(os.pwrite(self._descriptor, memoryview(data.numpy()), file_offset))
        return FakeFuture(os.preadv(self._descriptor, [memoryview(data.numpy())], file_offset))

    def pwrite(self, data: Tensor, size: int, file_offset: int, task_size: int) -> FakeFuture:
        return self._transfer("pwrite", data, size, file_offset, task_size)

    def pread(self, data: Tensor, size: int, file_offset: int, task_size: int) -> FakeFuture:
        return self._transfer("pread", data, size, file_offset, task_size)

    def close(self) -> None:
        self.closed = True
        os.close(self._descriptor)


@pytest.fixture
def kvikio() -> FakeKvikio:
    return FakeKvikio()


@pytest.fixture
def engine(tmp_path: Path, kvikio: FakeKvikio) -> Iterator[Engine]:
    with KvikioStandInEngine(EngineConfig(ssd_dir=str(tmp_path)), kvikio) as engine:
        yield engine
    assert kvikio.closed


def test_round_trip_without_staging(engine: Engine, kvikio: FakeKvikio) -> None:
    token = offload(engine, torch.arange(10_000))
    for _ in range(2):
        assert torch.equal(fetch(engine, token, torch.arange(10_000)), torch.arange(10_000))
    assert kvikio.calls == [("pwrite", 80_000, 0), ("pread", 80_000, 0), ("pread", 80_000, 0)]
    statistics = engine.statistics()
    assert (statistics.bytes_written, statistics.bytes_read, statistics.staging_bytes) == (80_000, 160_000, 0)
    assert statistics.io_path == "KvikIO with GPUDirect Storage"


@pytest.mark.parametrize("fault", ["failing", "short"])
def test_a_failed_write_is_kept(engine: Engine, kvikio: FakeKvikio, fault: str) -> None:
    getattr(kvikio, fault).add("pwrite")
    token = offload(engine, torch.arange(10_000))
    assert torch.equal(fetch(engine, token, torch.arange(10_000)), torch.arange(10_000))
    assert engine.statistics().kept_bytes == 80_000


@pytest.mark.parametrize(
    ("fault", "message"),
    [("failing", "KvikIO pread: POSIX error"), ("short", "short KvikIO pread: 79999 of 80000 bytes")],
)
def test_a_failed_read_stops_backward(engine: Engine, kvikio: FakeKvikio, fault: str, message: str) -> None:
    getattr(kvikio, fault).add("pread")
    token = offload(engine, torch.arange(10_000))
    with pytest.raises(ActivationLostError, match=message.replace("pread", "read")):
        fetch(engine, token, torch.arange(10_000))


def test_no_thread_holds_a_tensor_that_has_left(
    tmp_path: Path, kvikio: FakeKvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a release learns that its tensor has left, the memory can be reused."""
    cuda = FakeCuda(device_is_fast=False)
    held: list[bool] = []
    x = torch.arange(10_000)
    storage = weakref.ref(x.untyped_storage())

    def let_go(chunk: Chunk) -> None:
        chunk.entry.source = None
        held.append(storage() is not None)
        copied(chunk)

    with KvikioStandInEngine(EngineConfig(ssd_dir=str(tmp_path)), kvikio, cuda) as engine:
        lane = engine._lanes.of("cpu")
        assert isinstance(lane, KvikioLane)
        copied = lane._queues.has_left
        monkeypatch.setattr(lane._queues, "has_left", let_go)
        token = engine.offload(x, "x")
        del x
        cuda.finish_all()
        engine.wait_until_idle()
        assert torch.equal(fetch(engine, token, torch.arange(10_000)), torch.arange(10_000))
    assert held == [False]


def test_the_time_of_the_device_is_not_the_time_of_the_disk(
    tmp_path: Path, kvikio: FakeKvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device reaches each op after 100 s; a transfer takes 1 s."""

    def wait_100_s(event: FakeEvent) -> None:
        kvikio.now_s += 100

    monkeypatch.setattr(FakeEvent, "synchronize", wait_100_s)
    config = EngineConfig(ssd_dir=str(tmp_path))
    with KvikioStandInEngine(config, kvikio, clock=lambda: kvikio.now_s) as engine:
        token = offload(engine, torch.arange(10_000))
        assert torch.equal(fetch(engine, token, torch.arange(10_000)), torch.arange(10_000))
        statistics = engine.statistics()
    assert statistics.write_bytes_per_s == statistics.read_bytes_per_s == pytest.approx(80_000)


def test_checksums_need_posix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match='checksum=True needs io="posix"'):
        Engine(EngineConfig(ssd_dir=str(tmp_path), io="kvikio", checksum=True), Parts(cuda=FakeCuda()))
