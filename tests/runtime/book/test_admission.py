"""Tensors that stay in memory because the disk would stall the step, and that they are reloaded unchanged.

The tests move the clock, or the fake disk moves it with every transfer: nothing depends on real time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime_fakes import FakeCuda, HandClock, MemoryFile, fetch, open_engine
from torch import Tensor

from ssdtrain_fx.memory_limit import MemoryLimit
from ssdtrain_fx.runtime.book.admission import BALANCE_LIMIT_S, DEBT_LIMIT_S, MIN_STALL_SHARE, Admission
from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Ahead, Entry, Fill
from ssdtrain_fx.runtime.book.traffic import Direction, Traffic
from ssdtrain_fx.runtime.book.upkeep import KEPT_WINDOW
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.engines import Engines
from ssdtrain_fx.runtime.handles.tickets import Tickets
from ssdtrain_fx.runtime.lanes.lane import Lane
from ssdtrain_fx.runtime.policy.room import FRESH_FACTOR, FRESH_S, Room
from ssdtrain_fx.runtime.policy.stalls import LOOK_S, Stalls

CHUNK_BYTES = 4096
CHUNK = CHUNK_BYTES // 8
"""Elements of a chunk."""
X = torch.arange(3 * CHUNK)


class SlowFile(MemoryFile):
    """Every transfer moves the clock. Transfers run one at a time, as on a saturated disk."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self.clock = clock
        self.write_s = self.read_s = 0.0
        self._turn = threading.Lock()

    def write(self, data: memoryview, offset_bytes: int) -> None:
        with self._turn:
            super().write(data, offset_bytes)
            self.clock.move(self.write_s)

    def read(self, data: memoryview, offset_bytes: int) -> None:
        with self._turn:
            super().read(data, offset_bytes)
            self.clock.move(self.read_s)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture(params=["aio", "threads", "cuda"])
def file(request: pytest.FixtureRequest, clock: HandClock) -> SlowFile:
    file = SlowFile(clock)
    file.direct = request.param == "aio"
    file.cuda = FakeCuda() if request.param == "cuda" else None
    return file


@contextlib.contextmanager
def engine_on(file: SlowFile, *, max_stall_share: float | None = 0.01) -> Iterator[Engine]:
    """Two staging buffers of 4096 bytes."""
    config = EngineConfig(ssd_dir="/tmp", max_stall_share=max_stall_share, host_budget_bytes=2 * CHUNK_BYTES)
    with open_engine(file, config, file.clock) as engine:
        try:
            yield engine
        finally:
            file.writes_may_go_on.set()
            file.reads_may_go_on.set()


def spend_all(engine: Engine) -> None:
    """Spend the balance, so that no stall is allowed from here on."""
    engine._ledger.admission.charge(engine._ledger.admission.patience_s())


# -- the account -------------------------------------------------------------------------------------------------------


def test_the_balance_pays_for_stalls_and_grows_with_time(clock: HandClock) -> None:
    admission = Admission(0.1, clock)
    assert admission.patience_s() == BALANCE_LIMIT_S
    admission.charge(BALANCE_LIMIT_S)
    assert admission.patience_s() == 0
    assert admission.admits(0.0)
    assert not admission.admits(0.001)
    clock.move(1.0)
    assert admission.patience_s() == pytest.approx(0.1)
    assert admission.admits(0.099)
    assert not admission.admits(0.101)
    clock.move(1000.0)
    assert admission.patience_s() == BALANCE_LIMIT_S


def test_a_full_balance_pays_for_anything_and_a_debt_is_repaid(clock: HandClock) -> None:
    admission = Admission(0.1, clock)
    assert admission.admits(100.0)
    admission.charge(2 * BALANCE_LIMIT_S)
    assert admission.patience_s() == 0
    assert not admission.admits(0.0)  # nothing moves while the balance is negative: predictions were wrong
    clock.move(10 * BALANCE_LIMIT_S)
    assert admission.admits(0.0)


def test_a_stall_of_a_minute_does_not_stop_offloading_for_hours(clock: HandClock) -> None:
    admission = Admission(0.1, clock)
    admission.charge(60.0)
    clock.move(DEBT_LIMIT_S / 0.1 - 1)
    assert not admission.admits(0.0)
    clock.move(2.0)
    assert admission.admits(0.0)


