"""The order of work on the GPU path, with a stand-in for ``torch.cuda``, and a round trip on a real GPU."""

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_fakes import FakeCuda, FakeEvent, MemoryFile, StandInEngine, fetch, offload
from torch import Tensor

from ssdtrain_fx.errors import ActivationLostError, ConfigError, InternalError
from ssdtrain_fx.runtime import engine as engine_module
from ssdtrain_fx.runtime.book.admission import BALANCE_LIMIT_S
from ssdtrain_fx.runtime.book.records import Entry
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.memory.cuda import CudaMover


@pytest.fixture
def engine(tmp_path: Path, file: MemoryFile, cuda: FakeCuda) -> Iterator[StandInEngine]:
    with StandInEngine(EngineConfig(ssd_dir=str(tmp_path)), file, cuda) as engine:
        yield engine
        cuda.finish_all()


def test_round_trip_and_order_on_the_streams(engine: StandInEngine, cuda: FakeCuda) -> None:
    """
    current:  record(ready)              wait(copied 0, 1)   record(allocated)                    wait(landed 0, 1)
    out:            wait(ready) copy record(copied 0) ...
    back:                                                        wait(allocated) copy record(landed 0) ...
    """
    x = torch.arange(1024)
    cuda.device_is_fast = False
    token = engine.release(engine.offload(x, "x"), x)
    out, back = cuda.side_streams
    [ready] = cuda.current.events("record")
    copied = out.events("record")
    assert len(copied) == 2
    assert out.log == [("wait", ready), ("record", copied[0]), ("wait", ready), ("record", copied[1])]
    assert set(cuda.current.events("wait")) == set(copied)
    assert threading.main_thread().name not in cuda.host_syncs
    x.fill_(1)
    cuda.finish_all()
    engine.wait_until_idle()

    y = engine.reload(token, x.size(), x.stride(), x.dtype, x.device)
    engine.wait(y, token)
    allocated = cuda.current.events("record")[1]
    landed = back.events("record")
    assert back.events("wait") == [allocated, allocated]
    assert set(cuda.current.events("wait")[2:]) == set(landed)
    assert threading.main_thread().name not in cuda.host_syncs
    assert torch.equal(y, torch.arange(1024))


def test_nothing_is_written_before_the_copy_is_over(engine: StandInEngine, cuda: FakeCuda, file: MemoryFile) -> None:
    cuda.device_is_fast = False
    token = offload(engine, torch.arange(1024))
    assert engine.statistics().in_flight_bytes == 8192
    assert file.write_count == 0
    cuda.finish_all()
    engine.wait_until_idle()
    assert file.write_count == 2
    assert torch.equal(fetch(engine, token, torch.arange(1024)), torch.arange(1024))


def test_reads_run_ahead_of_a_slow_device(engine: StandInEngine, cuda: FakeCuda, file: MemoryFile) -> None:
    """Eight chunks, four threads: no thread may wait for an event while there is something to read."""
    token = offload(engine, torch.arange(8 * 512))
    engine.wait_until_idle()
    cuda.device_is_fast = False
    y = engine.reload(token, (8 * 512,), (1,), torch.int64, torch.device("cpu"))
    engine.wait(y, token)  # the host waits for the copies to be enqueued, not for the device
    assert file.read_count == 8
    assert engine.statistics().in_flight_bytes > 0
    cuda.finish_all()
    engine.wait_until_idle()
    assert engine.pool.available == engine.pool.buffer_limit


def test_memory_of_a_reload_without_wait_lives_until_the_device_is_done(
    engine: StandInEngine, cuda: FakeCuda, file: MemoryFile
) -> None:
    token = offload(engine, torch.arange(512))
    engine.wait_until_idle()
    cuda.device_is_fast = False
    y = engine.reload(token, (512,), (1,), torch.int64, torch.device("cpu"))
    storage = weakref.ref(y.untyped_storage())
    file.read_begun.acquire()
    del y, token
    assert storage() is not None
    assert engine.statistics().slots_in_use == 1
    cuda.finish_all()
    engine.wait_until_idle()
    assert engine.statistics().slots_in_use == 0


def test_source_of_an_offload_without_release_lives_until_the_device_is_done(
    engine: StandInEngine, cuda: FakeCuda, file: MemoryFile
) -> None:
    cuda.device_is_fast = False
    x = torch.arange(512)
    token = engine.offload(x, "x")
    entry = next(iter(engine._ledger.entries.values()))
    del x, token
    assert engine.statistics().slots_in_use == 1
    assert entry.source is not None
    cuda.finish_all()
    engine.wait_until_idle()
    assert entry.source is None
    assert file.write_count == 0  # the write was cancelled
    assert engine.statistics().slots_in_use == 0


