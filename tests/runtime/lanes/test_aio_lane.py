"""Properties of the lane that the ops drive: nothing is lost, no thread waits in vain, and reads are not copied."""

import contextlib
import errno
import gc
import logging
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_fakes import FakeAio, MemoryFile, engine_on, fetch, no_aio, offload, open_engine
from torch import Tensor

from ssdtrain_fx.errors import ActivationLostError
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.aio import requests
from ssdtrain_fx.runtime.lanes.aio.aio_lane import AioLane
from ssdtrain_fx.runtime.lanes.aio.kernel import READ, WRITE
from ssdtrain_fx.runtime.lanes.open_lanes import Parts

X = torch.arange(1536)  # 3 chunks of 4096 bytes
ONE_CHUNK_OF_EIGHT = torch.arange(4000)  # 32000 bytes


@pytest.fixture
def file() -> MemoryFile:
    file = MemoryFile()
    file.direct = True
    return file


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.mark.parametrize("opcode", [WRITE, READ])
def test_the_rest_of_a_short_transfer_is_asked_for(tmp_path: Path, file: MemoryFile, opcode: int) -> None:
    """8192 of 32768 bytes: the next attempt starts on an aligned offset again."""
    file.aio = FakeAio(file)
    parts = Parts(open_file=lambda _: file, open_aio=lambda: file.aio, chunk_bytes=1 << 16)
    with Engine(EngineConfig(ssd_dir=str(tmp_path)), parts) as engine:
        file.aio.shorten = lambda index, length: 8192 if index == opcode_index else length
        opcode_index = 0 if opcode == WRITE else 1
        token = offload(engine, ONE_CHUNK_OF_EIGHT.clone())
        engine.wait_until_idle()
        assert torch.equal(fetch(engine, token, ONE_CHUNK_OF_EIGHT), ONE_CHUNK_OF_EIGHT)
        transfers = [(offset, length) for verb, offset, length in file.aio.submitted if verb == opcode]
        assert transfers == [(0, 8192), (8192, 24576)]
        assert engine.statistics().bytes_written == engine.statistics().bytes_read == 32000


def test_a_write_that_goes_nowhere_is_kept(directory: str, file: MemoryFile) -> None:
    with engine_on(file, directory) as engine:
        file.aio.shorten = lambda index, length: 0
        token = offload(engine, X.clone())
        engine.wait_until_idle()
        assert torch.equal(fetch(engine, token, X), X)
        assert engine.statistics().kept_bytes == X.nbytes


def test_a_read_that_goes_nowhere_stops_backward(directory: str, file: MemoryFile) -> None:
    with engine_on(file, directory) as engine:
        token = offload(engine, X.clone(), "gelu_3")
        engine.wait_until_idle()
        file.aio.shorten = lambda index, length: 0
        with pytest.raises(ActivationLostError, match=r"'gelu_3' .*short read: 0 of 4096 bytes at offset \d+"):
            fetch(engine, token, X)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_short_queue_loses_nothing(directory: str, file: MemoryFile, depth: int) -> None:
    with engine_on(file, directory, host_budget_bytes=1 << 16) as engine:
        file.aio.depth = depth
        originals = [X * seed for seed in range(1, 6)]
        tokens = [offload(engine, original.clone()) for original in originals]
        ys = [engine.reload(token, (1536,), (1,), torch.int64, torch.device("cpu")) for token in tokens]
        for y, token, original in zip(ys, tokens, originals, strict=True):
            engine.wait(y, token)
            assert torch.equal(y, original)
        engine.wait_until_idle()
        assert engine.statistics().bytes_written == 5 * X.nbytes


@pytest.mark.parametrize("opcode", [WRITE, READ])
def test_what_has_ended_is_noticed_before_the_next_one_begins(directory: str, file: MemoryFile, opcode: int) -> None:
    """Otherwise a disk that was idle in between would be measured as busy."""
    gate = file.writes_may_go_on if opcode == WRITE else file.reads_may_go_on
    with engine_on(file, directory, host_budget_bytes=1 << 16) as engine:

        def begin(number: int) -> object:
            return offload(engine, X.clone()) if opcode == WRITE else engine.reload(tokens[number], X.size())

        tokens = [offload(engine, X.clone()) for _ in range(2)]
        engine.wait_until_idle()
        first = begin(0)
        while file.aio.in_flight:
            time.sleep(0.001)
        gate.clear()
        second = begin(1)
        assert engine._ledger.counters.in_flight_bytes == X.nbytes
        del first, second


def test_a_refused_request_is_offered_again(directory: str, file: MemoryFile) -> None:
    """The first write is in flight; the kernel refuses the next requests for a while."""
    with engine_on(file, directory, host_budget_bytes=1 << 16) as engine:
        file.writes_may_go_on.clear()
        first = offload(engine, X.clone())
        file.aio.refusals = 2
        second = offload(engine, X.clone())
        file.writes_may_go_on.set()
        engine.wait_until_idle()
        statistics = engine.statistics()
        assert (statistics.bytes_written, statistics.kept) == (2 * X.nbytes, 0)
        for token in (first, second):
            assert torch.equal(fetch(engine, token, X), X)


