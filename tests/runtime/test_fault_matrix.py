"""One training step on a disk that fails: the gradients are right, or an error is raised.

The step is compiled once and run node by node, with every saved tensor offloaded. Unless a test says otherwise, all
tensors are on disk before backward begins, so that every tensor is really read from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from faulty_disk import (
    CHUNK_BYTES,
    Fail,
    Fault,
    FaultyDisk,
    FaultyFile,
    Flip,
    Hang,
    LaneKind,
    Late,
    Operation,
    Short,
    Torn,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from steps import FAST_DISK
from torch import Tensor, fx

from ssdtrain_fx.compiler.dynamo_backend import backend
from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.errors import ActivationLostError, ConfigError, StalledDiskError
from ssdtrain_fx.runtime import ops
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.handles.tokens import Owner
from ssdtrain_fx.runtime.lanes.call_sites import CallSite
from ssdtrain_fx.runtime.statistics import Statistics

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKING_LANES: list[LaneKind] = ["aio", "threads", "cuda"]
"""Bytes pass through the CPU: they can be checked, and missing bytes can be requested again."""
LANES: list[LaneKind] = [*CHECKING_LANES, "kvikio"]
"""Not "source": page boundaries vary there, and so do the transfers that the disk sees. It has its own section below.
"""
DISK_ERRORS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENODEV, errno.ESTALE]
WIDTH = 40
TENSOR_BYTES = WIDTH * WIDTH * 4  # 6400: two chunks
SLOT_BYTES = 2 * CHUNK_BYTES
TENSORS = 5
CHUNKS = 2 * TENSORS
WIDE = 56
"""12544 bytes: two or three pages are whole."""
PLACES = {"first": 0, "middle": CHUNKS // 2, "last": CHUNKS - 1}

by_lane = pytest.mark.parametrize("lane", LANES)
by_checking_lane = pytest.mark.parametrize("lane", CHECKING_LANES)
by_place = pytest.mark.parametrize("number", PLACES.values(), ids=PLACES)
by_error = pytest.mark.parametrize("error", DISK_ERRORS, ids=errno.errorcode.get)


def layers(x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor]:
    for weight in (first, second, third):
        x = torch.nn.functional.gelu(x @ weight)
    return (x.square().sum(),)


def arguments(width: int = WIDTH) -> list[Tensor]:
    """``x`` and three weights."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(width, width, generator=generator) for _ in range(4)]
    return [tensors[0], *(weight.requires_grad_() for weight in tensors[1:])]