def test_what_may_not_wait_stays_although_the_device_still_copies(
    tmp_path: Path, file: MemoryFile, cuda: FakeCuda
) -> None:
    """One buffer for copies: the first chunk is being copied out, the others never begin, and no thread waits."""
    cuda.device_is_fast, cuda.only_copies_are_slow = False, True
    config = EngineConfig(ssd_dir=str(tmp_path), host_budget_bytes=8192, max_stall_share=0.0)
    with StandInEngine(config, file, cuda, clock=lambda: 0.0) as engine:
        engine._ledger.admission.charge(BALANCE_LIMIT_S)
        x = torch.arange(3 * 512)
        token = engine.offload(x, "x")
        token = engine.release(token, x)
        assert engine.statistics().kept_for_time_bytes == x.nbytes
        assert threading.main_thread().name not in cuda.host_syncs
        storage = weakref.ref(x.untyped_storage())
        x.fill_(1)
        del x
        assert storage() is not None  # the copy on the side stream reads it
        cuda.finish_all()
        engine.wait_until_idle()
        assert file.write_count == 0
        assert engine.pool.available == engine.pool.buffer_limit
        assert torch.equal(fetch(engine, token, torch.arange(3 * 512)), torch.arange(3 * 512))
        del token
        engine.wait_until_idle()
        assert engine.statistics().slots_in_use == 0
    assert storage() is None


@pytest.mark.parametrize("host", [False, True])
def test_a_deferred_release_leaves_the_tensor_to_the_device(
    tmp_path: Path, file: MemoryFile, cuda: FakeCuda, host: bool
) -> None:
    """The engine holds the tensor until the last chunk has left; the compute stream does not wait for any of them."""
    cuda.device_is_fast = False
    config = EngineConfig(ssd_dir=str(tmp_path), host_budget_bytes=8192)
    with StandInEngine(config, file, cuda) as engine:
        x = torch.arange(3 * 512)
        storage = weakref.ref(x.untyped_storage())
        token = engine.release(engine.offload(x, "x", graph_name="graph", host=host), x, deferred=True)
        assert engine.statistics().late_bytes == x.nbytes
        assert cuda.current.events("wait") == []
        assert threading.main_thread().name not in cuda.host_syncs
        del x
        assert storage() is not None
        cuda.finish_all()
        engine.wait_until_idle()
        assert torch.equal(fetch(engine, token, torch.arange(3 * 512)), torch.arange(3 * 512))
        entry = engine.find_entry(token)
        assert entry is not None
        assert entry.source is None
    assert storage() is None


def test_a_deferred_release_of_a_tensor_whose_copy_has_been_enqueued(engine: StandInEngine, cuda: FakeCuda) -> None:
    """All copies are enqueued: the stream waits for them, and the memory may be reused after them."""
    cuda.device_is_fast = False
    x = torch.arange(1024)
    storage = weakref.ref(x.untyped_storage())
    token = engine.offload(x, "x", graph_name="graph")
    entry = engine.find_entry(token)
    assert entry is not None
    lane = engine._lanes.of_entry(entry)
    while entry.uncopied:  # an I/O thread may have taken one of the chunks
        lane.wait_for_progress(engine._ledger.progress.count)
    token = engine.release(token, x, deferred=True)
    assert engine.statistics().late_bytes == 0
    assert len(cuda.current.events("wait")) == 2
    del x
    assert storage() is None
    cuda.finish_all()
    engine.wait_until_idle()
    assert torch.equal(fetch(engine, token, torch.arange(1024)), torch.arange(1024))


def test_a_forwarded_chunk_waits_for_the_copy_out(engine: StandInEngine, cuda: FakeCuda, file: MemoryFile) -> None:
    cuda.device_is_fast = False
    token = offload(engine, torch.arange(512))
    [copied] = cuda.side_streams[0].events("record")
    y = engine.reload(token, (512,), (1,), torch.int64, torch.device("cpu"))
    engine.wait(y, token)
    allocated = cuda.current.events("record")[1]
    assert cuda.side_streams[1].events("wait") == [allocated, copied]
    assert file.write_count == file.read_count == 0