@pytest.mark.parametrize(("blocked_s", "in_flight"), [(0.1, 2), (0.0009, 3)])
def test_no_more_is_submitted_than_the_block_device_queues(
    file: MemoryFile, monkeypatch: pytest.MonkeyPatch, blocked_s: float, in_flight: int
) -> None:
    """The third of three requests blocks the caller. From then on, two at a time are submitted."""
    monkeypatch.setattr(requests, "MIN_CAPACITY_BYTES", 4096)
    now_s = [0.0]
    with open_engine(file, EngineConfig(ssd_dir="/tmp", host_budget_bytes=1 << 16), lambda: now_s[0]) as engine:
        submit = file.aio.submit

        def submit_or_block(*arguments: int) -> bool:
            if file.aio.in_flight >= 2:
                now_s[0] += blocked_s
            return submit(*arguments)

        monkeypatch.setattr(file.aio, "submit", submit_or_block)
        tokens: list[Tensor] = []
        counts: list[int] = []
        for _ in range(2):
            file.writes_may_go_on.clear()
            tokens.append(offload(engine, X.clone()))
            counts.append(file.aio.in_flight)
            file.writes_may_go_on.set()
            engine.wait_until_idle()
        assert counts == [3, in_flight]
        for token in tokens:
            assert torch.equal(fetch(engine, token, X), X)


def test_a_request_begins_before_the_kernel_has_taken_it(file: MemoryFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """To take each of three requests of 4096 bytes, the kernel needs a second, and the disk moves them meanwhile."""
    now_s = [0.0]
    with open_engine(file, EngineConfig(ssd_dir="/tmp", host_budget_bytes=1 << 16), lambda: now_s[0]) as engine:
        submit = file.aio.submit

        def submit_slowly(*arguments: int) -> bool:
            now_s[0] += 1.0
            return submit(*arguments)

        reap = file.aio.reap

        def reap_all_at_once(timeout_s: float) -> None:
            if timeout_s:
                file.writes_may_go_on.set()
                file.aio.finish_all()
            reap(timeout_s)

        monkeypatch.setattr(file.aio, "submit", submit_slowly)
        monkeypatch.setattr(file.aio, "reap", reap_all_at_once)
        file.writes_may_go_on.clear()
        token = engine.offload(X, "x")
        engine.wait_until_idle()
        assert engine.statistics().write_bytes_per_s == pytest.approx(4096)
        del token


def test_refused_with_nothing_under_way_is_an_error_not_a_wait(directory: str, file: MemoryFile) -> None:
    with engine_on(file, directory) as engine:
        file.aio.refusals = 1
        token = offload(engine, X.clone())
        engine.wait_until_idle()
        assert engine.statistics().kept_bytes == 4096
        assert torch.equal(fetch(engine, token, X), X)
        file.aio.refusals = 1
        with pytest.raises(ActivationLostError, match="the kernel accepts no request"):
            fetch(engine, token, X)


def test_a_request_that_is_rejected(directory: str, file: MemoryFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*arguments: int) -> bool:
        raise OSError(errno.EINVAL, "Invalid argument")

    with engine_on(file, directory) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(file.aio, "submit", reject)
            kept = offload(engine, X.clone())
        assert torch.equal(fetch(engine, kept, X), X)
        token = offload(engine, X.clone(), "gelu_3")
        engine.wait_until_idle()
        with monkeypatch.context() as patch:
            patch.setattr(file.aio, "submit", reject)
            with pytest.raises(ActivationLostError, match=r"'gelu_3' .*Invalid argument"):
                fetch(engine, token, X)
        assert torch.equal(fetch(engine, token, X), X)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), MemoryError()], ids=repr)
def test_a_failure_within_the_bookkeeping_stops_the_engine(
    directory: str, file: MemoryFile, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
) -> None:
    def fail(*arguments: int) -> bool:
        raise interruption

    with engine_on(file, directory) as engine:
        token = offload(engine, X.clone(), "gelu_3")
        with monkeypatch.context() as patch:
            patch.setattr(file.aio, "submit", fail)
            with pytest.raises(type(interruption)):
                engine.offload(X, "x")
        with pytest.raises(ActivationLostError, match=rf"'gelu_3' .*: {type(interruption).__name__}\(\) interrupted"):
            fetch(engine, token, X)