def test_a_prediction_that_did_not_come_true_is_given_back(clock: HandClock) -> None:
    admission = Admission(0.1, clock)
    admission.charge(0.3)
    admission.charge(-0.3)
    assert admission.patience_s() == BALANCE_LIMIT_S


def test_even_without_any_allowance_the_disk_is_tried_again(clock: HandClock) -> None:
    admission = Admission(0.0, clock)
    admission.charge(BALANCE_LIMIT_S)
    clock.move(BALANCE_LIMIT_S / MIN_STALL_SHARE + 1)
    assert admission.admits(100.0)


def test_without_a_limit_everything_is_admitted(clock: HandClock) -> None:
    admission = Admission(None, clock)
    admission.charge(1e9)
    assert admission.admits(1e9)
    assert admission.patience_s() == float("inf")


# -- the engine --------------------------------------------------------------------------------------------------------


def test_a_release_that_may_not_wait_keeps_the_tensor(file: SlowFile) -> None:
    """Writes are held and two of three chunks fit into staging: the third cannot leave, and the release does not wait.

    The caller then overwrites its tensor, as compiled code may.
    """
    with engine_on(file) as engine:
        spend_all(engine)
        file.writes_may_go_on.clear()
        x = X.clone()
        token = engine.release(engine.offload(x, "x"), x)
        x.fill_(1)
        assert torch.equal(fetch(engine, token, X), X)
        statistics = engine.statistics()
        assert (statistics.offloads, statistics.reloads, statistics.kept_for_time) == (1, 1, 1)
        assert statistics.kept_for_time_bytes == X.nbytes
        file.writes_may_go_on.set()
        engine.wait_until_idle()
        assert file.read_count == 0
        assert file.write_count <= 2  # writes that had begun
        assert engine._ledger.counters.unwritten_bytes == 0


@pytest.mark.parametrize("deferred", [False, True])
def test_a_kept_tensor_with_exclusive_memory_is_not_copied(file: SlowFile, deferred: bool) -> None:
    with engine_on(file) as engine:
        engine._ledger.admission.admits = lambda stall_s: False  # type: ignore[method-assign]
        x = X.clone()
        address = x.data_ptr()
        token = engine.release(engine.offload(x, "x"), x, deferred=deferred, exclusive=True)
        del x
        y = fetch(engine, token, X)
        assert y.data_ptr() == address
        assert torch.equal(y, X)
        assert engine.statistics().kept_for_time == 1


def test_a_small_part_of_something_large_is_copied_all_the_same(file: SlowFile) -> None:
    """Otherwise the engine would hold the whole storage."""
    with engine_on(file) as engine:
        engine._ledger.admission.admits = lambda stall_s: False  # type: ignore[method-assign]
        whole = torch.zeros(2 * len(X), dtype=X.dtype)
        x = whole[: len(X)].copy_(X)
        token = engine.release(engine.offload(x, "x"), x, exclusive=True)
        whole.fill_(1)
        assert torch.equal(fetch(engine, token, X), X)


def test_a_release_waits_for_as_long_as_stalls_are_allowed(file: SlowFile) -> None:
    """Three chunks of 0.1 s each, two staging buffers, and half a second to spend: everything is moved."""
    with engine_on(file) as engine:
        file.write_s = 0.1
        x = X.clone()
        token = engine.release(engine.offload(x, "x"), x)
        x.fill_(1)
        engine.wait_until_idle()
        assert engine.statistics().kept_for_time == 0
        assert file.write_count == 3
        assert torch.equal(fetch(engine, token, X), X)


# -- the memory limit of the process -----------------------------------------------------------------------------------


def leave(engine: Engine, left_bytes: int, limit_bytes: int = 100 * X.nbytes) -> None:
    """Let the limit of the process leave ``left_bytes``."""
    limit = MemoryLimit(limit_bytes=limit_bytes, used_bytes=limit_bytes - left_bytes, source="test")
    engine._room._read_limit = lambda: limit


