"""Tensors that native AIO writes without staging: whole pages go to the file, the edges stay, nothing is lost."""

from __future__ import annotations

import errno
import gc
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from faulty_disk import Fault, FaultyDisk, Hang
from runtime_fakes import FakeAio, MemoryFile, fetch, offload
from torch import Tensor

from ssdtrain_fx.errors import ActivationLostError, StalledDiskError
from ssdtrain_fx.runtime.book.admission import BALANCE_LIMIT_S
from ssdtrain_fx.runtime.book.traffic import Direction
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.aio.aio_lane import FROM_SOURCE_BYTES
from ssdtrain_fx.runtime.lanes.open_lanes import Parts

PAGE = 4096


@pytest.fixture
def file() -> MemoryFile:
    file = MemoryFile()
    file.direct = True
    file.aio = FakeAio(file)
    return file


def engine_on(file: MemoryFile, **options: object) -> Engine:
    """An engine that writes every tensor with a whole page in it without staging, in chunks of two pages."""
    return Engine(
        EngineConfig(ssd_dir="/tmp", **options),
        Parts(open_file=lambda _: file, open_aio=lambda: file.aio, chunk_bytes=2 * PAGE, from_source_bytes=1),
    )


def tensor_at(phase_bytes: int, byte_count: int) -> Tensor:
    """A tensor that begins ``phase_bytes`` after the start of a page."""
    memory = torch.arange(byte_count + 2 * PAGE, dtype=torch.int64).to(torch.uint8)
    start = (phase_bytes - memory.data_ptr()) % PAGE
    return memory[start : start + byte_count]


@pytest.mark.parametrize("byte_count", [2 * PAGE, 2 * PAGE + 1, 4 * PAGE - 1, 4 * PAGE, 5 * PAGE + 77])
@pytest.mark.parametrize("phase", [0, 1, 64, PAGE - 64, PAGE - 1])
@pytest.mark.parametrize("checksum", [False, True])
def test_every_byte_comes_back(file: MemoryFile, phase: int, byte_count: int, checksum: bool) -> None:
    x = tensor_at(phase, byte_count)
    original = x.clone()
    with engine_on(file, checksum=checksum) as engine:
        token = offload(engine, x)  # which overwrites it
        engine.wait_until_idle()
        statistics = engine.statistics()
        assert statistics.bytes_written == byte_count
        assert statistics.staging_bytes == 0
        y = fetch(engine, token, original)
        assert torch.equal(y, original)
        assert y.data_ptr() % PAGE == phase
        pages = (phase + byte_count) // PAGE - (phase > 0)
        assert sum(length for verb, _, length in file.aio.submitted if verb == 1) == pages * PAGE


def test_a_large_tensor_takes_few_requests(file: MemoryFile) -> None:
    """Its requests are of 16 MiB; a small tensor uses a staging buffer of 2 MiB."""
    with Engine(EngineConfig(ssd_dir="/tmp"), Parts(open_file=lambda _: file, open_aio=lambda: file.aio)) as engine:
        tensors = tensor_at(0, (20 << 20) + PAGE), tensor_at(0, PAGE)
        large, small = (x.clone() for x in tensors)
        tokens = [offload(engine, x) for x in tensors]
        engine.wait_until_idle()
        assert [length for _, _, length in file.aio.submitted] == [16 << 20, (4 << 20) + PAGE, PAGE]
        assert engine.statistics().staging_bytes == 2 << 20
        assert torch.equal(fetch(engine, tokens[0], large), large)
        assert torch.equal(fetch(engine, tokens[1], small), small)


