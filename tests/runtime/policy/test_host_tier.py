"""The host tier and reading ahead, on a stand-in for ``torch.cuda``."""

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_fakes import FakeCuda, MemoryFile, StandInEngine, fetch, offload
from torch import Tensor

from ssdtrain_fx.errors import ActivationLostError
from ssdtrain_fx.runtime import ops
from ssdtrain_fx.runtime.book.admission import BALANCE_LIMIT_S
from ssdtrain_fx.runtime.book.traffic import Direction
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.trace import Trace
from ssdtrain_fx.testing import analyse, assert_same_bits, capture_toy, save_all

ELEMENTS = 512
CHUNK_BYTES = 4096  # of 512 elements
Open = Callable[..., StandInEngine]


@pytest.fixture
def start(tmp_path: Path, file: MemoryFile, cuda: FakeCuda, request: pytest.FixtureRequest) -> Open:
    """An engine with ``buffers`` staging buffers. At the end, no memory is left registered."""

    def start(buffers: int = 64, max_stall_share: float | None = None, **options: Any) -> StandInEngine:
        config = EngineConfig(
            ssd_dir=str(tmp_path), host_budget_bytes=buffers * CHUNK_BYTES, max_stall_share=max_stall_share
        )
        engine = StandInEngine(config, file, cuda, **options)

        def finish() -> None:
            file.writes_may_go_on.set()
            file.reads_may_go_on.set()
            cuda.finish_all()
            engine.close()
            assert set(cuda.runtime.registered.values()) <= {0}

        request.addfinalizer(finish)
        return engine

    return start


def value(number: int, chunks: int = 1) -> Tensor:
    return torch.arange(chunks * ELEMENTS) + 10_000 * number


def leave(engine: StandInEngine, number: int, chunks: int = 1, **hints: Any) -> Tensor:
    return offload(engine, value(number, chunks), f"x{number}", **hints)


def ask(engine: StandInEngine, token: Tensor, chunks: int = 1) -> Tensor:
    return engine.reload(token, (chunks * ELEMENTS,), (1,), torch.int64, torch.device("cpu"))


def offset(engine: StandInEngine, token: Tensor) -> int:
    entry = engine.find_entry(token)
    assert entry is not None
    assert entry.slot is not None
    return entry.slot.offset_bytes


def begun(file: MemoryFile, verb: str) -> list[int]:
    return [offset_bytes for begun_verb, offset_bytes in file.begun if begun_verb == verb]


def check_values(engine: StandInEngine, tokens: list[Tensor], chunks: int = 1) -> None:
    for number, token in enumerate(tokens):
        assert torch.equal(fetch(engine, token, value(number, chunks)), value(number, chunks))


def check_all_is_free(engine: StandInEngine) -> None:
    engine.wait_until_idle()
    statistics = engine.statistics()
    assert (statistics.slots_in_use, statistics.in_flight_bytes) == (0, 0)
    assert engine.pool.available == engine.pool.buffer_limit
    assert engine._ledger.counters.held_bytes == engine._ledger.counters.unwritten_bytes == 0


# -- the host tier -----------------------------------------------------------------------------------------------------


def test_a_held_tensor_is_never_written_and_is_reloaded_twice(start: Open, file: MemoryFile) -> None:
    engine = start()
    token = leave(engine, 1, 3, host=True)
    engine.wait_until_idle()
    assert engine.pool.used_bytes == 3 * CHUNK_BYTES
    for _ in range(2):  # retain_graph
        assert torch.equal(fetch(engine, token, value(1, 3)), value(1, 3))
    statistics = engine.statistics()
    assert (statistics.host_bytes, statistics.demoted_bytes) == (3 * CHUNK_BYTES, 0)
    assert statistics.forwarded_bytes == 6 * CHUNK_BYTES
    assert file.begun == []
    del token
    check_all_is_free(engine)
    assert engine.statistics().host_bytes == 3 * CHUNK_BYTES