@dataclasses.dataclass
class Step:
    """A compiled step and its expected gradients."""

    compiled: Callable[..., Any]
    engine: Engine
    arguments: list[Tensor]

    def __post_init__(self) -> None:
        self.weights = self.arguments[1:]
        self.expected = torch.autograd.grad(layers(*self.arguments)[0], self.weights)

    def forward(self) -> Tensor:
        (loss,) = self.compiled(*self.arguments)
        return loss

    def forward_to_disk(self) -> Tensor:
        loss = self.forward()
        self.engine.wait_until_idle()
        return loss

    def run(self) -> None:
        """Run a step and check that its gradients are right."""
        self.forward_to_disk().backward()
        self.check_gradients()

    def check_gradients(self) -> None:
        for weight, gradient in zip(self.weights, self.expected, strict=True):
            assert weight.grad is not None
            assert torch.equal(weight.grad, gradient)
            weight.grad = None

    def lose(self, loss: Tensor) -> str:
        """Check that backward fails and leaves no gradient. Returns the message."""
        with pytest.raises(ActivationLostError) as caught:
            loss.backward()
        assert all(weight.grad is None for weight in self.weights)
        return str(caught.value)

    def settled(self) -> Statistics:
        self.engine.wait_until_idle()
        return self.engine.statistics()

    def check_nothing_is_left(self) -> None:
        gc.collect()  # a caught exception holds the frames that it passed
        statistics = self.settled()
        assert (statistics.slots_in_use, statistics.slot_bytes_in_use, statistics.in_flight_bytes) == (0, 0, 0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> OffloadConfig:
    return OffloadConfig(
        inner="aot_eager",
        policy="all",
        min_tensor_bytes=0,
        ssd_dir=str(tmp_path_factory.mktemp("disk")),
        hardware=FAST_DISK,
    )


@pytest.fixture(scope="module")
def compiled(config: OffloadConfig) -> Callable[..., Any]:
    return backend(config)(fx.symbolic_trace(layers), arguments())


@pytest.fixture(scope="module")
def compiled_wide(config: OffloadConfig) -> Callable[..., Any]:
    return backend(config)(fx.symbolic_trace(layers), arguments(WIDE))


@pytest.fixture(autouse=True, scope="module")
def _fast_garbage_collection(compiled: Callable[..., Any], compiled_wide: Callable[..., Any]) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Objects that exist already, mainly those of torch, need not be searched in every test."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def start(
    config: OffloadConfig,
    compiled: Callable[..., Any],
    compiled_wide: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Step]]:
    """``start(disk, lane, **options)``: a step whose engine works on ``disk``."""
    disks: list[FaultyDisk] = []

    def on(disk: FaultyDisk, lane: LaneKind, **options: Any) -> Step:
        def open_engine(config: EngineConfig, handles: Iterator[int]) -> Engine:
            return disk.open_engine(lane, dataclasses.replace(config, **options), handles)

        ops.close()
        disks.append(disk)
        monkeypatch.setattr(ops._engines, "_open_engine", open_engine)
        engine = ops._engines.open(config.engine_config().to_argument())
        wide = lane == "source"
        return Step(compiled_wide if wide else compiled, engine, arguments(WIDE if wide else WIDTH))

    yield on
    for disk in disks:
        disk.let_go()
    ops.close()
    for disk in disks:
        disk.check_closed()


def told(lane: LaneKind, operation: Operation, error: int) -> tuple[int, str]:
    """How an error of the disk is reported to the user: number and text. KvikIO's own errors have no number."""
    if lane == "kvikio":
        return errno.EIO, f"KvikIO {operation}: POSIX error on p{operation}: {os.strerror(error)}"
    return error, os.strerror(error)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@by_lane
def test_a_disk_without_faults(start: Callable[..., Step], lane: LaneKind) -> None:
    """The transfer counts that the places above assume."""
    disk = FaultyDisk()
    step = start(disk, lane)
    step.run()
    assert disk.counts["write"] == disk.counts["read"] == CHUNKS
    assert step.settled().offloads == TENSORS
    step.check_nothing_is_left()


# -- writes ------------------------------------------------------------------------------------------------------------