def test_the_kernel_is_asked_only_for_what_is_needed(file: MemoryFile, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    reap = file.aio.reap

    def count(timeout_s: float) -> None:
        nonlocal asked
        asked += 1
        reap(timeout_s)

    monkeypatch.setattr(file.aio, "reap", count)
    with engine_on(file) as engine:
        tensors = [tensor_at(64, 3 * PAGE) for _ in range(3)]
        tokens = [engine.offload(x, "x") for x in tensors]
        assert asked == 2, "once each, if there is something in flight"
        tokens = [engine.release(token, x) for token, x in zip(tokens, tensors, strict=True)]
        asked_for_release, asked = asked - 2, 0
        assert asked_for_release > 0
        reloaded = [engine.reload(token, (3 * PAGE,), (1,), torch.uint8, torch.device("cpu")) for token in tokens]
        assert asked == 2
        for y, token, x in zip(reloaded, tokens, tensors, strict=True):
            engine.wait(y, token)
            assert torch.equal(x, y)
        assert asked > 0


def test_a_write_that_is_over_holds_nothing_up(file: MemoryFile) -> None:
    """Its answer is not collected yet when the next tensor would have to stay because of a predicted stall."""
    with engine_on(file, max_stall_share=0.1) as engine:
        x, y = tensor_at(0, 2 * PAGE), tensor_at(0, 2 * PAGE)
        tokens = [engine.offload(x, "x", out_s=1.5, back_s=9.0)]
        engine._ledger.traffic.meters[Direction.WRITE].note(2 * PAGE, 1.0, busy=True)
        engine._ledger.admission.charge(BALANCE_LIMIT_S)
        while file.aio.in_flight:
            time.sleep(0.001)
        tokens.append(engine.offload(y, "y", out_s=1.5, back_s=9.0))  # it would take 2 s if x were still in flight
        assert engine.statistics().kept_for_time == 0
        for token, tensor in zip(tokens, (x, y), strict=True):
            assert torch.equal(fetch(engine, engine.release(token, tensor), tensor), tensor)


@pytest.mark.parametrize("stride", [(1, 96), (96, 1)])
def test_layouts(file: MemoryFile, stride: tuple[int, int]) -> None:
    x = torch.randn(96, 96)
    with engine_on(file) as engine:
        token = offload(engine, x.clone())
        engine.wait_until_idle()
        y = engine.reload(token, (96, 96), stride, torch.float32, torch.device("cpu"))
        engine.wait(y, token)
        assert y.stride() == stride
        assert torch.equal(y, x)


def test_release_waits_for_the_disk(file: MemoryFile) -> None:
    x = tensor_at(64, 3 * PAGE)
    original = x.clone()
    with engine_on(file) as engine:
        file.writes_may_go_on.clear()
        token = engine.offload(x, "x")
        released = threading.Event()

        def release() -> None:
            engine.release(token, x)
            released.set()

        thread = threading.Thread(target=release)
        thread.start()
        assert not released.wait(0.05)
        file.writes_may_go_on.set()
        thread.join(60)
        assert released.is_set()
        x.fill_(7)
        assert torch.equal(fetch(engine, token, original), original)


def test_a_reload_before_the_release_copies_from_the_tensor(file: MemoryFile) -> None:
    x = tensor_at(64, 3 * PAGE)
    with engine_on(file) as engine:
        file.writes_may_go_on.clear()
        token = engine.offload(x, "x")
        assert torch.equal(fetch(engine, token, x), x)
        assert engine.statistics().forwarded_bytes == x.nbytes
        assert file.read_count == 0
        file.writes_may_go_on.set()


def test_what_the_disk_does_not_take_in_time_stays(file: MemoryFile) -> None:
    """Later kernels write to the tensor while the disk still reads from it: those bytes are not read from the file."""
    x = tensor_at(64, 5 * PAGE)
    original = x.clone()
    with engine_on(file, max_stall_share=0.0) as engine:
        engine._ledger.admission.charge(engine._ledger.admission.patience_s())
        engine._ledger.admission._balance_s = 0.01  # the release waits this long
        file.aio.depth = 1
        file.writes_may_go_on.clear()
        token = offload(engine, x)
        assert engine.statistics().kept_for_time == 1
        file.writes_may_go_on.set()
        engine.wait_until_idle()
        assert torch.equal(fetch(engine, token, original), original)
        del token
        assert engine.statistics().slots_in_use == 0


@pytest.mark.parametrize("number", range(3))
def test_a_chunk_that_cannot_be_written_stays_with_its_edges(file: MemoryFile, number: int) -> None:
    x = tensor_at(100, 6 * PAGE)
    original = x.clone()
    file.write_error = lambda index: OSError(errno.EIO, "I/O error") if index == number else None
    with engine_on(file) as engine:
        token = offload(engine, x)
        assert torch.equal(fetch(engine, token, original), original)
        assert engine.statistics().kept == 1


def test_a_full_disk(file: MemoryFile) -> None:
    file.capacity_bytes = 2 * PAGE
    originals = [tensor_at(phase, 4 * PAGE) for phase in (0, 60, 2000)]
    with engine_on(file) as engine:
        tokens = [offload(engine, x.clone()) for x in originals]
        for token, original in zip(tokens, originals, strict=True):
            assert torch.equal(fetch(engine, token, original), original)


def test_the_rest_of_a_short_write_is_asked_for(file: MemoryFile) -> None:
    x = tensor_at(100, 4 * PAGE)
    original = x.clone()
    with engine_on(file) as engine:
        file.aio.shorten = lambda index, length: PAGE if index == 0 else length
        token = offload(engine, x)
        assert torch.equal(fetch(engine, token, original), original)


def test_damage_is_found_also_in_the_edges(file: MemoryFile) -> None:
    x = tensor_at(100, 4 * PAGE)
    original = x.clone()
    with engine_on(file, checksum=True) as engine:
        token = offload(engine, x, "gelu_3")
        entry = engine.find_entry(token)
        assert entry is not None
        chunk = entry.chunks[0]
        chunk.leading = bytes(len(chunk.leading))
        with pytest.raises(ActivationLostError, match=r"'gelu_3'.*checksum mismatch"):
            fetch(engine, token, original)


def test_the_tensor_lives_while_the_disk_reads_from_it(file: MemoryFile) -> None:
    """Its last token and the caller's reference are dropped first."""
    x = torch.zeros(4 * PAGE, dtype=torch.uint8)
    alive = weakref.ref(x.untyped_storage())
    with engine_on(file) as engine:
        file.writes_may_go_on.clear()
        token = engine.offload(x, "x")
        del x, token
        gc.collect()
        engine.statistics()
        assert alive() is not None
        file.writes_may_go_on.set()
        engine.wait_until_idle()
        gc.collect()
        assert alive() is None
        assert engine.statistics().slots_in_use == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_short_queue(file: MemoryFile, depth: int) -> None:
    file.aio.depth = depth
    originals = [tensor_at(phase, 6 * PAGE + phase) for phase in (0, 60, 2000)]
    with engine_on(file) as engine:
        copies = [x.clone() for x in originals]
        tokens = [engine.offload(x, "x") for x in copies]
        tokens = [engine.release(token, x) for token, x in zip(tokens, copies, strict=True)]
        del copies
        for token, original in zip(tokens, originals, strict=True):
            assert torch.equal(fetch(engine, token, original), original)


def test_dropped_before_the_kernel_took_it(file: MemoryFile) -> None:
    file.aio.depth = 1
    with engine_on(file) as engine:
        file.writes_may_go_on.clear()
        first, second = (torch.zeros(4 * PAGE, dtype=torch.uint8) for _ in range(2))
        tokens = [engine.offload(first, "first"), engine.offload(second, "second")]
        del tokens[1]
        statistics = engine.statistics()
        assert statistics.cancelled_bytes == 4 * PAGE
        file.writes_may_go_on.set()
        engine.wait_until_idle()
        assert engine.statistics().slots_in_use == 1
        del tokens


def test_on_a_real_disk(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [FROM_SOURCE_BYTES - 1, FROM_SOURCE_BYTES, 5_000_001, 9 << 20]
    with Engine(EngineConfig(ssd_dir=str(tmp_path), io="aio", checksum=True)) as engine:
        for _ in range(3):
            originals = [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
            tokens = [offload(engine, x.clone()) for x in originals]
            for token, original in zip(tokens, originals, strict=True):
                assert torch.equal(fetch(engine, token, original), original)


@pytest.mark.parametrize("checksum", [False, True])
def test_a_disk_that_hangs(checksum: bool) -> None:
    """`release` gives up after the timeout and can be called again."""
    disk = FaultyDisk(Fault("write", 0, Hang()))
    x = tensor_at(100, 4 * PAGE)
    original = x.clone()
    with disk.engine("source", "/tmp", checksum=checksum) as engine:
        token = engine.offload(x, "gelu_3")
        with pytest.raises(StalledDiskError, match="'gelu_3'"):
            engine.release(token, x)
        disk.let_go()
        token = engine.release(token, x)
        x.fill_(7)
        assert torch.equal(fetch(engine, token, original), original)