def test_others_are_written_as_before(start: Open, file: MemoryFile) -> None:
    engine = start()
    held, written = leave(engine, 1, host=True), leave(engine, 2)
    engine.wait_until_idle()
    assert begun(file, "write") == [offset(engine, written)]
    assert torch.equal(fetch(engine, held, value(1)), value(1))
    assert torch.equal(fetch(engine, written, value(2)), value(2))


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ([0, 2, 1, 3, 4], [1, 3]),  # of the tensors held then, the one needed last
        ([None] * 5, [0, 1]),  # the oldest
        ([4, 0, 1, 2, 3], [0, 3]),
        ([0, None, 1, 2, 3], [1, 3]),
        ([0, 1, 2, 0, 1], [2, 1]),  # the second 0 begins a run, which backward needs first
    ],
)
def test_what_is_needed_last_goes_to_the_file(
    start: Open, file: MemoryFile, orders: list[int | None], expected: list[int]
) -> None:
    """Four buffers, one of them for reads: the fourth and the fifth tensor take the buffers of others."""
    engine = start(4, thread_count=1)
    tokens: list[Tensor] = []
    for number, order in enumerate(orders):
        tokens.append(leave(engine, number, host=True, reload_order=order))
        engine.wait_until_idle()
    offsets = [offset(engine, token) for token in tokens]
    assert [offsets.index(written) for written in begun(file, "write")] == expected
    statistics = engine.statistics()
    assert (statistics.host_bytes, statistics.demoted_bytes) == (5 * CHUNK_BYTES, 2 * CHUNK_BYTES)
    assert statistics.bytes_written == 2 * CHUNK_BYTES
    check_values(engine, tokens)
    tokens.clear()
    check_all_is_free(engine)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("buffers", [2, 3, 5])
def test_a_tier_that_is_too_small_for_one_tensor(start: Open, buffers: int, threads: int) -> None:
    engine = start(buffers, thread_count=threads)
    tokens = [leave(engine, number, 10, host=True) for number in range(3)]
    check_values(engine, tokens, 10)
    tokens.clear()
    check_all_is_free(engine)


def test_reads_get_more_than_the_one_buffer_that_is_left_to_them(start: Open, file: MemoryFile) -> None:
    """Five of six buffers are held; as many are freed as there are threads that can read."""
    engine = start(6, thread_count=2)
    on_disk = leave(engine, 0, 8)
    engine.wait_until_idle()
    held = leave(engine, 1, 5, host=True)
    engine.wait_until_idle()
    assert engine._ledger.counters.held_bytes == 5 * CHUNK_BYTES
    file.reads_may_go_on.clear()
    y = ask(engine, on_disk, 8)
    for _ in range(2):
        assert file.read_begun.acquire(timeout=60)
    assert engine.statistics().demoted_bytes == CHUNK_BYTES
    file.reads_may_go_on.set()
    engine.wait(y, on_disk)
    assert torch.equal(y, value(0, 8))
    assert torch.equal(fetch(engine, held, value(1, 5)), value(1, 5))


def test_a_release_continues_when_a_held_tensor_dies(start: Open, file: MemoryFile) -> None:
    """The two buffers for copies are held, and the write that would free one hangs. Then the other tensor dies."""
    engine = start(3, thread_count=2)
    tokens = [leave(engine, number, host=True, reload_order=number) for number in range(2)]
    engine.wait_until_idle()
    file.writes_may_go_on.clear()
    x = value(2)
    token = engine.offload(x, "x2")
    released = threading.Thread(target=engine.release, args=(token, x))
    released.start()
    assert file.write_begun.acquire(timeout=60)  # of tensor 1, which is needed last
    del tokens[0]
    engine.statistics()  # any op notices it
    released.join(60)
    assert not released.is_alive()
    file.writes_may_go_on.set()
    assert torch.equal(fetch(engine, tokens[0], value(1)), value(1))
    assert torch.equal(fetch(engine, token, value(2)), value(2))