@by_lane
@by_place
@by_error
def test_a_failed_write(
    start: Callable[..., Step], lane: LaneKind, number: int, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The data stays in memory, and one warning is logged."""
    step = start(FaultyDisk(Fault("write", number, Fail(error)), Fault("write", CHUNKS + 1, Fail(error))), lane)
    for _ in range(2):
        step.run()
    statistics = step.settled()
    assert (statistics.kept, statistics.kept_bytes + statistics.bytes_written) == (2, 2 * TENSORS * TENSOR_BYTES)
    step.check_nothing_is_left()
    (warning,) = warnings_in(caplog)
    number, text = told(lane, "write", error)
    assert f"cannot write to {FaultyFile.path} (errno {number}: {text})" in warning


@by_lane
@by_error
def test_a_disk_that_takes_nothing(start: Callable[..., Step], lane: LaneKind, error: int) -> None:
    disk = FaultyDisk(Fault("write", None, Fail(error)))
    step = start(disk, lane)
    step.run()
    assert step.settled().kept == TENSORS
    assert disk.counts["read"] == 0
    step.check_nothing_is_left()


@by_lane
@by_error
def test_a_file_that_does_not_grow(start: Callable[..., Step], lane: LaneKind, error: int) -> None:
    step = start(FaultyDisk(Fault("grow", None, Fail(error))), lane)
    step.run()
    assert step.settled().kept == TENSORS
    step.check_nothing_is_left()


@by_lane
@pytest.mark.parametrize("capacity_chunks", range(CHUNKS + 1))
def test_a_disk_that_is_full_at_any_moment(start: Callable[..., Step], lane: LaneKind, capacity_chunks: int) -> None:
    disk = FaultyDisk()
    disk.capacity_bytes = capacity_chunks * CHUNK_BYTES
    step = start(disk, lane)
    step.run()
    assert disk.counts["read"] == capacity_chunks
    disk.capacity_bytes = None
    step.run()
    assert disk.counts["read"] == capacity_chunks + CHUNKS
    step.check_nothing_is_left()


# -- reads -------------------------------------------------------------------------------------------------------------


@by_lane
@by_place
@by_error
def test_a_failed_read(start: Callable[..., Step], lane: LaneKind, number: int, error: int) -> None:
    disk = FaultyDisk(Fault("read", number, Fail(error)))
    step = start(disk, lane)
    number, text = told(lane, "read", error)
    check_lost(step, disk, f"[Errno {number}] {text}")
    step.run()
    step.check_nothing_is_left()


def check_lost(step: Step, disk: FaultyDisk, cause: str) -> None:
    """The error names the tensor whose slot was hit, its slot, the file, and the cause."""
    loss = step.forward_to_disk()
    names = {entry.slot: entry.name for entry in step.engine._ledger.entries.values()}
    disk.struck.clear()
    message = step.lose(loss)
    (offset_bytes,) = (offset_bytes for _, offset_bytes in disk.struck)
    (slot,) = (slot for slot in names if slot is not None and slot.offset_bytes <= offset_bytes < slot.end_bytes)
    assert f"the saved tensor {names[slot]!r} (float32[{WIDTH}, {WIDTH}]) cannot be read back" in message
    assert f"from bytes {slot.offset_bytes}..{slot.end_bytes} of {FaultyFile.path}: {cause}" in message


@by_checking_lane
@by_place
@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_short_transfer_is_continued(
    start: Callable[..., Step], lane: LaneKind, number: int, operation: Operation
) -> None:
    """5000 bytes of a chunk of 8192 bytes are moved: the rest is requested from byte 4096 on."""
    disk = FaultyDisk(Fault(operation, number // 2, Short(5000)))
    disk.chunk_bytes = 2 * CHUNK_BYTES
    step = start(disk, lane)
    step.run()
    assert disk.counts[operation] == TENSORS + 1
    assert step.settled().kept == 0
    step.check_nothing_is_left()


@by_lane
@by_place
def test_a_write_that_moves_nothing(start: Callable[..., Step], lane: LaneKind, number: int) -> None:
    step = start(FaultyDisk(Fault("write", number, Short(0))), lane)
    step.run()
    assert step.settled().kept == 1
    step.check_nothing_is_left()


@by_checking_lane
@by_place
def test_a_read_that_moves_nothing(start: Callable[..., Step], lane: LaneKind, number: int) -> None:
    disk = FaultyDisk(Fault("read", number, Short(0)))
    step = start(disk, lane)
    check_lost(step, disk, "[Errno 5] short read: 0 of 4096 bytes at offset ")
    step.run()
    step.check_nothing_is_left()


@by_place
@pytest.mark.parametrize("byte_count", [0, 100])
def test_a_short_transfer_through_kvikio_is_an_error(
    start: Callable[..., Step], number: int, byte_count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A chunk whose write is short stays in memory; a chunk whose read is short has no other copy."""
    disk = FaultyDisk(Fault("write", number, Short(byte_count)), Fault("read", 0, Short(byte_count)))
    step = start(disk, "kvikio")
    check_lost(step, disk, f"[Errno 5] short KvikIO read: {byte_count} of ")
    assert step.settled().kept == 1
    (warning,) = warnings_in(caplog)
    assert f"errno 5: short KvikIO write: {byte_count} of " in warning
    step.run()
    step.check_nothing_is_left()


@by_lane
@pytest.mark.parametrize("operation", ["write", "read"])
def test_an_error_holds_no_tensor(start: Callable[..., Step], lane: LaneKind, operation: Operation) -> None:
    """Neither the error of the first chunk, which is raised, nor that of the second chunk."""
    engine = start(FaultyDisk(Fault(operation, None, Fail(errno.EIO))), lane).engine
    told: ActivationLostError | None = None
    gc.disable()
    try:
        x = torch.arange(1024)
        storages = [weakref.ref(x.untyped_storage())]
        token = engine.release(engine.offload(x, "x"), x)
        engine.wait_until_idle()
        y = engine.reload(token, x.size(), x.stride(), x.dtype, x.device)
        storages.append(weakref.ref(y.untyped_storage()))
        try:
            engine.wait(y, token)
        except ActivationLostError as error:
            told = error.with_traceback(None)
        assert (told is None) == (operation == "write")
        del x, y
        ops.close()  # the threads have ended
        assert [storage() for storage in storages] == [None, None]
    finally:
        gc.enable()


# -- the host tier and reading ahead -----------------------------------------------------------------------------------


def hint(step: Step, *, host: bool) -> None:
    """Add the hints of a plan: the tensor that forward offloads last is reloaded first."""
    orders = itertools.count(1000, -1)
    engine_offload = step.engine.offload

    def offload(x: Tensor, call_site: CallSite) -> Owner:
        site = dataclasses.replace(call_site.site, host=host, reload_order=next(orders))
        return engine_offload(x, CallSite(site))

    step.engine.offload = offload  # type: ignore[method-assign]


@by_error
@pytest.mark.parametrize("number", range(CHUNKS - 2))
def test_a_failed_write_of_what_has_to_leave_the_host_tier(
    start: Callable[..., Step], number: int, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Room for two chunks: all others are written to the file."""
    step = start(FaultyDisk(Fault("write", number, Fail(error))), "cuda", host_budget_bytes=3 * CHUNK_BYTES)
    hint(step, host=True)
    step.run()
    statistics = step.settled()
    assert statistics.host_bytes == TENSORS * TENSOR_BYTES
    assert statistics.demoted_bytes == statistics.bytes_written + statistics.kept_bytes
    assert statistics.kept == 1
    step.check_nothing_is_left()
    (warning,) = warnings_in(caplog)
    assert os.strerror(error) in warning


@by_error
def test_a_disk_that_takes_nothing_and_a_host_tier_that_is_too_small(start: Callable[..., Step], error: int) -> None:
    disk = FaultyDisk(Fault("write", None, Fail(error)))
    step = start(disk, "cuda", host_budget_bytes=1)
    hint(step, host=True)
    step.run()
    assert disk.counts["read"] == 0
    step.check_nothing_is_left()


def test_a_host_tier_with_room_needs_no_disk(start: Callable[..., Step]) -> None:
    disk = FaultyDisk(Fault("write", None, Fail(errno.EIO)), Fault("read", None, Fail(errno.EIO)))
    step = start(disk, "cuda")
    hint(step, host=True)
    step.run()
    assert not disk.counts
    step.check_nothing_is_left()


@by_error
def test_a_failed_read_of_what_had_to_leave_the_host_tier(start: Callable[..., Step], error: int) -> None:
    disk = FaultyDisk(Fault("read", 0, Fail(error)))
    step = start(disk, "cuda", host_budget_bytes=3 * CHUNK_BYTES)
    hint(step, host=True)
    check_lost(step, disk, f"[Errno {error}] {os.strerror(error)}")
    step.run()
    step.check_nothing_is_left()


@by_error
@pytest.mark.parametrize("number", range(CHUNKS))
def test_a_failed_read_ahead(start: Callable[..., Step], number: int, error: int) -> None:
    """Backward requests the chunk again, or had already requested it: right gradients, or an error."""
    disk = FaultyDisk(Fault("read", number, Fail(error)))
    step = start(disk, "cuda")
    hint(step, host=False)
    message = ""
    try:
        step.forward_to_disk().backward()
    except ActivationLostError as lost:
        message = str(lost)
    if message:
        assert os.strerror(error) in message
        assert all(weight.grad is None for weight in step.weights)
    else:
        step.check_gradients()
        assert disk.counts["read"] == CHUNKS + 1
    disk.faults.clear()
    step.run()
    step.check_nothing_is_left()


def test_reads_that_all_fail_ahead_and_asked_for(start: Callable[..., Step]) -> None:
    disk = FaultyDisk(Fault("read", None, Fail(errno.EIO)))
    step = start(disk, "cuda")
    hint(step, host=False)
    step.lose(step.forward_to_disk())
    disk.faults.clear()
    step.run()
    step.check_nothing_is_left()


# -- damage, with checksums --------------------------------------------------------------------------------------------


@by_checking_lane
@by_place
@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_torn_transfer(start: Callable[..., Step], lane: LaneKind, number: int, operation: Operation) -> None:
    """The disk reports that it moved everything, but it did not."""
    step = start(FaultyDisk(Fault(operation, number, Torn(512))), lane, checksum=True)
    assert "checksum mismatch" in step.lose(step.forward_to_disk())
    step.run()
    step.check_nothing_is_left()


@by_checking_lane
@given(
    operation=st.sampled_from(["write", "read"]),
    number=st.integers(0, CHUNKS - 1),
    position=st.integers(0, CHUNK_BYTES - 1),
    mask=st.integers(1, 255),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_of_any_byte(
    start: Callable[..., Step], lane: LaneKind, operation: Operation, number: int, position: int, mask: int
) -> None:
    """Backward fails if the byte belongs to a tensor; bytes after the tensor's end do not matter."""
    disk = FaultyDisk(Fault(operation, number, Flip(position, mask)))
    step = start(disk, lane, checksum=True)
    loss = step.forward_to_disk()
    try:
        loss.backward()
    except ActivationLostError as error:
        message = str(error)
        assert all(weight.grad is None for weight in step.weights)
    else:
        message = ""
        step.check_gradients()
    ((_, offset_bytes),) = disk.struck
    assert ("checksum mismatch" in message) == (offset_bytes % SLOT_BYTES + position < TENSOR_BYTES)


@pytest.mark.parametrize("operation", ["write", "read"])
def test_kvikio_cannot_tell_damage_so_checksums_are_refused(
    start: Callable[..., Step], operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If KvikIO is not required, checksums send tensors through host memory."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    disk = FaultyDisk(Fault(operation, 0, Torn(512)))
    with pytest.raises(ConfigError, match='checksum=True needs io="posix"'):
        start(disk, "kvikio", checksum=True, io="kvikio")
    assert not disk.files
    step = start(disk, "kvikio", checksum=True, io="auto")
    assert "checksum mismatch" in step.lose(step.forward_to_disk())
    step.check_nothing_is_left()


# -- written without staging -------------------------------------------------------------------------------------------


def try_step(step: Step) -> str:
    """Run a step: right gradients, or an error and no gradients. Returns the message of the error."""
    loss = step.forward_to_disk()
    try:
        loss.backward()
    except ActivationLostError as error:
        assert all(weight.grad is None for weight in step.weights)
        return str(error)
    step.check_gradients()
    return ""


from_source_numbers = pytest.mark.parametrize("number", [*range(0, 2 * TENSORS, 3), None])


def test_tensors_are_written_from_where_they_are(start: Callable[..., Step]) -> None:
    """Only whole pages are written: the edges stay in memory."""
    disk = FaultyDisk()
    step = start(disk, "source")
    step.run()
    assert 2 * TENSORS <= disk.counts["write"] == disk.counts["read"] <= 3 * TENSORS
    assert step.settled().staging_bytes == 0
    step.check_nothing_is_left()


@from_source_numbers
@pytest.mark.parametrize("effect", [*map(Fail, DISK_ERRORS), Short(0), Short(100)], ids=str)
def test_failed_writes_of_what_is_written_from_where_it_is(
    start: Callable[..., Step], number: int | None, effect: Fail | Short
) -> None:
    step = start(FaultyDisk(Fault("write", number, effect)), "source")
    assert try_step(step) == ""
    assert step.settled().kept == (TENSORS if number is None else 1)
    step.run()
    step.check_nothing_is_left()


@from_source_numbers
@pytest.mark.parametrize("effect", [*map(Fail, DISK_ERRORS), Short(0), Short(100)], ids=str)
def test_failed_reads_of_what_was_written_from_where_it_was(
    start: Callable[..., Step], number: int | None, effect: Fail | Short
) -> None:
    disk = FaultyDisk(Fault("read", number, effect))
    step = start(disk, "source")
    assert "cannot be read back" in try_step(step)
    disk.faults.clear()
    step.run()
    step.check_nothing_is_left()


@pytest.mark.parametrize("capacity_chunks", range(0, 3 * TENSORS, 2))
def test_a_disk_that_is_full_for_what_is_written_from_where_it_is(
    start: Callable[..., Step], capacity_chunks: int
) -> None:
    disk = FaultyDisk()
    disk.capacity_bytes = capacity_chunks * CHUNK_BYTES
    step = start(disk, "source")
    step.run()
    disk.capacity_bytes = None
    step.run()
    step.check_nothing_is_left()


@given(
    operation=st.sampled_from(["write", "read"]),
    number=st.integers(0, 2 * TENSORS - 1),
    effect=st.builds(Torn, st.integers(0, CHUNK_BYTES - 1))
    | st.builds(Flip, st.integers(0, CHUNK_BYTES - 1), st.integers(1, 255)),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_of_what_is_written_from_where_it_is(
    start: Callable[..., Step], operation: Operation, number: int, effect: Torn | Flip
) -> None:
    """Every byte that is written belongs to a tensor. A torn transfer goes unnoticed if the missing bytes are zero."""
    disk = FaultyDisk(Fault(operation, number, effect))
    message = try_step(start(disk, "source", checksum=True))
    assert "checksum mismatch" in message or (isinstance(effect, Torn) and message == "")


@by_place
@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_disk_that_hangs_with_what_is_written_from_where_it_is(
    start: Callable[..., Step], operation: Operation, number: int
) -> None:
    """A release waits for the disk there: the tensor must not change while the disk reads from it."""
    disk = FaultyDisk(Fault(operation, number, Hang()))
    step = start(disk, "source")
    if operation == "write":
        with pytest.raises(StalledDiskError, match=r"no transfer has finished for 2.0 s while "):
            step.forward_to_disk()
    else:
        assert "no transfer has finished for 2.0 s while " in step.lose(step.forward_to_disk())
    disk.let_go()
    gc.collect()
    step.run()
    step.check_nothing_is_left()


@pytest.mark.parametrize("call", range(1, 9))
def test_an_exception_while_tensors_are_written_from_where_they_are(start: Callable[..., Step], call: int) -> None:
    """In forward (calls 1 to 3) or in backward, with transfers in flight."""
    late = Late(0.001)
    step = start(FaultyDisk(Fault("write", None, late), Fault("read", None, late)), "source")
    with failing_at(call):
        step.forward().backward()
    step.check_nothing_is_left()
    for weight in step.weights:
        weight.grad = None
    step.run()
    step.check_nothing_is_left()


# -- slow and hanging --------------------------------------------------------------------------------------------------


@by_lane
def test_a_slow_disk(start: Callable[..., Step], lane: LaneKind) -> None:
    """Ten times slower than memory is in this test; transfers are in flight throughout the step."""
    disk = FaultyDisk(Fault("write", None, Late(0.004)), Fault("read", None, Late(0.004)))
    step = start(disk, lane, host_budget_bytes=1)
    for _ in range(2):
        step.forward().backward()
        step.check_gradients()
    step.check_nothing_is_left()


@by_lane
@by_place
def test_a_disk_that_hangs_in_backward(start: Callable[..., Step], lane: LaneKind, number: int) -> None:
    disk = FaultyDisk(Fault("read", number, Hang()))
    step = start(disk, lane)
    message = step.lose(step.forward_to_disk())
    assert "no transfer has finished for 2.0 s while " in message
    assert "being reloaded; free staging buffers, cpu: " in message
    disk.let_go()
    step.run()
    step.check_nothing_is_left()


@by_lane
@by_place
def test_a_disk_that_hangs_in_forward(start: Callable[..., Step], lane: LaneKind, number: int) -> None:
    """The smallest staging, so that a release has to wait for the writes."""
    disk = FaultyDisk(*(Fault("write", later, Hang()) for later in range(number, CHUNKS)))
    step = start(disk, lane, host_budget_bytes=1)
    with pytest.raises(
        StalledDiskError, match=r"no transfer has finished for 2.0 s while .*; chunks: \d+ to be copied"
    ):
        step.forward_to_disk()
    disk.let_go()
    gc.collect()
    step.run()
    step.check_nothing_is_left()


# -- the user's own exceptions -----------------------------------------------------------------------------------------


class UserError(Exception):
    """An exception that the caller's code raises."""


@contextlib.contextmanager
def failing_at(call: int) -> Iterator[None]:
    """Let the matrix product number ``call`` raise, so that the step fails."""
    calls = itertools.count(1)
    run_node = fx.Interpreter.run_node

    def run_or_fail(interpreter: fx.Interpreter, node: fx.Node) -> Any:
        if node.target is torch.ops.aten.mm.default and next(calls) == call:
            raise UserError
        return run_node(interpreter, node)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fx.Interpreter, "run_node", run_or_fail)
        with pytest.raises(UserError):
            yield


@by_lane
@pytest.mark.parametrize("call", range(1, 4))
def test_an_exception_in_forward(start: Callable[..., Step], lane: LaneKind, call: int) -> None:
    """With writes in flight."""
    step = start(FaultyDisk(Fault("write", None, Late(0.001))), lane)
    with failing_at(call):
        step.forward()
    step.check_nothing_is_left()
    step.run()
    step.check_nothing_is_left()


@by_lane
@pytest.mark.parametrize("call", range(1, 6))
def test_an_exception_in_backward(start: Callable[..., Step], lane: LaneKind, call: int) -> None:
    """With reads in flight."""
    step = start(FaultyDisk(Fault("read", None, Late(0.001))), lane)
    loss = step.forward_to_disk()
    with failing_at(call):
        loss.backward()
    assert all(weight.grad is None for weight in step.weights)
    del loss
    step.check_nothing_is_left()
    step.run()
    step.check_nothing_is_left()


@by_lane
@pytest.mark.parametrize("kind", ["hook of the loss", "hook of a weight", "hook after accumulation", "hook of saving"])
def test_an_exception_in_a_hook(start: Callable[..., Step], lane: LaneKind, kind: str) -> None:
    def fail(*arguments: Any) -> None:
        raise UserError

    step = start(FaultyDisk(), lane)
    weight = step.weights[1]
    if kind == "hook of saving":
        with pytest.raises(UserError), torch.autograd.graph.saved_tensors_hooks(fail, lambda packed: packed):
            step.forward()
    else:
        loss = step.forward_to_disk()
        if kind == "hook of the loss":
            handle = loss.register_hook(fail)
        elif kind == "hook of a weight":
            handle = weight.register_hook(fail)
        else:
            handle = weight.register_post_accumulate_grad_hook(fail)
        with pytest.raises(UserError):
            loss.backward()
        handle.remove()
        del loss
        for weight in step.weights:
            weight.grad = None
    step.check_nothing_is_left()
    step.run()
    step.check_nothing_is_left()
