"""Several files as one, compared with a plain byte array without stripes."""

import collections
import errno
import mmap
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runtime_fakes import MemoryFile, fetch, no_aio, offload

from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.aio.kernel import AioUnavailableError, KernelAio
from ssdtrain_fx.runtime.lanes.open_lanes import Parts
from ssdtrain_fx.runtime.storage.spill_file import ChunkFile, SpillFile
from ssdtrain_fx.runtime.storage.striped_file import ROW_BYTES, StripedFile, open_spill_file, stripe_bytes_for

STRIPE = 8192
MIB = 1 << 20


def memory_files(count: int) -> list[MemoryFile]:
    return [MemoryFile(f"/drive{number}") for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_reads_what_was_written(count: int) -> None:
    parts = memory_files(count)
    file = StripedFile(parts, STRIPE)
    size_bytes = 23 * 4096
    assert file.grow(size_bytes) is None
    expected = bytearray(size_bytes)
    rng = random.Random(count)
    for _ in range(50):
        start = rng.randrange(size_bytes // 4096) * 4096
        data = rng.randbytes(min(rng.randrange(1, 9) * 4096, size_bytes - start))
        file.write(memoryview(data), start)
        expected[start : start + len(data)] = data
        start = rng.randrange(size_bytes // 4096) * 4096
        found = bytearray(min(5 * 4096, size_bytes - start))
        file.read(memoryview(found), start)
        assert found == expected[start : start + len(found)]
    assert max(len(part.data) for part in parts) - min(len(part.data) for part in parts) <= STRIPE


def test_one_long_run_is_shared_equally() -> None:
    parts = memory_files(3)
    file = StripedFile(parts, STRIPE)
    assert file.grow(6 * STRIPE) is None
    for offset in range(0, 6 * STRIPE, STRIPE):
        file.write(memoryview(bytes(STRIPE)), offset)
    assert [part.write_count for part in parts] == [2, 2, 2]


@pytest.mark.parametrize(("drives", "mebibytes"), [(2, 16), (3, 8), (4, 8), (5, 4), (8, 4), (16, 4)])
def test_stripes_are_long_but_large_tensors_lie_on_all_drives(drives: int, mebibytes: int) -> None:
    stripe_bytes = stripe_bytes_for(drives)
    assert stripe_bytes == mebibytes * MIB
    if drives <= 8:
        assert stripe_bytes * drives <= ROW_BYTES
    assert StripedFile(memory_files(drives)).stripe_bytes == stripe_bytes


@pytest.mark.parametrize(("drives", "chunks"), [(2, 2), (4, 3), (8, 6)])
@pytest.mark.parametrize("before_bytes", [0, 5 * MIB + 4096])
def test_a_medium_tensor_moves_in_few_chunks_at_the_rate_of_most_drives(
    drives: int, chunks: int, before_bytes: int, tmp_path: Path
) -> None:
    """24 MiB, at the start of a stripe or within one. No drive gets more than a third above an equal share, if the
    tensor starts with a stripe, and twice an equal share elsewhere."""
    if not native_aio():
        pytest.skip("this system has no native AIO")
    folders = [tmp_path / str(number) for number in range(drives)]
    for folder in folders:
        folder.mkdir()
    with Engine(EngineConfig(ssd_dir=tuple(map(str, folders)), io="aio")) as engine:
        before = offload(engine, torch.zeros(max(1, before_bytes), dtype=torch.uint8))
        aligned = torch.frombuffer(mmap.mmap(-1, 24 * MIB), dtype=torch.uint8)
        if not before_bytes:
            del before
        token = engine.offload(aligned, "x")
        entry = engine.find_entry(token)
        assert entry is not None
        assert entry.slot is not None
        assert len(entry.chunks) <= chunks + 1  # 12 with stripes of 2 MiB
        shares: collections.Counter[int] = collections.Counter()
        for chunk in entry.chunks:
            start, length = chunk.pages
            shares[engine._ledger.file.locate(entry.slot.offset_bytes + start)[0]] += length
        equal_bytes = 24 * MIB / drives
        assert max(shares.values()) <= (2 if before_bytes else 1.34) * equal_bytes
        engine.release(token, aligned)
        engine.wait_until_idle()
        assert torch.equal(fetch(engine, token, aligned), aligned)
        del token


def test_threads_work_on_all_drives_though_a_stripe_holds_more_chunks_than_there_are_threads(tmp_path: Path) -> None:
    """Two drives, so four threads. A stripe has eight chunks: without turns, all threads would read the first drive."""
    parts = memory_files(2)
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    config = EngineConfig(ssd_dir=tuple(map(str, folders)))
    open_striped: Callable[[object], ChunkFile] = lambda directories: StripedFile(parts, 8 * 4096)  # noqa: E731
    with Engine(config, Parts(open_file=open_striped, open_aio=no_aio, chunk_bytes=4096)) as engine:
        x = torch.arange(4 * 8 * 4096 // 8)
        expected = x.clone()
        token = offload(engine, x)
        engine.wait_until_idle()
        for part in parts:
            part.reads_may_go_on.clear()
        y = engine.reload(token, x.size())
        try:
            assert [part.read_begun.acquire(timeout=30) for part in parts for _ in range(2)] == [True] * 4
        finally:
            for part in parts:
                part.reads_may_go_on.set()
        engine.wait(y, token)
        assert torch.equal(y, expected)
        del token


def test_location_within_a_stripe(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    parts = [SpillFile(str(folder)) for folder in folders]
    file = StripedFile(parts, STRIPE)
    places = [file.locate(offset) for offset in (0, 4096, STRIPE, 2 * STRIPE, 3 * STRIPE + 4096)]
    first, second = (part.fileno() for part in parts)
    assert places == [(first, 0), (first, 4096), (second, 0), (first, STRIPE), (second, STRIPE + 4096)]
    file.close()


def test_grows_everywhere_or_nowhere() -> None:
    parts = memory_files(2)
    parts[1].capacity_bytes = 2 * STRIPE
    file = StripedFile(parts, STRIPE)
    assert file.grow(4 * STRIPE) is None
    error = file.grow(5 * STRIPE)
    assert error is not None
    assert (error.errno, error.filename) == (errno.ENOSPC, "/drive1/(fake file)")
    assert [len(part.data) for part in parts] == [2 * STRIPE, 2 * STRIPE]
    assert file.size_bytes == 4 * STRIPE
    file.shrink(STRIPE, 4 * STRIPE)  # half a row is rounded up to a whole one
    assert file.size_bytes == 2 * STRIPE
    file.shrink(0, 4 * STRIPE)  # its size has changed: nothing is cut
    assert file.size_bytes == 2 * STRIPE


def test_a_file_that_ends_within_a_stripe_grows_before_it_is_written() -> None:
    """A drive with little room grants less than what was wanted, down to what was needed. What is written past the end
    of a file has no reserved blocks, and a growth that fails later cuts it off."""

    class LittleRoom(MemoryFile):
        def grow(self, size_bytes: int) -> OSError | None:
            return super().grow(size_bytes if size_bytes > STRIPE else STRIPE + 4096)

    parts = [LittleRoom(), LittleRoom()]
    file = StripedFile(parts, STRIPE)
    assert file.grow(STRIPE) is None
    assert [part.size_bytes for part in parts] == [STRIPE + 4096] * 2
    assert file.size_bytes == 2 * STRIPE
    assert file.grow(3 * STRIPE) is None
    assert [part.size_bytes for part in parts] == [2 * STRIPE] * 2
    file.shrink(STRIPE, 2 * STRIPE)  # it has grown since
    assert file.size_bytes == 4 * STRIPE
    file.shrink(STRIPE, 4 * STRIPE)
    assert [part.size_bytes for part in parts] == [STRIPE] * 2


@pytest.mark.parametrize("verb", ["read", "write"])
def test_errors_name_the_drive(verb: str) -> None:
    parts = memory_files(2)
    setattr(parts[1], f"{verb}_error", lambda index: OSError(errno.EIO, "Input/output error"))
    file = StripedFile(parts, STRIPE)
    file.grow(2 * STRIPE)
    with pytest.raises(OSError, match=r"Input/output error: '/drive1/\(fake file\)'"):
        getattr(file, verb)(memoryview(bytearray(2 * STRIPE)), 0)


def test_a_drive_that_takes_no_file_leaves_none_open() -> None:
    opened: list[MemoryFile] = []

    def open_one(directory: str) -> ChunkFile:
        if directory == "/broken":
            raise OSError(errno.EROFS, "Read-only file system", directory)
        opened.append(MemoryFile(directory))
        return opened[-1]

    with pytest.raises(OSError, match="Read-only file system: '/broken'"):
        open_spill_file(["/fine", "/broken"], open_one)
    assert [file.closed for file in opened] == [True]


def native_aio() -> bool:
    try:
        KernelAio().close()
    except AioUnavailableError:
        return False
    return True


@pytest.mark.parametrize("io", ["posix", "aio"])
def test_an_engine_uses_all_directories(io: str, tmp_path: Path) -> None:
    """Tensors end in the middle of stripes; every chunk is in one file."""
    if io == "aio" and not native_aio():
        pytest.skip("this system has no native AIO")
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    files: list[SpillFile] = []

    def open_file(directories: object) -> ChunkFile:
        assert directories == tuple(map(str, folders))
        files.extend(SpillFile(str(folder)) for folder in folders)
        return StripedFile(files, 65536)

    config = EngineConfig(ssd_dir=tuple(map(str, folders)), io=io)  # type: ignore[arg-type]
    with Engine(config, Parts(open_file=open_file)) as engine:
        tensors = [torch.randint(256, (size,), dtype=torch.uint8) for size in (1, 65536, 100_000, 1_000_000, 5_000_001)]
        copies = [x.clone() for x in tensors]
        tokens = [offload(engine, x) for x in tensors]
        engine.wait_until_idle()
        for token, x in zip(tokens, copies, strict=True):
            assert torch.equal(fetch(engine, token, x), x)
        statistics = engine.statistics()
        assert statistics.bytes_written == statistics.bytes_read == sum(x.nbytes for x in copies)
        assert "3 directories" in statistics.io_path
        for entry in engine._ledger.entries.values():
            assert entry.slot is not None
            for chunk in entry.chunks:
                start, length = chunk.pages
                start += entry.slot.offset_bytes
                assert start // 65536 == (start + length - 1) // 65536
        for file in files:
            block = mmap.mmap(-1, 65536)
            file.read(memoryview(block), 0)
            assert any(block)
        assert [list(folder.iterdir()) for folder in folders] == [[], [], []]
        del tokens


def test_a_directory_that_is_full_keeps_tensors_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = memory_files(2)
    parts[1].capacity_bytes = 65536
    open_striped: Callable[[object], ChunkFile] = lambda directories: StripedFile(parts, 65536)  # noqa: E731
    with Engine(EngineConfig(ssd_dir=str(tmp_path)), Parts(open_file=open_striped)) as engine:
        x = torch.arange(100_000)
        token = offload(engine, x)
        engine.wait_until_idle()
        assert torch.equal(fetch(engine, token, x), torch.arange(100_000))
        assert engine.statistics().kept_bytes > 0
    assert "cannot write to /drive1/(fake file) (errno 28" in caplog.text