@pytest.mark.parametrize(("left_bytes", "stays"), [(11 * X.nbytes, True), (11 * X.nbytes - 1, False)])
def test_a_tensor_stays_only_if_a_tenth_of_the_limit_is_left(file: SlowFile, left_bytes: int, stays: bool) -> None:
    with engine_on(file) as engine:
        engine._ledger.admission.admits = lambda stall_s: False  # type: ignore[method-assign]
        leave(engine, left_bytes)
        x = X.clone()
        token = engine.release(engine.offload(x, "x"), x)
        x.fill_(1)
        assert torch.equal(fetch(engine, token, X), X)
        assert engine.statistics().kept_for_time == stays


def test_tensors_that_stay_count_until_the_limit_is_read_again() -> None:
    clock, limit = HandClock(), MemoryLimit(limit_bytes=100 * X.nbytes, used_bytes=88 * X.nbytes, source="test")
    readings: list[float] = []

    def read() -> MemoryLimit:
        readings.append(clock())
        return limit

    room, entry = Room(read, clock), Entry(X, "x", X, X.nbytes, None)
    assert [room.has(entry) for _ in range(4)] == [True, True, False, False]
    assert len(readings) == 1
    clock.move(FRESH_S)
    assert room.has(entry)
    assert len(readings) == 2


def test_reading_the_limit_takes_a_small_share_of_the_time() -> None:
    clock, limit = HandClock(), MemoryLimit(limit_bytes=100 * X.nbytes, used_bytes=0, source="test")
    readings: list[float] = []

    def read() -> MemoryLimit:
        clock.move(0.01)
        readings.append(clock())
        return limit

    room, entry = Room(read, clock), Entry(X, "x", X, X.nbytes, None)
    for _ in range(100):
        room.has(entry)
        clock.move(0.1)
    assert len(readings) <= 100 * 0.1 / (FRESH_FACTOR * 0.01) + 1


@pytest.mark.parametrize(("every", "warnings"), [(3, 1), (5, 0)])
def test_many_tensors_that_stay_are_reported_once(
    file: SlowFile, caplog: pytest.LogCaptureFixture, every: int, warnings: int
) -> None:
    with engine_on(file) as engine:
        for number in range(3 * KEPT_WINDOW):
            engine._ledger.admission.admits = lambda stall_s, n=number: n % every > 0  # type: ignore[method-assign]
            x = torch.arange(600)
            engine.release(engine.offload(x, "x"), x)
        engine.wait_until_idle()
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == warnings, found
    assert all("tensors stayed in memory, because moving them would have taken more time than" in one for one in found)


def test_tensors_of_other_devices_may_stay() -> None:
    """The limit is that of host memory."""
    full = MemoryLimit(limit_bytes=100, used_bytes=100, source="test")
    room = Room(lambda: full, HandClock())
    on_cpu, on_meta = (Entry(X, "x", X, X.nbytes, None), Entry(X.to("meta"), "x", X.to("meta"), X.nbytes, None))
    assert not room.has(on_cpu)
    assert room.has(on_meta)


def test_a_release_waits_if_there_is_no_room(file: SlowFile, caplog: pytest.LogCaptureFixture) -> None:
    """No stall is allowed, and writes are held until the release has waited for a moment."""
    with engine_on(file) as engine:
        leave(engine, 0)
        for _ in range(2):
            spend_all(engine)
            file.writes_may_go_on.clear()
            threading.Timer(0.2, file.writes_may_go_on.set).start()
            x = X.clone()
            token = engine.release(engine.offload(x, "x"), x)
            assert file.writes_may_go_on.is_set()
            x.fill_(1)
            assert torch.equal(fetch(engine, token, X), X)
            engine.wait_until_idle()
        assert engine.statistics().kept_for_time == 0
    (record,) = (record.getMessage() for record in caplog.records if "cannot stay" in record.getMessage())
    assert "'x' (12.00 KiB) cannot stay in memory to save time: 0 B are left of 1.17 MiB (test)" in record


# -- stalls ------------------------------------------------------------------------------------------------------------


