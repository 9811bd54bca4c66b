"""Each wait for an event, each reference that is held and each buffer that is kept, on the simulated device.

A test holds one stream, lets everything else go as far as it can (``sim.settle``), and compares bytes. So what is not
waited for has certainly happened too early.
"""

from __future__ import annotations

import contextlib
import gc
import time
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from device_under_test import DEVICE, TYPE, gpu
from runtime_fakes import MemoryFile
from torch import Tensor

from ssdtrain_fx.errors import ActivationLostError, ConfigError, InternalError
from ssdtrain_fx.runtime.alignment import ALIGNMENT_BYTES
from ssdtrain_fx.runtime.book.admission import BALANCE_LIMIT_S
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.open_lanes import Parts

if TYPE_CHECKING:
    from simulated_device import Simulator

COUNT = 1024
BYTES = COUNT * 4


class _Setup:
    """An engine with chunks of 4096 bytes on a file in memory."""

    def __init__(self, engine: Engine, file: MemoryFile) -> None:
        self.engine = engine
        self.file = file
        self.lane: Any = engine._lanes.of(TYPE)
        streams = self.lane.mover._side_streams(DEVICE)
        self.out: torch.Stream = streams.out
        self.back: torch.Stream = streams.back
        with engine._ledger.lock:
            workers = self.lane._workers
            workers.start()
        # A thread that starts takes a copy that the training thread would begin otherwise.
        until(lambda: len(workers._work._waiters) == workers.count)

    def on_disk(self, value: float) -> Any:
        """The owner of a tensor of 4096 bytes that is in the file and nowhere else."""
        x = full(value)
        owner = self.engine.offload(x, f"x{value}")
        self.engine.release(owner, x)
        del x
        self.engine.wait_until_idle()
        gpu.synchronize()
        return owner

    def fetch(self, owner: Any) -> Tensor:
        y = self.engine.reload(owner, (COUNT,))
        self.engine.wait(y, owner)
        return y

    def issued(self, owner: Any, timeout_s: float = 20) -> bool:
        """Wait until the copies of all reloads of ``owner`` are enqueued."""
        entry = self.engine.find_entry(owner)
        assert entry is not None
        return comes_true(lambda: not any(fill.unissued for fill in tuple(entry.fills.values())), timeout_s)


@contextlib.contextmanager
def setup(ssd_dir: str, *, file: MemoryFile | None = None, buffers: int = 64, **options: Any) -> Iterator[_Setup]:
    file = file or MemoryFile()
    config = EngineConfig(ssd_dir=ssd_dir, io="posix", host_budget_bytes=buffers * BYTES, **options)
    with Engine(config, Parts(open_file=lambda _: file, chunk_bytes=BYTES)) as engine:
        try:
            yield _Setup(engine, file)
        finally:  # otherwise the engine could not close after a failed assertion
            file.writes_may_go_on.set()
            file.reads_may_go_on.set()