def test_a_tensor_that_dies_before_its_copy_is_over(start: Open, cuda: FakeCuda, file: MemoryFile) -> None:
    engine = start()
    cuda.device_is_fast = False
    token = leave(engine, 1, 2, host=True)
    del token
    cuda.finish_all()
    check_all_is_free(engine)
    statistics = engine.statistics()
    assert (statistics.cancelled_bytes, statistics.host_bytes) == (2 * CHUNK_BYTES, 0)
    assert file.begun == []


def test_a_tensor_that_dies_while_another_thread_has_the_lock_is_not_held(
    start: Open, cuda: FakeCuda, file: MemoryFile
) -> None:
    """Its death is only noted then. Whoever finishes the copy has to look."""
    engine = start()
    cuda.device_is_fast = False
    token = leave(engine, 1, 2, host=True)
    dropped, has_lock = threading.Event(), threading.Event()

    def hold_the_lock() -> None:
        with engine._ledger.lock:
            has_lock.set()
            assert dropped.wait(60)

    holder = threading.Thread(target=hold_the_lock)
    holder.start()
    assert has_lock.wait(60)
    del token
    assert engine._ledger.dead_handles  # nobody can look before the lock is free
    dropped.set()
    holder.join()
    cuda.finish_all()
    while engine._ledger.counters.in_flight_bytes:
        time.sleep(0.001)
    assert (engine._ledger.counters.cancelled_bytes, engine._ledger.counters.host_bytes) == (2 * CHUNK_BYTES, 0)
    assert file.begun == []


def test_a_tensor_that_dies_while_it_comes_back(start: Open, cuda: FakeCuda) -> None:
    """The device still reads the buffers, so they must not be reused."""
    engine = start()
    token = leave(engine, 1, 2, host=True)
    engine.wait_until_idle()
    cuda.device_is_fast = False
    y = ask(engine, token, 2)
    engine.wait(y, token)
    del token
    assert engine.statistics().slots_in_use == 1
    assert engine.pool.used_bytes == 2 * CHUNK_BYTES
    cuda.finish_all()
    check_all_is_free(engine)
    assert torch.equal(y, value(1, 2))


def test_a_write_error_of_a_demoted_tensor_loses_nothing(start: Open, file: MemoryFile) -> None:
    engine = start(3, thread_count=1)
    file.write_error = lambda index: OSError(errno.EIO, "Input/output error")
    tokens = [leave(engine, number, host=True) for number in range(6)]
    engine.wait_until_idle()
    statistics = engine.statistics()
    assert statistics.kept_bytes == statistics.demoted_bytes == 4 * CHUNK_BYTES
    check_values(engine, tokens)
    tokens.clear()
    check_all_is_free(engine)


def test_held_chunks_of_a_tensor_that_stays_are_given_back(start: Open, file: MemoryFile) -> None:
    """Six chunks, two buffers for copies and a disk that hangs: the release gives up, and all of it stays in memory."""
    engine = start(3, thread_count=1, max_stall_share=0.0)
    engine._ledger.admission.charge(BALANCE_LIMIT_S)
    file.writes_may_go_on.clear()
    token = leave(engine, 1, 6, host=True)
    assert engine.statistics().kept_for_time == 1
    file.writes_may_go_on.set()
    engine.wait_until_idle()
    assert engine.pool.available == engine.pool.buffer_limit
    assert engine._ledger.counters.held_bytes == 0
    assert torch.equal(fetch(engine, token, value(1, 6)), value(1, 6))
    del token
    check_all_is_free(engine)


