"""The engine between offload and wait: forwarding, cancelling, checking, counting."""

import errno
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from runtime_fakes import FakeCuda, MemoryFile, each_file, engine_on, fetch, offload
from torch import Tensor

from ssdtrain_fx.errors import ActivationLostError, ConfigError, InternalError, StalledDiskError
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.open_lanes import Parts
from ssdtrain_fx.runtime.step_clock import step_clock

file = each_file("aio", "threads")


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path)


def test_release_refuses_a_copy(file: MemoryFile, directory: str) -> None:
    """Hazard: a layout constraint makes the compiler pass a copy to one of the ops."""
    with engine_on(file, directory) as engine:
        x = torch.arange(12).view(3, 4)
        token = engine.offload(x, "relu_7")
        with pytest.raises(InternalError, match=r"release\('relu_7'\) .*compiler passed a copy(.|\n)*report"):
            engine.release(token, x.clone())
        with pytest.raises(InternalError, match=r"strides \(1, 3\)"):
            engine.release(token, x.as_strided((3, 4), (1, 3)))
        engine.release(token, x)


def test_release_ignores_the_stride_of_a_dimension_of_size_1(file: MemoryFile, directory: str) -> None:
    with engine_on(file, directory) as engine:
        x = torch.arange(4).view(1, 4)
        engine.release(engine.offload(x, "x"), x.as_strided((1, 4), (77, 1)))