def test_staging_smaller_than_the_tensor(tmp_path: Path, file: MemoryFile, cuda: FakeCuda) -> None:
    with StandInEngine(EngineConfig(ssd_dir=str(tmp_path), host_budget_bytes=8192), file, cuda) as engine:
        for _ in range(3):
            token = offload(engine, torch.arange(10 * 512))
            assert torch.equal(fetch(engine, token, torch.arange(10 * 512)), torch.arange(10 * 512))
    assert set(cuda.runtime.registered.values()) == {0}
    assert len(cuda.runtime.registered) <= 2


def test_a_buffer_that_comes_free_without_a_write_goes_to_the_next_copy(
    tmp_path: Path, file: MemoryFile, cuda: FakeCuda
) -> None:
    """The only buffer for copies holds a chunk that is no longer needed; no end of its write will wake a thread."""
    cuda.device_is_fast = False
    x, y = torch.randn(1024), torch.randn(1024)
    config = EngineConfig(ssd_dir=str(tmp_path), host_budget_bytes=8192)
    with ThreadPoolExecutor(1) as threads, StandInEngine(config, file, cuda, thread_count=1) as engine:
        token_x = engine.release(engine.offload(x, "x"), x)
        token_y = engine.offload(y, "y")
        del token_x
        released = threads.submit(engine.release, token_y, y)
        cuda.finish_all()
        token_y = released.result(timeout=30)
        assert torch.equal(fetch(engine, token_y, y), y)


def test_a_failed_write_is_kept_and_comes_back(engine: StandInEngine, file: MemoryFile) -> None:
    file.capacity_bytes = 4096
    token = offload(engine, torch.arange(1024))
    engine.wait_until_idle()
    assert engine.statistics().kept_bytes == 4096
    assert torch.equal(fetch(engine, token, torch.arange(1024)), torch.arange(1024))