class MarkReachedLater:
    """What a device reaches at ``at_s``: it had so much to do when its host began to wait."""

    def __init__(self, clock: HandClock, at_s: float) -> None:
        self.clock, self.at_s = clock, at_s

    def query(self) -> bool:
        return self.clock() >= self.at_s


class LaneThatTakesASecond:
    """For every chunk of one entry, in each direction."""

    passed_s = 0.0

    def __init__(self, clock: HandClock, entry: Entry, fill: Fill, mark: MarkReachedLater | None = None) -> None:
        self.clock, self.entry, self.fill = clock, entry, fill
        self.mover = SimpleNamespace(mark=lambda device: mark)

    def hurry(self, fill: Fill) -> None:
        pass

    def wait_for_progress(self, seen: int, timeout_s: float) -> bool:
        if timeout_s <= LOOK_S:  # the waiting thread wants to ask the device again
            self.clock.move(0.25)
            self.passed_s += 0.25
            if self.passed_s % 1:
                return True
        else:
            self.clock.move(1.0)
        self.entry.uncopied = max(0, self.entry.uncopied - 1)
        self.fill.unissued = max(0, self.fill.unissued - 1)
        return True


@pytest.mark.parametrize(("planned_s", "expected_s"), [(0.0, 3.0), (1.0, 2.0), (3.0, 0.0), (9.0, 0.0)])
@pytest.mark.parametrize("direction", ["out", "back"])
def test_a_stall_costs_what_goes_beyond_the_plan(
    clock: HandClock, direction: str, planned_s: float, expected_s: float
) -> None:
    """The wait is for three chunks, each of which takes a second."""
    ledger = Ledger(MemoryFile(), Admission(MIN_STALL_SHARE, clock), Traffic(clock))
    charged: list[float] = []
    ledger.admission.charge = charged.append  # type: ignore[method-assign]
    ledger.admission.patience_s = lambda: 9.0  # type: ignore[method-assign]
    stalls = Stalls(ledger, None, clock, Room(lambda: None, clock), lambda: "")
    entry = Entry(X, "x", X, X.nbytes, None)
    entry.uncopied, entry.prepaid_s = 3, planned_s
    fill = Fill(entry, X.clone(), None, None)
    fill.unissued = 3
    lane: Any = LaneThatTakesASecond(clock, entry, fill)
    if direction == "out":
        stalls.wait_until_copied(lambda _: lane, entry, [entry])
        assert ledger.counters.release_stall_s == pytest.approx(3.0)
    else:
        assert stalls.wait_until_filled(lane, fill) is None
        assert ledger.counters.wait_stall_s == pytest.approx(3.0)
    assert charged == [pytest.approx(expected_s)]
    assert entry.prepaid_s == max(0.0, planned_s - 3.0)


@pytest.mark.parametrize(("busy_s", "expected_s"), [(0.0, 3.0), (1.0, 2.0), (2.0, 1.0), (3.0, 0.0), (9.0, 0.0)])
@pytest.mark.parametrize("direction", ["out", "back"])
def test_a_stall_does_not_begin_before_the_device_has_nothing_to_do(
    clock: HandClock, direction: str, busy_s: float, expected_s: float
) -> None:
    """The host waits for 3 s, while the device computes what was enqueued before."""
    ledger = Ledger(MemoryFile(), Admission(MIN_STALL_SHARE, clock), Traffic(clock))
    charged: list[float] = []
    ledger.admission.charge = charged.append  # type: ignore[method-assign]
    ledger.admission.patience_s = lambda: 9.0  # type: ignore[method-assign]
    stalls = Stalls(ledger, None, clock, Room(lambda: None, clock), lambda: "")
    entry = Entry(X, "x", X, X.nbytes, None)
    entry.uncopied = 3
    fill = Fill(entry, X.clone(), None, None)
    fill.unissued = 3
    lane: Any = LaneThatTakesASecond(clock, entry, fill, MarkReachedLater(clock, clock() + busy_s))
    if direction == "out":
        stalls.wait_until_copied(lambda _: lane, entry, [entry])
    else:
        assert stalls.wait_until_filled(lane, fill) is None
    assert charged == [pytest.approx(expected_s)]
    blocked_s = ledger.counters.release_stall_s + ledger.counters.wait_stall_s
    assert blocked_s == pytest.approx(3.0)