@pytest.mark.parametrize(
    ("size", "dtype"), [((4, 3), torch.int64), ((12,), torch.int64), ((3, 4), torch.float64)], ids=str
)
def test_reload_refuses_another_shape_or_dtype(
    file: MemoryFile, directory: str, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    with engine_on(file, directory) as engine:
        token = offload(engine, torch.arange(12).view(3, 4), "mm_1")
        stride = torch.empty(size).stride()
        with pytest.raises(
            InternalError, match=r"reload\('mm_1'\) asks for .*; offload got torch.int64\[3, 4\] on cpu"
        ):
            engine.reload(token, size, stride, dtype, torch.device("cpu"))


def test_reload_goes_by_the_offloaded_tensor_where_nothing_is_asked(file: MemoryFile, directory: str) -> None:
    with engine_on(file, directory) as engine:
        x = torch.arange(12, dtype=torch.int16).view(3, 4).t()
        expected = x.clone()
        token = offload(engine, x)
        y = engine.reload(token, x.size(), None, None, x.device)
        engine.wait(y, token)
        assert (y.stride(), y.dtype) == (x.stride(), x.dtype)
        assert torch.equal(y, expected)


def test_wait_refuses_a_tensor_that_no_reload_made(file: MemoryFile, directory: str) -> None:
    with engine_on(file, directory) as engine:
        token = offload(engine, torch.arange(12), "mm_1")
        with pytest.raises(InternalError, match=r"wait\('mm_1'\) .* no reload returned"):
            engine.wait(torch.empty(12), token)


def test_other_layouts_and_devices_are_refused(file: MemoryFile, directory: str) -> None:
    with engine_on(file, directory) as engine:
        with pytest.raises(InternalError, match="expected a strided tensor"):
            engine.offload(torch.eye(3).to_sparse(), "x")
        with pytest.raises(ConfigError, match="cannot offload a tensor on 'meta'"):
            engine.offload(torch.empty(3, device="meta"), "x")


def test_a_reload_before_the_write_is_over_is_served_from_staging(file: MemoryFile, directory: str) -> None:
    """offload, release (staged, write held on one thread) -> reload -> wait returns with the write still held."""
    with engine_on(file, directory, host_budget_bytes=1 << 16) as engine:
        file.writes_may_go_on.clear()
        x = torch.arange(512)
        expected = x.clone()
        token = offload(engine, x)
        file.write_begun.acquire()
        assert torch.equal(fetch(engine, token, expected), expected)
        assert file.read_count == 0
        statistics = engine.statistics()
        assert (statistics.forwarded, statistics.forwarded_bytes) == (1, 4096)
        assert statistics.bytes_written == statistics.bytes_read == 0
        file.writes_may_go_on.set()
        engine.wait_until_idle()
        assert torch.equal(fetch(engine, token, expected), expected)
        assert engine.statistics().bytes_read == 4096


def test_a_reload_before_release_waits_for_the_copy(file: MemoryFile, directory: str) -> None:
    """Staging is full and writes are held, so some chunks are still in the tensor at the reload."""
    with engine_on(file, directory, host_budget_bytes=8192) as engine:
        file.writes_may_go_on.clear()
        x = torch.arange(4096)
        token = engine.offload(x, "x")
        y = engine.reload(token, x.size(), x.stride(), x.dtype, x.device)
        file.write_begun.acquire()
        file.writes_may_go_on.set()
        engine.wait(y, token)
        assert torch.equal(y, torch.arange(4096))
        engine.release(token, x)


def test_release_waits_for_the_last_copy_and_counts_it(file: MemoryFile, directory: str) -> None:
    """Two staging buffers: with the writes held, the third chunk cannot leave the tensor."""
    with engine_on(file, directory, host_budget_bytes=8192) as engine:
        file.writes_may_go_on.clear()
        x = torch.arange(1536)
        token = engine.offload(x, "x")
        released = threading.Event()

        def release() -> None:
            engine.release(token, x)
            x.fill_(1)
            released.set()

        thread = threading.Thread(target=release)
        thread.start()
        while not (engine._ledger.progress._waiting or file.aio.blocked.is_set()):
            assert not released.is_set()
        file.writes_may_go_on.set()
        thread.join(60)
        assert released.is_set()
        assert engine.statistics().release_stall_s > 0
        assert torch.equal(fetch(engine, token, torch.arange(1536)), torch.arange(1536))


def test_transfers_that_a_thread_waits_for_come_first(
    file: MemoryFile, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One transfer at a time. A write is held; two more writes and the reloads of a, b and c are queued in this order.

    A thread then waits for c: c is read first, then the other reloads, and the writes come last.
    """
    monkeypatch.setattr("ssdtrain_fx.runtime.memory.movers.CpuMover.thread_count", 1)
    with engine_on(file, directory, host_budget_bytes=1 << 16) as engine:
        file.aio.depth = 1
        originals = [torch.arange(512) * factor for factor in (1, 2, 3)]
        tokens = [offload(engine, original.clone()) for original in originals]
        engine.wait_until_idle()
        file.begun.clear()
        file.writes_may_go_on.clear()
        held = [engine.offload(torch.arange(512), name) for name in "xyz"]
        while file.begun != [("write", 3 * 4096)]:
            assert len(file.begun) <= 1
        a, b, c = (engine.reload(token, (512,), (1,), torch.int64, torch.device("cpu")) for token in tokens)
        waiter = threading.Thread(target=engine.wait, args=(c, tokens[2]))
        waiter.start()
        while not (engine._ledger.progress._waiting or file.aio.blocked.is_set()):
            assert waiter.is_alive()
        file.writes_may_go_on.set()
        waiter.join(60)
        engine.wait_until_idle()
        assert file.begun[1:] == [("read", 8192), ("read", 0), ("read", 4096), ("write", 16384), ("write", 20480)]
        for y, token, original in zip((a, b, c), tokens, originals, strict=True):
            engine.wait(y, token)
            assert torch.equal(y, original)
        del held


def test_queued_writes_are_cancelled_when_the_token_dies(file: MemoryFile, directory: str) -> None:
    with engine_on(file, directory, host_budget_bytes=1 << 16) as engine:
        file.aio.depth = 2
        file.writes_may_go_on.clear()
        first = offload(engine, torch.arange(512))
        second = offload(engine, torch.arange(512))
        file.write_begun.acquire()
        file.write_begun.acquire()  # two writes are held, and a third cannot begin
        third = offload_without_release(engine)
        assert engine.statistics().slots_in_use == 3
        del third
        assert engine.statistics().slots_in_use in (2, 3)  # 3 if a thread had begun to copy it
        file.writes_may_go_on.set()
        engine.wait_until_idle()
        statistics = engine.statistics()
        assert statistics.slots_in_use == 2
        assert statistics.cancelled_bytes == 4096
        assert file.write_count == 2
        del first, second


def offload_without_release(engine: Engine) -> Tensor:
    return engine.offload(torch.arange(512), "x")


def test_a_slot_is_not_reused_while_a_dead_tensor_is_still_written(file: MemoryFile, directory: str) -> None:
    """1. A write is held. 2. Its token dies. 3. Another tensor must not get the same bytes of the file."""
    with engine_on(file, directory, host_budget_bytes=1 << 16) as engine:
        file.writes_may_go_on.clear()
        token = offload(engine, torch.arange(512))
        file.write_begun.acquire()
        del token
        assert engine.statistics().slots_in_use == 1
        expected = torch.arange(512) * 3
        other = offload(engine, expected.clone())
        file.writes_may_go_on.set()
        engine.wait_until_idle()
        assert engine.statistics().slots_in_use == 1
        assert torch.equal(fetch(engine, other, expected), expected)


def test_a_reload_without_wait_leaves_nothing_behind(file: MemoryFile, directory: str) -> None:
    """An exception between the two ops while the read is in flight: the memory must live as long as the read."""
    with engine_on(file, directory) as engine:
        token = offload(engine, torch.arange(512))
        engine.wait_until_idle()
        file.reads_may_go_on.clear()
        y = engine.reload(token, (512,), (1,), torch.int64, torch.device("cpu"))
        alive = weakref.ref(y.untyped_storage())
        file.read_begun.acquire()
        del y, token
        assert engine.statistics().slots_in_use == 1
        file.reads_may_go_on.set()
        engine.wait_until_idle()
        assert engine.statistics().slots_in_use == 0
        engine.close()  # the thread may still hold its last task
        gc.collect()
        assert alive() is None


def test_the_source_is_held_until_it_was_copied_even_without_release(file: MemoryFile, directory: str) -> None:
    """An exception after offload frees the tensor in the frame; an I/O thread may still be about to read it."""
    with engine_on(file, directory, host_budget_bytes=8192) as engine:
        file.writes_may_go_on.clear()
        x = torch.arange(5120)
        expected = x.clone()
        token = engine.offload(x, "x")
        del x
        file.write_begun.acquire()
        file.writes_may_go_on.set()
        assert torch.equal(fetch(engine, token, expected), expected)


def test_an_engine_survives_threads_that_wait_when_it_is_closed(file: MemoryFile, directory: str) -> None:
    errors: list[BaseException] = []
    with engine_on(file, directory) as engine:
        token = offload(engine, torch.arange(1024), "gelu_3")
        engine.wait_until_idle()
        file.reads_may_go_on.clear()

        def backward() -> None:
            try:
                fetch(engine, token, torch.arange(1024))
            except ActivationLostError as error:
                errors.append(error)

        waiter = threading.Thread(target=backward)
        waiter.start()
        file.read_begun.acquire()
        closer = threading.Thread(target=engine.close)
        closer.start()
        waiter.join(60)  # although the read is still held
        assert "'gelu_3' cannot be read back: the engine on /nowhere/(fake file) was closed" in str(errors[0])
        assert not file.closed
        file.reads_may_go_on.set()
        closer.join(60)
        assert file.closed


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (KeyError("x"), InternalError, r"'gelu_3': the I/O of the engine .* stopped: KeyError\('x'\)"),
        (
            MemoryError("no memory"),
            ActivationLostError,
            r"'gelu_3' cannot be read back: MemoryError.* interrupted an op",
        ),
    ],
)
def test_an_io_thread_that_fails_unexpectedly_stops_those_who_wait(
    directory: str, raised: Exception, expected: type[Exception], message: str
) -> None:
    file = MemoryFile()
    file.read_error = lambda index: raised  # type: ignore[assignment,return-value]
    with engine_on(file, directory) as engine:
        token = offload(engine, torch.arange(512), "gelu_3")
        engine.wait_until_idle()
        with pytest.raises(expected, match=message):
            fetch(engine, token, torch.arange(512))


def test_statistics_of_one_step(file: MemoryFile, directory: str) -> None:
    with engine_on(file, directory) as engine:
        assert engine.statistics().io_path in ("fake", "fake, native AIO")
        kept_alive = offload(engine, torch.arange(1000))
        engine.wait_until_idle()
        before, waited_s = engine.statistics(), step_clock.waited_s
        token = offload(engine, torch.arange(2000))
        engine.wait_until_idle()
        fetch(engine, token, torch.arange(2000))
        step = engine.statistics().since(before)
        assert (step.offloads, step.reloads, step.bytes_written, step.bytes_read) == (1, 1, 16000, 16000)
        assert (step.slots_in_use, step.slot_bytes_in_use) == (2, 8192 + 16384)  # gauges are not differences
        assert step.stall_s == step.release_stall_s + step.wait_stall_s
        assert step_clock.waited_s - waited_s == pytest.approx(step.stall_s)
        both = engine.statistics() + engine.statistics()
        assert both.offloads == 4
        assert both.io_path == ("fake, native AIO" if file.direct else "fake")
        del kept_alive


def cut_files_at_once(monkeypatch: pytest.MonkeyPatch, *, after_s: float = 0.0) -> None:
    monkeypatch.setattr("ssdtrain_fx.runtime.book.upkeep.TRIM_ABOVE_BYTES", 8192)
    monkeypatch.setattr("ssdtrain_fx.runtime.book.upkeep.TRIM_AFTER_S", after_s)


def use(engine: Engine, count: int) -> None:
    """Write ``count`` numbers, and let them go."""
    owner = offload(engine, torch.arange(count))
    engine.wait_until_idle()
    del owner
    engine.wait_until_idle()


def test_a_file_is_cut_to_what_was_needed_when_it_was_too_large_for_some_time(
    file: MemoryFile, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_files_at_once(monkeypatch, after_s=10.0)
    now_s = 100.0
    monkeypatch.setattr("ssdtrain_fx.runtime.book.upkeep.time.monotonic", lambda: now_s)
    with engine_on(file, directory) as engine:
        for at_s, count in ((100, 10_000), (105, 10), (111, 10_000), (117, 10), (126, 1000), (127, 10)):
            now_s = float(at_s)
            assert file.size_bytes in (0, 81920)
            use(engine, count)
        assert file.size_bytes == 8192  # for 1000 numbers
        use(engine, 10_000)
        assert file.size_bytes == 81920
        for at_s in (200, 211):  # and again, whatever was needed before
            now_s = float(at_s)
            use(engine, 10)
        assert file.size_bytes == 4096
        assert not engine._ledger.upkeep.is_due


def test_a_large_file_is_cut_after_use(file: MemoryFile, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_files_at_once(monkeypatch)
    with engine_on(file, directory) as engine:
        large = offload(engine, torch.arange(10_000))
        engine.wait_until_idle()
        del large
        engine.wait_until_idle()
        small = offload(engine, torch.arange(10))
        engine.wait_until_idle()
        assert file.size_bytes == 81920
        del small
        token = offload(engine, torch.arange(700))  # its slot may be before or after the tail that is being cut
        engine.wait_until_idle()
        assert torch.equal(fetch(engine, token, torch.arange(700)), torch.arange(700))


def test_a_file_that_cannot_be_cut_keeps_its_size_and_training_goes_on(
    file: MemoryFile, directory: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cut_files_at_once(monkeypatch)

    def refuse(size_bytes: int, from_bytes: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(file, "shrink", refuse)
    x = torch.arange(10_000)
    with engine_on(file, directory) as engine:
        for count in (10_000, 10, 10, 700):  # the file is too large for 10
            token = offload(engine, x[:count].clone())
            engine.wait_until_idle()
            assert torch.equal(fetch(engine, token, x[:count]), x[:count])
            del token
            assert engine.statistics().slots_in_use == 0
        assert engine.statistics().file_bytes == 81920
    assert [record.getMessage() for record in caplog.records] == [
        (
            "cannot shrink /nowhere/(fake file): [Errno 5] Input/output error. "
            "It keeps its size until the engine is closed."
        )
    ]


def test_the_real_file_has_no_name_and_mode_0600(tmp_path: Path) -> None:
    with Engine(EngineConfig(ssd_dir=str(tmp_path))) as engine:
        token = offload(engine, torch.arange(1000))
        engine.wait_until_idle()
        assert list(tmp_path.iterdir()) == []
        status = Path(f"/proc/self/fd/{engine._ledger.file.fileno()}").stat()
        assert status.st_mode & 0o777 == 0o600
        assert status.st_nlink == 0
        del token


def test_what_no_lane_moves_is_not_waited_for_forever(file: MemoryFile, directory: str) -> None:
    """A chunk was lost: nothing will ever lower the count of bytes in flight."""
    with engine_on(file, directory, io_timeout_s=0.05) as engine:
        offload(engine, torch.arange(512))
        engine.wait_until_idle()
        engine._ledger.counters.in_flight_bytes += 1
        with pytest.raises((InternalError, StalledDiskError), match="in flight"):
            engine.wait_until_idle()


def test_lanes_may_be_opened_while_others_are_looked_at(directory: str) -> None:
    with Engine(EngineConfig(ssd_dir=directory), Parts(cuda=FakeCuda(), choose_kvikio=lambda *_: None)) as engine:
        engine._lanes.of("cpu")
        lanes = iter(engine._lanes.by_type.values())
        engine._lanes.of("cuda")
        assert len(list(lanes)) == 1
        assert len(engine._lanes.by_type) == 2