def test_an_interruption_while_blocked_loses_nothing(
    directory: str, file: MemoryFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during a wait: the answers had already been collected, and the engine remains usable."""
    with engine_on(file, directory) as engine:
        token = offload(engine, X.clone())
        engine.wait_until_idle()
        file.reads_may_go_on.clear()
        y = engine.reload(token, (1536,), (1,), torch.int64, torch.device("cpu"))
        real_reap = file.aio.reap

        def interrupted_reap(timeout_s: float) -> None:
            if timeout_s:
                file.reads_may_go_on.set()
            real_reap(timeout_s)
            if timeout_s:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(file.aio, "reap", interrupted_reap)
            with pytest.raises(KeyboardInterrupt):
                engine.wait(y, token)
        engine.wait(y, token)
        assert torch.equal(y, X)


def test_a_waiting_thread_beside_a_blocked_one_is_woken(directory: str, file: MemoryFile) -> None:
    """Three threads each wait for different reads; only one of them can block in the kernel."""
    results: dict[int, bool] = {}
    with engine_on(file, directory) as engine:
        tokens = [offload(engine, X * seed) for seed in range(3)]
        engine.wait_until_idle()
        file.reads_may_go_on.clear()

        def backward(seed: int) -> None:
            results[seed] = torch.equal(fetch(engine, tokens[seed], X), X * seed)

        threads = [threading.Thread(target=backward, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(9):
            file.read_begun.acquire()
        file.reads_may_go_on.set()
        for thread in threads:
            thread.join(60)
    assert results == {0: True, 1: True, 2: True}


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_thread_that_comes_too_late_for_the_last_answer_is_woken(
    directory: str, file: MemoryFile, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """1. A thread takes an answer, and has all it wants. 2. Another one finds that it is still the one that may block
    for answers, and waits for it. 3. The first one leaves, and wakes the other, which is the next one to block."""
    with engine_on(file, directory) as engine:
        file.writes_may_go_on.clear()
        x = X.clone()
        token = engine.offload(x, "x")
        entry = engine.find_entry(token)
        assert entry is not None
        lane = engine._lanes.of_entry(entry)
        assert isinstance(lane, AioLane)
        file.writes_may_go_on.set()
        ledger, reaper = engine._ledger, threading.Lock()
        late: list[Any] = []

        class Reaper:
            locked = reaper.locked

            def __enter__(self) -> None:
                reaper.acquire()

            def __exit__(self, *_: object) -> None:
                with ledger.lock:
                    late.append(ledger.progress.enlist())
                reaper.release()

        def interrupt(timeout_s: float) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(lane._requests, "_reaper", Reaper())
            if interrupted:
                patch.setattr(file.aio, "reap", interrupt)
            with contextlib.suppress(KeyboardInterrupt):
                assert lane.wait_for_progress(ledger.progress.count)
        (waiter,) = late
        assert waiter.acquire(False)
        engine.release(token, x)


def test_the_disk_reads_straight_into_the_tensor(directory: str, file: MemoryFile) -> None:
    with engine_on(file, directory) as engine:
        token = offload(engine, torch.arange(1001, dtype=torch.int16).view(7, 143).t())
        engine.wait_until_idle()
        staging_bytes = engine.statistics().staging_bytes
        y = engine.reload(token, (143, 7), None, None, torch.device("cpu"))
        engine.wait(y, token)
        assert y.data_ptr() % 4096 == 0
        assert y.storage_offset() == 0
        assert y.untyped_storage().nbytes() == 2002
        assert not y._is_view()
        assert engine.statistics().staging_bytes == staging_bytes
        assert torch.equal(y, torch.arange(1001, dtype=torch.int16).view(7, 143).t())
        assert y.as_strided((1001,), (1,)).tolist() == list(range(1001))


def test_the_tensor_outlives_engine_and_token(directory: str, file: MemoryFile) -> None:
    with engine_on(file, directory) as engine:
        token = offload(engine, X.clone())
        engine.wait_until_idle()
        y = fetch(engine, token, X)
        del token
    gc.collect()
    torch.empty(1 << 16, dtype=torch.uint8).fill_(7)
    assert torch.equal(y, X)


def test_close_waits_for_the_kernel(directory: str, file: MemoryFile) -> None:
    """The target of a read in flight is dropped: its memory must live until the kernel has finished with it."""
    with engine_on(file, directory) as engine:
        token = offload(engine, X.clone())
        engine.wait_until_idle()
        file.reads_may_go_on.clear()
        y = engine.reload(token, (1536,), (1,), torch.int64, torch.device("cpu"))
        alive = weakref.ref(y.untyped_storage())
        del y, token
        for _ in range(3):
            file.read_begun.acquire()
        closer = threading.Thread(target=engine.close)
        closer.start()
        closer.join(0.05)
        assert closer.is_alive()
        assert alive() is not None
        assert not file.closed
        file.reads_may_go_on.set()
        closer.join(60)
        assert file.closed
        assert file.aio.closed
        gc.collect()
        assert alive() is None


def test_without_aio_threads_do_the_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Engine(EngineConfig(ssd_dir=str(tmp_path)), Parts(open_aio=no_aio)) as engine:
        token = offload(engine, X.clone())
        assert torch.equal(fetch(engine, token, X), X)
        assert "native AIO" not in engine.statistics().io_path
    assert "native AIO is not available (a test wants threads): threads move CPU tensors instead" in caplog.text