@pytest.mark.parametrize(("busy_s", "stays"), [(0.0, True), (1.0, True), (3.0, False)])
def test_a_release_may_wait_while_the_device_computes(clock: HandClock, busy_s: float, stays: bool) -> None:
    """With nothing to spend, for 3 s: not beyond what the device has to do."""
    ledger = Ledger(MemoryFile(), Admission(MIN_STALL_SHARE, clock), Traffic(clock))
    ledger.admission.charge(ledger.admission.patience_s())
    entry = Entry(X, "x", X, X.nbytes, None)
    entry.uncopied = 3
    mark = MarkReachedLater(clock, clock() + busy_s)
    lane: Any = LaneThatTakesASecond(clock, entry, Fill(entry, X.clone(), None, None), mark)
    Stalls(ledger, None, clock, Room(lambda: None, clock), lambda: "").wait_until_copied(lambda _: lane, entry, [entry])
    assert entry.stays == stays


@pytest.mark.parametrize(("planned_s", "stays"), [(3.0, False), (1.5, True)])
def test_with_nothing_to_spend_a_release_waits_as_long_as_planned(
    clock: HandClock, planned_s: float, stays: bool
) -> None:
    ledger = Ledger(MemoryFile(), Admission(MIN_STALL_SHARE, clock), Traffic(clock))
    ledger.admission.charge(ledger.admission.patience_s())
    entry = Entry(X, "x", X, X.nbytes, None)
    entry.uncopied, entry.prepaid_s = 3, planned_s
    lane: Any = LaneThatTakesASecond(clock, entry, Fill(entry, X.clone(), None, None))
    Stalls(ledger, None, clock, Room(lambda: None, clock), lambda: "").wait_until_copied(lambda _: lane, entry, [entry])
    assert entry.stays == stays


def test_a_release_waits_for_a_tensor_that_is_being_read_ahead(clock: HandClock) -> None:
    """With nothing to spend: it could not stay in memory, because a reload has begun."""
    ledger = Ledger(MemoryFile(), Admission(MIN_STALL_SHARE, clock), Traffic(clock))
    ledger.admission.charge(ledger.admission.patience_s())
    entry = Entry(X, "x", X, X.nbytes, None)
    fill = Fill(entry, X.clone(), None, None)
    entry.uncopied, entry.ahead = 3, Ahead(X, fill, None)
    lane: Any = LaneThatTakesASecond(clock, entry, fill)
    Stalls(ledger, None, clock, Room(lambda: None, clock), lambda: "").wait_until_copied(lambda _: lane, entry, [entry])
    assert (entry.stays, entry.uncopied) == (False, 0)


@pytest.mark.parametrize(("from_source", "expected_s"), [(False, 3 + 2 + 4 - 1), (True, 3 + 2 + 4)])
def test_the_predicted_stall_is_that_of_all_bytes_that_have_to_leave_before(
    clock: HandClock, from_source: bool, expected_s: int
) -> None:
    """Three chunks, after two to be written and four of the host tier. One fits into staging, if that is used."""
    ledger = Ledger(MemoryFile(), Admission(MIN_STALL_SHARE, clock), Traffic(clock))
    ledger.traffic.meters[Direction.WRITE].note(CHUNK_BYTES, 1.0, busy=True)
    ledger.counters.unwritten_bytes, ledger.counters.held_bytes = 2 * CHUNK_BYTES, 4 * CHUNK_BYTES
    entry = Entry(X, "x", X, X.nbytes, None)
    entry.from_source = from_source
    lane: Any = SimpleNamespace(staging_bytes=CHUNK_BYTES)
    stalls = Stalls(ledger, None, clock, Room(lambda: None, clock), lambda: "")
    assert stalls.predict_s(lane, entry, 0.0, None) == pytest.approx(expected_s)
    assert stalls.predict_s(lane, entry, 1.5, None) == pytest.approx(expected_s - 1.5)
    assert stalls.predict_s(lane, entry, 9.5, None) == 0