def comes_true(condition: Callable[[], bool], timeout_s: float = 20) -> bool:
    """Whether a thread of the engine makes ``condition`` true."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.001)
    return True


def until(condition: Callable[[], bool]) -> None:
    """Return when a thread of the engine has made ``condition`` true."""
    assert comes_true(condition)


def full(value: float) -> Tensor:
    return torch.full((COUNT,), value, device=TYPE)


def values(x: Tensor) -> set[float]:
    return set(x.cpu().tolist())


def test_a_copy_out_starts_after_the_kernel_that_computes_the_tensor(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        with sim.hold():
            x = full(3.0)
            owner = s.engine.offload(x, "x")
            sim.settle()
        s.engine.release(owner, x)
        assert values(s.fetch(owner)) == {3.0}


def test_the_memory_of_a_released_tensor_is_overwritten_after_the_copy(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        x = full(3.0)
        gpu.synchronize()
        with sim.hold(s.out):
            owner = s.engine.offload(x, "x")
            s.engine.release(owner, x)
            address = x.data_ptr()
            del x
            y = full(5.0)
            assert y.data_ptr() == address
            sim.settle()
        assert values(s.fetch(owner)) == {3.0}
        assert values(y) == {5.0}


def test_a_tensor_that_is_released_late_is_held_until_the_copy_is_over(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        x = full(3.0)
        gpu.synchronize()
        with sim.hold(s.out):
            owner = s.engine.offload(x, "x")
            s.engine.release(owner, x, deferred=True, exclusive=True)
            del x
            y = full(5.0)
            sim.settle()
        assert values(s.fetch(owner)) == {3.0}
        assert values(y) == {5.0}


def test_nothing_is_written_before_the_copy_is_over(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        x = full(3.0)
        gpu.synchronize()
        with sim.hold(s.out):
            owner = s.engine.offload(x, "x")
            s.engine.release(owner, x)
            assert not s.file.write_begun.acquire(timeout=0.3)
        s.engine.wait_until_idle()
        assert values(s.fetch(owner)) == {3.0}


@pytest.mark.parametrize("place", ["file", "staging", "memory"])
def test_a_reload_writes_after_what_was_enqueued_before_it(sim: Simulator, ssd_dir: str, place: str) -> None:
    """A kernel still reads memory that has been freed, and the reload gets this memory."""
    file = MemoryFile()
    if place == "memory":
        file.write_error = lambda index: OSError(28, "no space")
    with setup(ssd_dir, file=file) as s:
        if place == "staging":
            file.writes_may_go_on.clear()
            x = full(3.0)
            owner = s.engine.offload(x, "x")
            s.engine.release(owner, x)
            del x
            gpu.synchronize()
        elif place == "memory":
            owner = s.on_disk(3.0)
        else:
            owner = s.on_disk(3.0)
        used = full(7.0)
        gpu.synchronize()
        with sim.hold():
            read = used.clone()
            address = used.data_ptr()
            del used
            y = s.engine.reload(owner, (COUNT,))
            assert y.data_ptr() == address
            assert s.issued(owner, 0.3 if place == "memory" else 20) == (place != "memory")
            sim.settle()
        s.engine.wait(y, owner)
        assert values(read) == {7.0}
        assert values(y) == {3.0}


def test_kernels_that_follow_wait_see_the_reloaded_bytes(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        owner = s.on_disk(3.0)
        with sim.hold(s.back):
            y = s.fetch(owner)
            read = y.clone()
            sim.settle()
        assert values(read) == {3.0}


def test_bytes_that_were_kept_in_memory_are_on_the_device_after_wait(sim: Simulator, ssd_dir: str) -> None:
    file = MemoryFile()
    file.write_error = lambda index: OSError(28, "no space")
    sim.configure(side_us=20_000)
    with setup(ssd_dir, file=file) as s:
        owner = s.on_disk(3.0)
        for _ in range(5):
            y = s.fetch(owner)
            read = y.clone()
            del y
            assert values(read) == {3.0}


def test_bytes_are_forwarded_from_staging_after_they_have_arrived_there(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        x = full(3.0)
        gpu.synchronize()
        with sim.hold(s.out):
            owner = s.engine.offload(x, "x")
            s.engine.release(owner, x, deferred=True, exclusive=True)
            y = s.engine.reload(owner, (COUNT,))
            assert s.issued(owner)
            sim.settle()
        s.engine.wait(y, owner)
        assert values(y) == {3.0}


def test_a_staging_buffer_is_reused_after_the_copy_to_the_device(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir, buffers=3) as s:
        owners = [s.on_disk(3.0), s.on_disk(4.0)]
        with sim.hold(s.back):
            first = s.engine.reload(owners[0], (COUNT,))
            assert s.issued(owners[0])
            second = s.engine.reload(owners[1], (COUNT,))
            assert s.issued(owners[1])
            sim.settle()
        for y, owner in zip((first, second), owners, strict=True):
            s.engine.wait(y, owner)
        assert (values(first), values(second)) == ({3.0}, {4.0})


@pytest.mark.parametrize("waited", [False, True])
def test_a_reloaded_tensor_that_is_dropped_is_not_overwritten_late(sim: Simulator, ssd_dir: str, waited: bool) -> None:
    """Backward raises after the reload: the next owner of the memory must not get the old bytes."""
    with setup(ssd_dir) as s:
        owner = s.on_disk(3.0)
        with sim.hold(s.back):
            y = s.engine.reload(owner, (COUNT,))
            assert s.issued(owner)
            if waited:
                s.engine.wait(y, owner)
            del owner, y
            gc.collect()
            s.engine.statistics()  # notes that the owner has died
            z = full(7.0)
            sim.settle()
        gpu.synchronize()
        assert values(z) == {7.0}


def test_a_reload_in_another_layout_reads_the_stored_bytes_after_they_have_arrived(
    sim: Simulator, ssd_dir: str
) -> None:
    with setup(ssd_dir) as s:
        x = torch.arange(COUNT, dtype=torch.float32, device=TYPE).view(32, 32)
        owner = s.engine.offload(x, "x")
        s.engine.release(owner, x)
        s.engine.wait_until_idle()
        with sim.hold(s.back):
            y = s.engine.reload(owner, (32, 32), (1, 32))
            s.engine.wait(y, owner)
            sim.settle()
        assert y.stride() == (1, 32)
        assert torch.equal(y.cpu(), x.cpu())


def test_the_training_thread_does_not_wait_for_the_device(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        sim.take_counts()
        with sim.hold():
            x = full(3.0)
            owner = s.engine.offload(x, "x")
            s.engine.release(owner, x)
            y = s.engine.reload(owner, (COUNT,))
            s.engine.wait(y, owner)
            z = y + 1
        assert sim.take_counts().syncs_of_training() == {}
        assert values(z) == {4.0}


def test_memory_is_pinned_once_and_given_back_at_close(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        for value in (1.0, 2.0, 3.0):
            assert values(s.fetch(s.on_disk(value))) == {value}
        pool = s.lane.pool
        found = [buffer.pinned for buffer in pool._all if buffer.pinned is not None]
        addresses = [pinned.data_ptr() for pinned in found]
        assert found
        assert all(pinned.is_pinned() for pinned in found)
        del found
    assert not any(sim.is_pinned(address) for address in addresses)


def test_pinned_memory_is_aligned_for_direct_io(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        s.on_disk(1.0)
        addresses = [buffer.pinned.data_ptr() for buffer in s.lane.pool._all if buffer.pinned is not None]
        assert addresses
        assert [address % ALIGNMENT_BYTES for address in addresses] == [0] * len(addresses)


def test_staging_is_on_the_host_whatever_the_default_device_is(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        torch.set_default_device(DEVICE)
        try:
            x = full(3.0)
            owner = s.engine.offload(x, "x")
            s.engine.release(owner, x)
            assert values(s.fetch(owner)) == {3.0}
            found = [buffer.pinned.device.type for buffer in s.lane.pool._all if buffer.pinned is not None]
        finally:
            torch.set_default_device(None)
        assert found
        assert set(found) == {"cpu"}


def _is_inherited(address: int) -> bool:
    """Whether a forked process gets the page at ``address``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *_ = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return "dc" not in line.split()
    return True