def close_soon(engine: StandInEngine) -> None:
    """Close an engine whose device or caller hangs. Fails if that takes much longer than the limit."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(engine.close, timeout_s=0.05).result(timeout=20)


def test_a_device_that_hangs_does_not_hold_up_the_close(
    tmp_path: Path, file: MemoryFile, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.device_is_fast = False
    engine = StandInEngine(EngineConfig(ssd_dir=str(tmp_path)), file, cuda, thread_count=0)
    token = engine.offload(torch.arange(512), "x")
    try:
        close_soon(engine)
        assert "closed an engine although its transfers do not finish" in caplog.text
        assert not file.closed
        with pytest.raises(ActivationLostError, match="was closed"):
            engine.reload(token, (512,))
    finally:
        cuda.finish_all()


def test_a_caller_that_hangs_within_a_copy_does_not_hold_up_the_close(
    tmp_path: Path, file: MemoryFile, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    copy_out = CudaMover.copy_out

    def copy_out_later(self: CudaMover, *arguments: Any) -> Any:
        begun.set()
        assert may_go_on.wait(60)
        return copy_out(self, *arguments)

    monkeypatch.setattr(CudaMover, "copy_out", copy_out_later)
    engine = StandInEngine(EngineConfig(ssd_dir=str(tmp_path)), file, cuda, thread_count=0)
    with ThreadPoolExecutor(1) as threads:
        owner = threads.submit(engine.offload, torch.arange(512), "x")
        assert begun.wait(60)
        try:
            close_soon(engine)
        finally:
            may_go_on.set()
        owner.result(timeout=60)
    assert not file.closed  # its memory may still have been in use


def test_after_a_failed_assertion_on_the_device_the_engine_is_closed(
    tmp_path: Path, file: MemoryFile, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(event: FakeEvent) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(FakeEvent, "synchronize", fail)
    engine = StandInEngine(EngineConfig(ssd_dir=str(tmp_path)), file, cuda, thread_count=0)
    token = engine.offload(torch.arange(512), "x")
    with pytest.raises(InternalError, match=r"stopped: .*device-side assert triggered"):
        engine.wait_until_idle()
    with pytest.raises(InternalError, match=r"stopped: .*device-side assert triggered"):
        engine.reload(token, (512,))
    engine.close()
    assert file.closed
    assert set(cuda.runtime.registered.values()) == {0}


@pytest.mark.parametrize("interrupted", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_within_a_copy_leaves_no_chunk_between_two_states(
    tmp_path: Path,
    file: MemoryFile,
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    interrupted: type[BaseException],
) -> None:
    """Whether the device was given the copy is not known, so the engine stops: nobody waits for the chunk."""

    def interrupt(*_: object) -> None:
        raise interrupted

    monkeypatch.setattr(CudaMover, "copy_out", interrupt)
    config = EngineConfig(ssd_dir=str(tmp_path), io_timeout_s=0.05)
    with StandInEngine(config, file, cuda, thread_count=0) as engine:
        with pytest.raises(interrupted):
            engine.offload(torch.arange(512), "x")
        with pytest.raises(ActivationLostError, match=f"{interrupted.__name__}.* interrupted an op"):
            engine.wait_until_idle()
    assert file.closed


def test_memory_whose_registration_was_interrupted_is_unregistered(
    tmp_path: Path, file: MemoryFile, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise CUDA would refuse to register it for the next engine that the system gives it to."""
    register = cuda.runtime.cudaHostRegister

    def interrupt(*arguments: int) -> int:
        register(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(cuda.runtime, "cudaHostRegister", interrupt)
    with StandInEngine(EngineConfig(ssd_dir=str(tmp_path)), file, cuda, thread_count=0) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.offload(torch.arange(512), "x")
        assert set(cuda.runtime.registered.values()) == {1}
    assert set(cuda.runtime.registered.values()) == {0}


def test_memory_that_cuda_refuses_to_register_is_not_unregistered(
    tmp_path: Path, file: MemoryFile, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda.runtime, "cudaHostRegister", lambda *_: 2)
    with StandInEngine(EngineConfig(ssd_dir=str(tmp_path)), file, cuda, thread_count=0) as engine:
        engine.offload(torch.arange(512), "x")
        with pytest.raises(ConfigError, match=r"cannot pin \d+ bytes of host memory \(CUDA error 2\)"):
            engine.wait_until_idle()
    assert not cuda.runtime.registered


class _OnTwoDevices(Entry):
    """An entry on the device that is its name."""

    def __init__(self, x: Tensor, name: str, *rest: Any) -> None:
        super().__init__(x, name, *rest)
        self.device = torch.device(name)


def test_a_slow_device_delays_no_other_one(
    engine: StandInEngine, cuda: FakeCuda, file: MemoryFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "Entry", _OnTwoDevices)
    engine._lanes.by_type["cuda"] = engine._lanes.of("cpu")
    cuda.device_is_fast = False
    slow = engine.offload(torch.arange(512), "cuda:0")
    for _ in ("ready", "copied"):  # this thread records the first, and the second too, or an I/O thread does
        assert cuda.slow_work_begun.acquire(timeout=30)
    cuda.device_is_fast = True
    fast = engine.offload(torch.arange(512), "cuda:1")
    assert file.write_begun.acquire(timeout=30)
    (written,) = file.begun
    entry = engine.find_entry(fast)
    assert entry is not None
    assert entry.slot is not None
    assert written == ("write", entry.slot.offset_bytes)
    del slow


def test_the_state_of_the_device_is_asked_for_without_the_lock(
    engine: StandInEngine, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may block even in a query, and then no op could go on."""
    found: list[bool] = []
    for name in ("query", "synchronize"):
        ask = getattr(FakeEvent, name)

        def ask_and_look(event: FakeEvent, ask: Any = ask) -> Any:
            free = engine._ledger.lock.acquire(timeout=2)
            found.append(free)
            if free:
                engine._ledger.lock.release()
            return ask(event)

        monkeypatch.setattr(FakeEvent, name, ask_and_look)
    token = offload(engine, torch.arange(1024))
    assert torch.equal(fetch(engine, token, torch.arange(1024)), torch.arange(1024))
    engine.wait_until_idle()
    assert found
    assert all(found)


def test_memory_that_cannot_be_pinned(engine: StandInEngine, cuda: FakeCuda) -> None:
    cuda.runtime.cudaHostRegister = lambda address, size_bytes, flags: 2  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"cannot pin 4096 bytes .*CUDA error 2.* Lower host_budget_bytes"):
        offload(engine, torch.arange(3))  # the first op, or the second if an I/O thread was faster


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu(tmp_path: Path) -> None:
    with Engine(EngineConfig(ssd_dir=str(tmp_path), host_budget_bytes=16 << 20)) as engine:
        for size in (3, 1000, 30_000_000):
            x = torch.randn(size, device="cuda")
            expected = x.clone()
            token = offload(engine, x)
            for _ in range(2):
                assert torch.equal(fetch(engine, token, expected), expected)