def test_what_a_device_has_not_made_yet_is_no_queue_of_the_disk(clock: HandClock) -> None:
    """Of five chunks that are not written, three wait for their kernels; the disk works until these have run."""
    ledger = Ledger(MemoryFile(), Admission(MIN_STALL_SHARE, clock), Traffic(clock))
    ledger.traffic.meters[Direction.WRITE].note(CHUNK_BYTES, 1.0, busy=True)
    ledger.counters.unwritten_bytes, ledger.counters.unmade_bytes = 5 * CHUNK_BYTES, 3 * CHUNK_BYTES
    lane: Any = SimpleNamespace(staging_bytes=0)
    stalls = Stalls(ledger, None, clock, Room(lambda: None, clock), lambda: "")
    marks: list[Any] = [None, MarkReachedLater(clock, clock()), MarkReachedLater(clock, clock() + 1.0)]
    entries = [Entry(X, "x", X, X.nbytes, mark) for mark in marks]
    assert [stalls.is_ahead(entry) for entry in entries] == [False, False, True]
    assert stalls.predict_s(lane, entries[-1], 0.0, None, is_ahead=True) == pytest.approx(2 + 3)
    assert stalls.predict_s(lane, entries[0], 0.0, None, is_ahead=False) == pytest.approx(5 + 3)


def test_bytes_of_a_cpu_are_a_queue_of_the_disk_at_once(clock: HandClock) -> None:
    """They exist when they are offloaded. Only those of a device may have to be made."""
    ledger = Ledger(MemoryFile(), Admission(MIN_STALL_SHARE, clock), Traffic(clock))
    marks: list[Any] = [None, MarkReachedLater(clock, clock() + 1.0)]
    for handle, (mark, expected) in enumerate(zip(marks, [0, X.nbytes], strict=True)):
        entry = Entry(X, "x", X, X.nbytes, mark)
        ledger.enter(handle, entry, X.nbytes)
        assert ledger.counters.unmade_bytes == expected
        for chunk in entry.chunks:
            ledger.source_is_safe(chunk)
        assert ledger.counters.unmade_bytes == 0


def test_a_thread_that_looks_often_leaves_nothing_behind(clock: HandClock) -> None:
    ledger = Ledger(MemoryFile(), Admission(None, clock), Traffic(clock))
    lane: Any = SimpleNamespace(_ledger=ledger)
    for _ in range(5):
        assert Lane.wait_for_progress(lane, ledger.progress.count, 0.001)
    assert not ledger.progress._waiting