def test_admission_knows_the_host_tier(start: Open, file: MemoryFile) -> None:
    """A disk that takes 1 s for each chunk, and four buffers, two of them held.

    Three more chunks fit after one was written, which takes a second. Held chunks need not be read."""
    engine = start(4, thread_count=1, max_stall_share=0.0, clock=lambda: 0.0)
    tokens = [leave(engine, 1, 2, host=True, out_s=0.0, back_s=0.0)]
    engine.wait_until_idle()
    engine._ledger.admission.charge(BALANCE_LIMIT_S)
    for direction in Direction:
        engine._ledger.traffic.meters[direction].note(CHUNK_BYTES, 1.0, busy=True)
    costly = [(3, {"out_s": 0.5}), (1, {"out_s": 9.0, "back_s": 0.5})]
    for count, (chunks, plan) in enumerate(costly, 1):
        tokens.append(leave(engine, 1 + count, chunks, **plan))
        assert engine.statistics().kept_for_time == count
    x = value(4)
    token = engine.offload(x, "x4", host=True, out_s=0.0, back_s=0.0)
    assert engine.statistics().kept_for_time == 2
    engine.wait_until_idle()  # so that the release does not wait for the copy
    tokens.append(engine.release(token, x))
    for number, (token, chunks) in enumerate(zip(tokens, (2, 3, 1, 1), strict=True), 1):
        assert torch.equal(fetch(engine, token, value(number, chunks)), value(number, chunks))