def test_a_forked_process_does_not_inherit_staging_until_it_is_given_back(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        s.on_disk(1.0)
        addresses = [buffer.pinned.data_ptr() for buffer in s.lane.pool._all if buffer.pinned is not None]
        assert addresses
        assert not any(map(_is_inherited, addresses))
    assert all(map(_is_inherited, addresses))


def test_memory_that_cannot_be_pinned_is_an_error_that_says_what_to_do(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s, sim.refuse_pinning():
        x = full(1.0)
        owner = s.engine.offload(x, "x")
        with pytest.raises(ConfigError, match="cannot pin 4096 bytes"):
            s.engine.release(owner, x)


@pytest.mark.parametrize("when", ["offload", "reload"])
def test_a_failure_of_the_device_reaches_the_training_thread(sim: Simulator, ssd_dir: str, when: str) -> None:
    with setup(ssd_dir) as s:
        x = full(3.0)
        if when == "offload":
            sim.fail_next(s.out)
        owner = s.engine.offload(x, "x")
        with contextlib.suppress(InternalError, torch.AcceleratorError):
            s.engine.release(owner, x)
            s.engine.wait_until_idle()
            if when == "reload":
                sim.fail_next(s.back)
                s.fetch(owner)
                s.engine.wait_until_idle()
        # On a GPU, any call of torch may be the first to report it.
        with pytest.raises((InternalError, torch.AcceleratorError), match="device-side assert"):
            s.fetch(owner)
        sim.repair()


def test_the_host_tier_gives_back_the_same_bytes_held_demoted_and_read_ahead(sim: Simulator, ssd_dir: str) -> None:
    sim.configure(seed=3, default_us=300, side_us=300)
    with setup(ssd_dir, buffers=12) as s:
        owners = []
        for order in range(24):
            x = full(float(order))
            owner = s.engine.offload(x, f"x{order}", host=True, reload_order=order)
            s.engine.release(owner, x)
            owners.append(owner)
            del x
        for order, owner in enumerate(owners):
            y = s.fetch(owner)
            read = y.clone()
            del y
            owners[order] = None
            assert values(read) == {float(order)}
        statistics = s.engine.statistics()
        assert statistics.host_bytes > 0
        assert statistics.demoted_bytes > 0


def test_a_held_chunk_is_overwritten_after_it_was_copied_back(sim: Simulator, ssd_dir: str) -> None:
    """The last token of a held tensor dies while its bytes are on the way to the device."""
    with setup(ssd_dir, buffers=3) as s:
        x = full(3.0)
        owner = s.engine.offload(x, "x", host=True)
        s.engine.release(owner, x)
        gpu.synchronize()
        s.engine.wait_until_idle()
        with sim.hold(s.back):
            y = s.engine.reload(owner, (COUNT,))
            s.engine.wait(y, owner)
            read = y.clone()
            del owner, y
            gc.collect()
            others = [full(5.0), full(6.0)]
            kept = [s.engine.offload(other, f"o{i}") for i, other in enumerate(others)]
            sim.settle()
        assert values(read) == {3.0}
        del kept


def test_a_tensor_that_stayed_is_aligned_as_kernels_take_for_granted(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir, buffers=2, max_stall_share=0.0) as s:
        s.engine._ledger.admission.charge(BALANCE_LIMIT_S)
        x = torch.full((3 * COUNT + 1,), 3.0, device=TYPE)[1:]
        assert x.data_ptr() % 16 != 0
        gpu.synchronize()
        with sim.hold(s.out):  # there is no buffer for the last chunk
            owner = s.engine.offload(x, "x")
            s.engine.release(owner, x, exclusive=True)
        assert s.engine.statistics().kept_for_time_bytes == x.nbytes
        del x
        y = s.engine.reload(owner, (3 * COUNT,))
        s.engine.wait(y, owner)
        assert y.data_ptr() % 16 == 0
        assert values(y) == {3.0}


def test_a_closed_engine_has_finished_with_the_device(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        x = full(3.0)
        sim.configure(side_us=50_000)
        owner = s.engine.offload(x, "x")
        s.engine.release(owner, x)
    gpu.synchronize()
    with pytest.raises(ActivationLostError, match="closed"):
        s.fetch(owner)


def test_copies_run_on_side_streams_and_delay_no_kernel(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        x = full(3.0)
        gpu.synchronize()
        with sim.hold(s.out):
            owner = s.engine.offload(x, "x")
            y = x + 1
            gpu.current_stream().synchronize()
            entry = s.engine.find_entry(owner)
            assert entry is not None
            buffer = entry.chunks[0].staging
            assert buffer is not None
            sim.settle()
            assert bytes(buffer.view) != sim.peek(x)
        s.engine.release(owner, x)
        s.engine.wait_until_idle()
        with sim.hold(s.back):
            z = s.engine.reload(owner, (COUNT,))
            assert s.issued(owner)
            sim.settle()
            assert sim.peek(z) != sim.peek(x)
        assert values(y) == {4.0}
        s.engine.wait(z, owner)


def test_a_tensor_that_leaves_late_is_held_and_forwarded_in_order(sim: Simulator, ssd_dir: str) -> None:
    """All staging buffers are in use, so the copy begins after the tensor was released and requested again."""
    with setup(ssd_dir, buffers=3) as s:
        s.file.writes_may_go_on.clear()
        others = [full(5.0), full(6.0)]
        owners = [s.engine.offload(other, f"o{number}") for number, other in enumerate(others)]
        x = full(3.0)
        gpu.synchronize()
        owner = s.engine.offload(x, "x")
        s.engine.release(owner, x, deferred=True, exclusive=True)
        entry = s.engine.find_entry(owner)
        assert entry is not None
        assert entry.uncopied == 1
        address = x.data_ptr()
        del x
        y = s.engine.reload(owner, (COUNT,))
        gpu.synchronize()
        with sim.hold(s.out):
            s.file.writes_may_go_on.set()
            assert s.issued(owner)
            z = full(7.0)
            assert z.data_ptr() != address
            sim.settle()
        s.engine.wait(y, owner)
        assert (values(y), values(z)) == ({3.0}, {7.0})
        for kept, other in zip(owners, others, strict=True):
            s.engine.release(kept, other)


def test_a_staging_buffer_that_was_written_is_kept_for_the_copy_to_the_device(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir, buffers=3) as s:
        s.file.writes_may_go_on.clear()
        x = full(3.0)
        owner = s.engine.offload(x, "x")
        s.engine.release(owner, x)
        gpu.synchronize()
        with sim.hold(s.back):
            y = s.engine.reload(owner, (COUNT,))
            assert s.issued(owner)
            s.file.writes_may_go_on.set()
            counters = s.engine._ledger.counters
            until(lambda: counters.unwritten_bytes == 0)
            others = [full(5.0), full(6.0)]
            owners = [s.engine.offload(other, f"o{number}") for number, other in enumerate(others)]
            sim.settle()
        s.engine.wait(y, owner)
        assert values(y) == {3.0}
        del owners


def test_a_dense_copy_of_a_tensor_with_gaps_is_complete_before_it_leaves(sim: Simulator, ssd_dir: str) -> None:
    sim.configure(default_us=20_000)
    with setup(ssd_dir) as s:
        for value in range(1, 6):
            x = torch.full((32, 64), float(value), device=TYPE)[:, :16]
            gpu.synchronize()
            owner = s.engine.offload(x, f"x{value}")
            s.engine.release(owner, x)
            y = s.engine.reload(owner, (32, 16))
            s.engine.wait(y, owner)
            assert set(y.cpu().flatten().tolist()) == {float(value)}


def test_every_staging_buffer_comes_back(sim: Simulator, ssd_dir: str) -> None:
    """After writes, cancelled writes, reads, forwards, reads ahead, failed reads, and what the host tier held."""
    sim.configure(side_us=300)
    file = MemoryFile()
    with setup(ssd_dir, file=file, buffers=12, io_timeout_s=10.0) as s:
        for host in (False, True):
            for dropped in (False, True):
                owners: list[Any] = []
                file.writes_may_go_on.clear() if dropped and not host else None
                for order in range(16 if host or not dropped else 8):
                    x = full(float(order))
                    owner = s.engine.offload(x, f"x{order}", host=host, reload_order=order)
                    s.engine.release(owner, x)
                    owners.append(owner)
                    del x, owner
                for order, owner in enumerate([] if dropped else owners):
                    assert values(s.fetch(owner)) == {float(order)}
                    s.engine.wait_until_idle()
                owner = None
                del owners, owner
                gc.collect()
                s.engine.statistics()
                file.writes_may_go_on.set()
                s.engine.wait_until_idle()
                gpu.synchronize()
                s.engine.wait_until_idle()
                until(lambda: s.lane.pool.used_bytes == 0)
        owners = [s.engine.offload(full(float(order)), f"y{order}", reload_order=order) for order in range(8)]
        s.engine.wait_until_idle()
        assert values(s.fetch(owners[0])) == {0.0}
        s.engine.wait_until_idle()
        assert s.lane.pool.used_bytes > 0  # read ahead
        owners.clear()
        s.engine.statistics()
        until(lambda: s.lane.pool.used_bytes == 0)
        owner = s.on_disk(3.0)
        file.read_error = lambda index: OSError(5, "broken")
        with pytest.raises(ActivationLostError):
            s.fetch(owner)
        until(lambda: s.lane.pool.used_bytes == 0)


def _chain(s: _Setup) -> tuple[Any, list[Any]]:
    """The owner of a tensor of graph a, and those of two tensors of the next graph, b. All are in the file."""
    owners = []
    for name, graph in (("a0", "a"), ("b0", "b"), ("b1", "b")):
        x = full(3.0 + len(owners))
        owner = s.engine.offload(x, name, graph_name=graph)
        s.engine.release(owner, x)
        owners.append(owner)
        del x
    s.engine.wait_until_idle()
    gpu.synchronize()
    return owners[0], owners[1:]


def test_a_reload_that_is_begun_ahead_writes_after_what_was_enqueued_before_it(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        first, (b0, b1) = _chain(s)
        kept = [s.fetch(b0), s.engine.reload(b1, (COUNT,))]
        used = full(7.0)
        gpu.synchronize()
        with sim.hold():
            read = used.clone()
            address = used.data_ptr()
            del used
            s.engine.wait(kept[1], b1)
            entry = s.engine.find_entry(first)
            assert entry is not None
            assert entry.ahead is not None
            assert entry.ahead.tensor.data_ptr() == address
            fill = entry.ahead.fill
            assert comes_true(lambda: fill.unissued == 0, 20)
            sim.settle()
        y = s.engine.reload(first, (COUNT,))
        assert y.data_ptr() == address
        s.engine.wait(y, first)
        assert (values(read), values(y)) == ({7.0}, {3.0})


def test_a_reload_that_was_begun_ahead_for_another_stream_is_not_used(sim: Simulator, ssd_dir: str) -> None:
    """Its memory would be reused by the stream that it was allocated for, while the other one still reads it."""
    with setup(ssd_dir) as s:
        first, (b0, b1) = _chain(s)
        kept = [s.fetch(b0), s.fetch(b1)]
        entry = s.engine.find_entry(first)
        assert entry is not None
        assert entry.ahead is not None
        side = gpu.Stream(device=DEVICE)
        with gpu.stream(side):
            y = s.engine.reload(first, (COUNT,))
            s.engine.wait(y, first)
        gpu.synchronize()
        s.engine.wait_until_idle()
        with sim.hold(side):
            with gpu.stream(side):
                read = y.clone()
            del y
            z = [full(9.0) for _ in range(4)]
            sim.settle()
        side.synchronize()
        assert values(read) == {3.0}
        del z, kept


def test_a_copy_whose_caller_was_interrupted_ends_before_its_buffer_is_freed(sim: Simulator, ssd_dir: str) -> None:
    """The exception comes when the copy has been enqueued and nobody knows of it yet."""
    engine = Engine(EngineConfig(ssd_dir=ssd_dir, io="posix"), Parts(open_file=lambda _: MemoryFile()))
    mover: Any = engine._lanes.of(TYPE).mover
    record = mover._record

    def interrupt(stream: Any) -> Any:
        if stream == mover._side_streams(DEVICE).out:
            raise MemoryError
        return record(stream)

    with sim.hold():
        x = full(3.0)
        with unittest.mock.patch.object(mover, "_record", interrupt):
            with contextlib.suppress(MemoryError):  # where a thread of the engine makes the copy, it has it
                engine.offload(x, "x")
            assert comes_true(lambda: engine.has_failed)
        engine.close(timeout_s=0.3)
        assert not engine.is_gone
    engine.close()
    assert engine.is_gone
    gpu.synchronize()


class _DirectDrive:
    """KvikIO over a drive that reads and writes device memory at once, whatever the streams do."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.data = bytearray(1 << 20)
        self.writes = 0

    def CuFile(self, path: str, mode: str) -> _DirectDrive:
        return self

    def pwrite(self, data: Tensor, *, size: int, file_offset: int, task_size: int) -> Any:
        self.data[file_offset : file_offset + size] = self.sim.peek(data)
        self.writes += 1
        return _Future(size)

    def pread(self, data: Tensor, *, size: int, file_offset: int, task_size: int) -> Any:
        self.sim.poke(data, bytes(self.data[file_offset : file_offset + size]))
        return _Future(size)

    def close(self) -> None:
        pass


class _Future:
    def __init__(self, size: int) -> None:
        self._size = size

    def get(self) -> int:
        return self._size


@contextlib.contextmanager
def direct(sim: Simulator, ssd_dir: str) -> Iterator[Engine]:
    from ssdtrain_fx.runtime.lanes.threads.kvikio_choice import Kvikio

    drive = Kvikio(_DirectDrive(sim), gds=True)
    config = EngineConfig(ssd_dir=ssd_dir)
    with Engine(config, Parts(open_file=lambda _: MemoryFile(), choose_kvikio=lambda *_: drive)) as engine:
        yield engine


@pytest.mark.only_cuda
def test_a_direct_write_starts_after_the_kernel_that_computes_the_tensor(sim: Simulator, ssd_dir: str) -> None:
    with direct(sim, ssd_dir) as engine:
        with sim.hold():
            x = full(3.0)
            owner = engine.offload(x, "x")
            entry = engine.find_entry(owner)
            assert entry is not None
            assert not comes_true(lambda: entry.uncopied == 0, 0.3)
        engine.release(owner, x)
        y = engine.reload(owner, (COUNT,))
        engine.wait(y, owner)
        assert values(y) == {3.0}


@pytest.mark.only_cuda
def test_a_direct_read_starts_after_what_was_enqueued_before_the_reload(sim: Simulator, ssd_dir: str) -> None:
    with direct(sim, ssd_dir) as engine:
        x = full(3.0)
        owner = engine.offload(x, "x")
        engine.release(owner, x)
        engine.wait_until_idle()
        used = full(7.0)
        gpu.synchronize()
        with sim.hold():
            read = used.clone()
            address = used.data_ptr()
            del used
            y = engine.reload(owner, (COUNT,))
            assert y.data_ptr() == address
            entry = engine.find_entry(owner)
            assert entry is not None
            (fill,) = entry.fills.values()
            assert not comes_true(lambda: fill.unissued == 0, 0.3)
        engine.wait(y, owner)
        assert (values(read), values(y)) == ({7.0}, {3.0})


@pytest.mark.only_cuda
def test_a_direct_write_is_over_before_the_memory_is_reused(sim: Simulator, ssd_dir: str) -> None:
    with direct(sim, ssd_dir) as engine:
        sim.configure(default_us=2000)
        owners = []
        for value in range(8):
            x = full(float(value))
            owner = engine.offload(x, f"x{value}")
            engine.release(owner, x)
            owners.append(owner)
            del x
        for value, owner in enumerate(owners):
            y = engine.reload(owner, (COUNT,))
            engine.wait(y, owner)
            assert values(y) == {float(value)}


def test_all_chunks_of_a_released_tensor_are_copied_before_it_is_overwritten(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        x = torch.full((4 * COUNT,), 3.0, device=TYPE)
        gpu.synchronize()
        sim.configure(side_us=20_000)
        owner = s.engine.offload(x, "x")
        s.engine.release(owner, x)
        del x
        y = torch.full((4 * COUNT,), 5.0, device=TYPE)
        gpu.current_stream().synchronize()
        z = s.engine.reload(owner, (4 * COUNT,))
        s.engine.wait(z, owner)
        assert (values(z), values(y)) == ({3.0}, {5.0})


def test_all_chunks_of_a_tensor_have_arrived_after_wait(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        x = torch.full((4 * COUNT,), 3.0, device=TYPE)
        owner = s.engine.offload(x, "x")
        s.engine.release(owner, x)
        s.engine.wait_until_idle()
        sim.configure(side_us=20_000)
        y = s.engine.reload(owner, (4 * COUNT,))
        s.engine.wait(y, owner)
        assert values(y) == {3.0}


def test_a_tensor_that_dies_on_its_way_is_not_held(sim: Simulator, ssd_dir: str) -> None:
    with setup(ssd_dir) as s:
        x = full(3.0)
        gpu.synchronize()
        with sim.hold(s.out):
            owner = s.engine.offload(x, "x", host=True)
            s.engine.release(owner, x)
            del owner
            gc.collect()
            s.engine.statistics()
        until(lambda: s.lane.pool.used_bytes == 0)


def test_close_waits_for_the_copies_that_the_device_still_makes(sim: Simulator, ssd_dir: str) -> None:
    """Otherwise the buffer is unregistered, and its memory returned, under the copy."""
    with setup(ssd_dir) as s:
        x = full(3.0)
        gpu.synchronize()
        sim.configure(side_us=300_000)
        owners = [s.engine.offload(x, f"x{number}") for number in range(4)]
    gpu.synchronize()
    del owners