def test_what_the_plan_waits_for_is_admitted_step_after_step(file: SlowFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes and reads of 1 s each. Only planned stalls are allowed, and no planned time is lost.

    The plan allows twice the time, because the engine does not always notice at once that a transfer has finished.
    """
    with engine_on(file, max_stall_share=MIN_STALL_SHARE) as engine:
        wait_for_progress = engine._stalls.wait_for_progress

        def begin_to_wait(*arguments: Any) -> None:
            file.writes_may_go_on.set()
            file.reads_may_go_on.set()
            wait_for_progress(*arguments)

        monkeypatch.setattr(engine._stalls, "wait_for_progress", begin_to_wait)
        file.write_s = file.read_s = 1.0
        observe(engine, write_s=1.0, read_s=1.0)
        spend_all(engine)
        for step in range(1, 4):
            file.writes_may_go_on.clear()
            x = X.clone()
            token = engine.release(engine.offload(x, "x", out_s=6.0, back_s=6.0, stall_s=6.0), x)
            x.fill_(1)
            engine.wait_until_idle()
            file.reads_may_go_on.clear()
            assert torch.equal(fetch(engine, token, X), X)
            del token
            statistics = engine.statistics()  # removes dead entries
            assert min(statistics.release_stall_s, statistics.wait_stall_s) >= step
            assert engine._ledger.admission.admits(0.0)
        assert statistics.kept_for_time == 0
        assert file.write_count == 9


def observe(engine: Engine, *, write_s: float = 0.0, read_s: float = 0.0) -> None:
    """As if the disk had been measured to take that long for a chunk."""
    meters = engine._ledger.traffic.meters
    meters[Direction.WRITE].note(CHUNK_BYTES, write_s, busy=True)
    meters[Direction.READ].note(CHUNK_BYTES, read_s, busy=True)


def test_a_disk_slower_than_planned_is_not_given_more_than_the_allowance(file: SlowFile) -> None:
    """1 s per chunk, and half a second planned for three chunks, one of which may stay in staging: 1.5 s too long."""
    with engine_on(file, max_stall_share=0.1) as engine:
        observe(engine, write_s=1.0)
        spend_all(engine)
        tokens: list[Tensor] = []

        def moves(out_s: float | None) -> bool:
            before = file.write_count
            x = X.clone()
            token = engine.offload(x, "x", out_s=out_s, back_s=10.0)
            engine.wait_until_idle()  # as if the planned time had passed
            tokens.append(engine.release(token, x))
            x.fill_(1)
            return file.write_count == before + 3

        assert not moves(0.5)
        assert not moves(0.5)
        assert engine.statistics().kept_for_time == 2
        assert moves(1.0)  # two chunks in staging, the third one written
        assert moves(None)  # no plan, no verdict
        file.clock.move(BALANCE_LIMIT_S / 0.1)
        assert moves(0.5)  # the disk is tried again ...
        observe(engine, write_s=1.0)
        engine._ledger.admission.charge(BALANCE_LIMIT_S)
        assert not moves(0.5)  # ... and it is still too slow
        assert engine.statistics().kept_for_time == 3
        for token in tokens:
            assert torch.equal(fetch(engine, token, X), X)


def test_a_disk_that_reads_slowly_gets_nothing_either(file: SlowFile) -> None:
    """Reads take 1 s per chunk, but the plan has 0.1 s for all three."""
    with engine_on(file) as engine:
        observe(engine, read_s=1.0)
        spend_all(engine)
        x = X.clone()
        token = engine.release(engine.offload(x, "x", out_s=1.0, back_s=0.1), x)
        assert file.write_count == 0
        assert engine.statistics().kept_for_time == 1
        assert torch.equal(fetch(engine, token, X), X)


def test_what_is_queued_already_counts(file: SlowFile) -> None:
    """No stall is predicted for the first tensor; an equal tensor after it would have to wait."""
    with engine_on(file) as engine:
        observe(engine, write_s=1.0)
        spend_all(engine)
        file.writes_may_go_on.clear()
        x, y = X.clone(), X.clone()
        tokens = [engine.offload(x, "x", out_s=2.0, back_s=9.0), engine.offload(y, "y", out_s=2.0, back_s=9.0)]
        assert engine.statistics().kept_for_time == 1
        tokens = [engine.release(token, tensor) for token, tensor in zip(tokens, (x, y), strict=True)]
        assert engine.statistics().kept_for_time == 2  # the first one could not leave in time, either
        assert torch.equal(fetch(engine, tokens[0], X), X)
        assert torch.equal(fetch(engine, tokens[1], X), X)


def test_the_threads_time_their_transfers(clock: HandClock) -> None:
    """1 s for each write and 2 s for each read, one at a time."""
    file = SlowFile(clock)
    file.write_s, file.read_s = 1.0, 2.0
    with engine_on(file, max_stall_share=None) as engine:
        engine._lanes.of("cpu")._ends.busy_with = 1  # one thread or both may be transferring
        x = X.clone()
        token = engine.release(engine.offload(x, "x"), x)
        engine.wait_until_idle()
        fetch(engine, token, X)
        statistics = engine.statistics()
        assert statistics.write_bytes_per_s == pytest.approx(CHUNK_BYTES, rel=0.5)
        assert statistics.read_bytes_per_s == pytest.approx(CHUNK_BYTES / 2, rel=0.5)


@pytest.mark.parametrize("max_stall_share", [None, 0.01])
def test_without_a_limit_everything_is_moved(file: SlowFile, max_stall_share: float | None) -> None:
    with engine_on(file, max_stall_share=max_stall_share) as engine:
        spend_all(engine) if max_stall_share is not None else None
        engine._ledger.traffic.meters[Direction.WRITE].note(1, 1e6, busy=True)
        x = X.clone()
        token = engine.release(engine.offload(x, "x", out_s=0.0, back_s=0.0), x)
        engine.wait_until_idle()
        assert file.write_count == (3 if max_stall_share is None else 0)
        assert torch.equal(fetch(engine, token, X), X)


def test_slots_and_memory_of_a_tensor_that_stayed_are_given_back(file: SlowFile) -> None:
    with engine_on(file) as engine:
        spend_all(engine)
        file.writes_may_go_on.clear()
        x = X.clone()
        token = engine.release(engine.offload(x, "x"), x)
        assert engine._ledger.residents
        del token
        file.writes_may_go_on.set()
        engine.wait_until_idle()
        statistics = engine.statistics()
        assert (statistics.slots_in_use, statistics.in_flight_bytes) == (0, 0)
        assert not engine._ledger.residents
        assert not engine._ledger.entries


@pytest.mark.parametrize("how", ["resize_", "data"])
def test_the_owner_of_a_tensor_that_stayed_changes_its_storage(file: SlowFile, how: str) -> None:
    """As a wrapper that shards parameters may do to the memory that the engine holds."""
    with engine_on(file) as engine:
        spend_all(engine)
        file.writes_may_go_on.clear()
        x = X.clone()
        token = engine.release(engine.offload(x, "x"), x, exclusive=True)
        assert engine._ledger.residents
        if how == "resize_":
            x.untyped_storage().resize_(2 * X.nbytes)
        else:
            x.data = X + 1
        y = fetch(engine, token, X)
        assert torch.equal(y, X)
        assert engine.hand_over(y).data_ptr() != y.data_ptr()  # its owner is alive
        del token
        file.writes_may_go_on.set()
        engine.wait_until_idle()
        assert not engine._ledger.residents


def test_another_layout_is_served_by_a_copy(file: SlowFile) -> None:
    with engine_on(file) as engine:
        spend_all(engine)
        file.writes_may_go_on.clear()
        original = X.view(3, CHUNK)
        x = original.t().clone(memory_format=torch.preserve_format)
        token = engine.release(engine.offload(x, "x"), x)
        x.fill_(1)
        y = fetch(engine, token, original.t(), (3, 1))
        assert y.stride() == (3, 1)
        assert torch.equal(y, original.t())


# -- handing over -----------------------------------------------------------------------------------------------------


def test_a_tensor_that_may_be_asked_for_again_is_handed_over_as_a_copy(file: SlowFile) -> None:
    """retain_graph: backward overwrites the tensor it got, and a second backward must still find the data."""
    with engine_on(file) as engine:
        spend_all(engine)
        file.writes_may_go_on.clear()
        x = X.clone()
        token: Tensor | None = engine.release(engine.offload(x, "x"), x)
        (entry,) = engine._ledger.residents.values()
        assert entry.resident is not None
        address = entry.resident.data_ptr()

        def backward(token: Tensor) -> Tensor:
            y = engine.reload(token, X.size(), X.stride(), X.dtype, X.device)
            engine.wait(y, token)
            return y

        assert token is not None
        y = engine.hand_over(backward(token))
        assert torch.equal(y, X)
        y.fill_(7)
        y = backward(token)
        del token
        y = engine.hand_over(y)
        assert torch.equal(y, X)
        assert y.data_ptr() == address


def test_the_ops_hand_over_the_memory_itself_when_the_token_dies(
    file: SlowFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As generated code does: the token is dropped after the reload, the ticket after the wait."""
    from ssdtrain_fx.runtime import ops

    with engine_on(file) as engine:
        engines = Engines(lambda config, handles: engine)
        monkeypatch.setattr(ops, "_engines", engines)
        monkeypatch.setattr(ops, "_tickets", Tickets())
        spend_all(engine)
        file.writes_may_go_on.clear()
        x = X.clone()
        call = torch.ops.ssdtrain
        token = call.release(call.offload(x, x.stride(), "name=x|"), x)
        (entry,) = engine._ledger.residents.values()
        assert entry.resident is not None
        address = entry.resident.data_ptr()
        ticket = call.reload(token, X.size(), X.stride(), X.dtype, X.device)
        del token
        y = call.wait(ticket, X.size(), X.stride(), X.dtype, X.device)
        assert y.data_ptr() == address
        assert torch.equal(y, X)