def test_a_plan_with_a_host_tier_is_carried_out(
    file: MemoryFile, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole step: the same bits, and every tensor that was planned to stay has stayed."""

    class PatientEngine(StandInEngine):
        """Reloads begin when all of forward has left. A tensor that is needed earlier is not held, but forwarded."""

        def reload(self, *arguments: Any) -> Tensor:
            self.wait_until_idle()
            return super().reload(*arguments)

    def open_engine(config: EngineConfig, handles: Iterator[int]) -> StandInEngine:
        engines.append(PatientEngine(config, file, cuda, handles=handles))
        return engines[-1]

    engines: list[StandInEngine] = []
    ops.close()
    monkeypatch.setattr(ops._engines, "_open_engine", open_engine)
    step = capture_toy("deep", partition=save_all)
    analysis = analyse(step, min_tensor_bytes=2048)
    plan = analysis.plan(policy="all", disk=1e9, host_bytes=2048 * 2)
    joint = analysis.rewrite(plan)
    assert_same_bits(step.run(joint), step.run())
    (engine,) = engines
    engine.wait_until_idle()
    statistics = engine.statistics()
    assert plan.on_host
    assert statistics.host_bytes == 2048 * len(plan.on_host)
    assert statistics.demoted_bytes == 0
    assert statistics.bytes_written + statistics.cancelled_bytes == 2048 * (len(plan.offloaded) - len(plan.on_host))
    ops.close()


# -- reading ahead -----------------------------------------------------------------------------------------------------


def test_the_first_reload_brings_the_rest_to_staging(start: Open, file: MemoryFile) -> None:
    """In the order in which backward requests them, not in the order of forward."""
    engine = start(thread_count=2)
    orders = [3, 0, 2, 1]
    tokens = [leave(engine, number, 2, reload_order=order) for number, order in enumerate(orders)]
    engine.wait_until_idle()
    ordered = [tokens[orders.index(turn)] for turn in range(4)]
    y = ask(engine, ordered[0], 2)
    engine.wait(y, ordered[0])
    engine.wait_until_idle()
    reads = [read for read in begun(file, "read") if not 0 <= read - offset(engine, ordered[0]) <= CHUNK_BYTES]
    assert reads == [offset(engine, token) + start for token in ordered[1:] for start in (0, CHUNK_BYTES)]
    assert torch.equal(y, value(1, 2))
    for turn in range(1, 4):
        number = orders.index(turn)
        assert torch.equal(fetch(engine, tokens[number], value(number, 2)), value(number, 2))
    statistics = engine.statistics()
    assert file.read_count == 8
    assert statistics.bytes_read == 8 * CHUNK_BYTES
    assert statistics.read_ahead_bytes == statistics.forwarded_bytes == 6 * CHUNK_BYTES
    del y
    tokens.clear()
    ordered.clear()
    check_all_is_free(engine)


def test_nothing_is_read_ahead_in_an_unknown_order(start: Open, file: MemoryFile) -> None:
    engine = start()
    tokens = [leave(engine, number) for number in range(4)]
    engine.wait_until_idle()
    fetch(engine, tokens[3], value(3))
    engine.wait_until_idle()
    assert file.read_count == 1


def test_another_run_of_the_graph_is_left_alone(start: Open, file: MemoryFile) -> None:
    """Two micro-batches. Tensors offloaded after the backward of a run has begun belong to another run."""
    engine = start()
    runs = [[leave(engine, order, reload_order=order) for order in range(3)] for _ in range(2)]
    engine.wait_until_idle()
    fetch(engine, runs[1][0], value(0))
    runs.append([leave(engine, order, reload_order=order) for order in range(3, 5)])
    engine.wait_until_idle()
    fetch(engine, runs[1][1], value(1))
    engine.wait_until_idle()
    assert sorted(begun(file, "read")) == sorted(offset(engine, token) for token in runs[1])
    fetch(engine, runs[0][0], value(0))
    engine.wait_until_idle()
    assert file.read_count == 6


def test_reading_ahead_leaves_buffers_and_gives_way(start: Open, file: MemoryFile) -> None:
    """Eight buffers for two threads: one for each thread and one for reads stay free, so five are filled."""
    engine = start(8, thread_count=2)
    tokens = [leave(engine, number, reload_order=number) for number in range(10)]
    engine.wait_until_idle()
    fetch(engine, tokens[0], value(0))
    engine.wait_until_idle()
    assert engine.pool.used_bytes == 5 * CHUNK_BYTES
    assert sorted(begun(file, "read")) == [offset(engine, token) for token in tokens[:6]]
    file.writes_may_go_on.clear()
    x = value(99, 5)
    token = engine.release(engine.offload(x, "y"), x)  # two free buffers and three that were read ahead
    assert engine.pool.available == 1
    file.writes_may_go_on.set()
    engine.wait_until_idle()
    assert begun(file, "read")[6:] == [offset(engine, token) for token in tokens[3:6]]  # those needed first were left
    assert torch.equal(fetch(engine, token, value(99, 5)), value(99, 5))
    for number in range(1, 10):
        assert torch.equal(fetch(engine, tokens[number], value(number)), value(number))
    del token
    tokens.clear()
    check_all_is_free(engine)


def test_what_is_written_while_backward_is_on_stays_for_it(start: Open, file: MemoryFile) -> None:
    engine = start(thread_count=5)  # four hang in writes
    file.writes_may_go_on.clear()
    tokens = [leave(engine, number, reload_order=number) for number in range(4)]
    y = ask(engine, tokens[1])
    engine.wait(y, tokens[1])
    file.writes_may_go_on.set()
    engine.wait_until_idle()
    assert engine.statistics().bytes_written == 4 * CHUNK_BYTES
    assert engine.pool.used_bytes == 2 * CHUNK_BYTES
    for number in (2, 3):
        assert torch.equal(fetch(engine, tokens[number], value(number)), value(number))
    assert file.read_count == 0
    assert torch.equal(fetch(engine, tokens[0], value(0)), value(0))
    tokens.clear()
    check_all_is_free(engine)


def test_the_trace_tells_what_was_read_ahead(start: Open) -> None:
    engine = start()
    tokens = [leave(engine, number, 2, reload_order=number) for number in range(3)]
    engine.wait_until_idle()
    engine.trace = Trace()
    fetch(engine, tokens[0], value(0, 2))
    engine.wait_until_idle()
    events = json.loads(engine.trace.to_json())["traceEvents"]
    counted = {name: sum(e["args"]["bytes"] for e in events if e["name"] == name) for name in ("read", "read ahead")}
    statistics = engine.statistics()
    assert counted["read ahead"] == statistics.read_ahead_bytes == 4 * CHUNK_BYTES
    assert counted["read"] + counted["read ahead"] == statistics.bytes_read


def test_a_second_backward_reads_ahead_again(start: Open, file: MemoryFile) -> None:
    engine = start()
    tokens = [leave(engine, number, reload_order=number) for number in range(4)]
    engine.wait_until_idle()
    for _ in range(2):
        for number, token in enumerate(tokens):
            assert torch.equal(fetch(engine, token, value(number)), value(number))
            engine.wait_until_idle()
    assert file.read_count == 8
    assert engine.statistics().read_ahead_bytes == 6 * CHUNK_BYTES


def test_a_reload_joins_the_read_that_is_under_way(start: Open, file: MemoryFile) -> None:
    engine = start(thread_count=2)
    tokens = [leave(engine, number, reload_order=number) for number in range(2)]
    engine.wait_until_idle()
    file.reads_may_go_on.clear()
    ys = [ask(engine, tokens[0])]
    for _ in range(2):
        assert file.read_begun.acquire(timeout=60)
    ys.append(ask(engine, tokens[1]))
    file.reads_may_go_on.set()
    for number, (y, token) in enumerate(zip(ys, tokens, strict=True)):
        engine.wait(y, token)
        assert torch.equal(y, value(number))
    assert file.read_count == 2


def test_the_slot_lives_until_a_read_ahead_is_over(start: Open, file: MemoryFile) -> None:
    engine = start(thread_count=2)
    tokens = [leave(engine, number, reload_order=number) for number in range(2)]
    engine.wait_until_idle()
    file.reads_may_go_on.clear()
    ask(engine, tokens[0])
    for _ in range(2):
        assert file.read_begun.acquire(timeout=60)
    tokens.clear()
    assert engine.statistics().slots_in_use == 2
    file.reads_may_go_on.set()
    check_all_is_free(engine)


def test_what_was_read_ahead_in_vain_is_given_back(start: Open) -> None:
    engine = start()
    tokens = [leave(engine, number, 2, reload_order=number) for number in range(3)]
    engine.wait_until_idle()
    ask(engine, tokens[0], 2)
    engine.wait_until_idle()
    assert engine.pool.used_bytes == 4 * CHUNK_BYTES
    tokens.clear()
    check_all_is_free(engine)


@pytest.mark.parametrize("lasting", [False, True])
def test_a_read_ahead_that_fails_is_no_error(start: Open, file: MemoryFile, lasting: bool) -> None:
    """The requested read reports an error if it fails as well."""
    engine = start(thread_count=1)
    tokens = [leave(engine, number, reload_order=number) for number in range(3)]
    engine.wait_until_idle()
    failing = {1, 3} if lasting else {1}
    file.read_error = lambda index: OSError(errno.EIO, "Input/output error") if index in failing else None
    assert torch.equal(fetch(engine, tokens[0], value(0)), value(0))
    engine.wait_until_idle()
    assert engine.statistics().read_ahead_bytes == CHUNK_BYTES
    assert file.read_count == 3
    if lasting:
        with pytest.raises(ActivationLostError, match=r"'x1'.*Input/output error"):
            fetch(engine, tokens[1], value(1))
    else:
        assert torch.equal(fetch(engine, tokens[1], value(1)), value(1))
    assert torch.equal(fetch(engine, tokens[2], value(2)), value(2))
    assert file.read_count == 4
    tokens.clear()


def test_a_read_ahead_that_fails_under_a_reload(start: Open, file: MemoryFile) -> None:
    engine = start(thread_count=2)
    tokens = [leave(engine, number, reload_order=number) for number in range(2)]
    engine.wait_until_idle()
    file.read_error = lambda index: OSError(errno.EIO, "Input/output error") if index < 2 else None
    file.reads_may_go_on.clear()
    lost, y = ask(engine, tokens[0]), None
    for _ in range(2):
        assert file.read_begun.acquire(timeout=60)
    y = ask(engine, tokens[1])
    file.reads_may_go_on.set()
    engine.wait(y, tokens[1])
    assert torch.equal(y, value(1))
    with pytest.raises(ActivationLostError, match="'x0'"):
        engine.wait(lost, tokens[0])
