"""Disks that are full or broken: they cost memory, not data, or backward raises."""

import errno
import gc
import itertools
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runtime_fakes import MemoryFile, each_file, engine_on, fetch, offload

from ssdtrain_fx.errors import ActivationLostError
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.open_lanes import Parts

CHUNK_COUNT = 6  # of the tensors below: 2 + 1 + 3
ORIGINALS = [torch.arange(1024), torch.arange(100) * 5, torch.arange(1100) * 7]


file = each_file("aio", "threads")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG], ids=errno.errorcode.get)
@pytest.mark.parametrize("failing", [*range(CHUNK_COUNT), None])
def test_a_failed_write_loses_nothing(
    file: MemoryFile, tmp_path: Path, number: int, failing: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each write in turn fails; None: all of them."""
    file.write_error = lambda index: OSError(number, os.strerror(number)) if failing in (index, None) else None
    with engine_on(file, str(tmp_path)) as engine:
        tokens = [offload(engine, original.clone()) for original in ORIGINALS]
        engine.wait_until_idle()
        for _ in range(2):
            for token, original in zip(reversed(tokens), reversed(ORIGINALS), strict=True):
                assert torch.equal(fetch(engine, token, original), original)
        statistics = engine.statistics()
        assert statistics.kept == (3 if failing is None else 1)
        total = sum(original.nbytes for original in ORIGINALS)
        assert statistics.kept_bytes + statistics.bytes_written == total
        assert statistics.forwarded_bytes == 2 * statistics.kept_bytes
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert f"cannot write to /nowhere/(fake file) (errno {number}: {os.strerror(number)})" in warnings[0]


@pytest.mark.parametrize("file", ["threads"], indirect=True)
def test_a_reload_that_waits_for_what_is_never_copied_ends(file: MemoryFile, tmp_path: Path) -> None:
    """1. The second half of a tensor gets no staging buffer. 2. A reload waits for it. 3. Both are dropped."""
    with engine_on(file, str(tmp_path), host_budget_bytes=2 * 4096, io_timeout_s=5.0) as engine:
        file.writes_may_go_on.clear()
        token = offload(engine, ORIGINALS[0].clone(), deferred=True)
        file.write_begun.acquire()
        y = engine.reload(token, ORIGINALS[0].size(), ORIGINALS[0].stride(), torch.int64, torch.device("cpu"))
        del token, y
        gc.collect()
        file.writes_may_go_on.set()
        engine.wait_until_idle()
        assert engine.statistics().cancelled_bytes == ORIGINALS[0].nbytes // 2
        assert engine.statistics().slots_in_use == 0


def test_a_write_that_fails_while_the_tensor_is_being_reloaded(file: MemoryFile, tmp_path: Path) -> None:
    """1. A write is held. 2. A reload is served from staging. 3. The write fails. 4. Another reload follows."""
    file.write_error = lambda index: OSError(errno.EIO, "I/O error")
    with engine_on(file, str(tmp_path), host_budget_bytes=1 << 16) as engine:
        file.writes_may_go_on.clear()
        token = offload(engine, ORIGINALS[1].clone())
        file.write_begun.acquire()
        assert torch.equal(fetch(engine, token, ORIGINALS[1]), ORIGINALS[1])
        file.writes_may_go_on.set()
        engine.wait_until_idle()
        assert torch.equal(fetch(engine, token, ORIGINALS[1]), ORIGINALS[1])
        assert engine.statistics().kept == 1


def test_offloading_goes_on_when_there_is_space_again(file: MemoryFile, tmp_path: Path) -> None:
    file.capacity_bytes = 8192
    with engine_on(file, str(tmp_path)) as engine:
        tokens = [offload(engine, original.clone()) for original in ORIGINALS]
        engine.wait_until_idle()
        full = engine.statistics()
        assert (full.kept, full.bytes_written, full.file_bytes) == (2, 8192, 8192)
        for token, original in zip(tokens, ORIGINALS, strict=True):
            assert torch.equal(fetch(engine, token, original), original)
        del token, tokens
        again = offload(engine, ORIGINALS[0].clone())
        engine.wait_until_idle()
        assert engine.statistics().since(full).bytes_written == 8192
        del again


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """1 MiB in memory."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(mounted)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if result.returncode:
        pytest.skip(f"mount is not permitted here: {result.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def test_a_file_system_that_is_really_full(small_file_system: Path) -> None:
    with Engine(EngineConfig(ssd_dir=str(small_file_system)), Parts(chunk_bytes=1 << 16)) as engine:
        originals = [torch.arange(50_000) + seed for seed in range(6)]
        for _ in range(2):
            tokens = [offload(engine, original.clone()) for original in originals]
            for token, original in zip(tokens, originals, strict=True):
                assert torch.equal(fetch(engine, token, original), original)
            engine.wait_until_idle()
            statistics = engine.statistics()
            assert statistics.kept_bytes > 0
            assert statistics.bytes_written > 0
            assert statistics.file_bytes <= 1 << 20
            del token, tokens


@pytest.mark.parametrize("failing", range(3))
def test_a_failed_read_stops_backward(file: MemoryFile, tmp_path: Path, failing: int) -> None:
    file.read_error = lambda index: OSError(errno.EIO, "Input/output error") if index == failing else None
    with engine_on(file, str(tmp_path)) as engine:
        token = offload(engine, ORIGINALS[2].clone(), "gelu_3")
        engine.wait_until_idle()
        y = engine.reload(token, (1100,), (1,), torch.int64, torch.device("cpu"))
        for _ in range(2):  # it must not look filled on the second try
            with pytest.raises(ActivationLostError) as caught:
                engine.wait(y, token)
            for part in (
                "the saved tensor 'gelu_3' (int64[1100])",
                "bytes 0..12288 of /nowhere/(fake file)",
                "[Errno 5] Input/output error",
                "Check the disk",
            ):
                assert part in str(caught.value)
            assert isinstance(caught.value.__cause__, OSError)
        assert torch.equal(fetch(engine, token, ORIGINALS[2]), ORIGINALS[2])  # the disk works again


def test_a_failed_read_holds_no_token(file: MemoryFile, tmp_path: Path) -> None:
    """A traceback would hold the frames of the ops, the frames the token, and the token the error."""
    file.read_error = lambda index: OSError(errno.EIO, "Input/output error")
    with engine_on(file, str(tmp_path)) as engine:
        token = offload(engine, ORIGINALS[2].clone())
        engine.wait_until_idle()
        with pytest.raises(ActivationLostError):
            fetch(engine, token, ORIGINALS[2])
        del token
        gc.collect()  # pytest's own record of the exception
        assert engine.statistics().slots_in_use == 0


def test_damage_on_disk_is_found(file: MemoryFile, tmp_path: Path) -> None:
    with engine_on(file, str(tmp_path), checksum=True) as engine:
        token = offload(engine, ORIGINALS[2].clone(), "gelu_3")
        engine.wait_until_idle()
        assert bytes(file.data[:8800]) == ORIGINALS[2].numpy().tobytes()
        file.data[5000] ^= 1
        with pytest.raises(ActivationLostError, match="checksum mismatch in the 4096 bytes from byte 4096 on"):
            fetch(engine, token, ORIGINALS[2])


def test_damage_beyond_the_tensor_is_nobodys_business(file: MemoryFile, tmp_path: Path) -> None:
    with engine_on(file, str(tmp_path), checksum=True) as engine:
        token = offload(engine, ORIGINALS[1].clone())
        engine.wait_until_idle()
        file.data[1000] ^= 1
        assert torch.equal(fetch(engine, token, ORIGINALS[1]), ORIGINALS[1])


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    with Engine(EngineConfig(ssd_dir=str(tmp_path)), Parts(chunk_bytes=4096)) as engine:
        token = offload(engine, ORIGINALS[2].clone())
        engine.wait_until_idle()
        os.ftruncate(engine._ledger.file.fileno(), 4096)
        with pytest.raises(ActivationLostError, match=r"short read: 0 of 4096 bytes at offset \d+"):
            fetch(engine, token, ORIGINALS[2])


@pytest.mark.parametrize("held", ["reads", "writes"])
def test_no_order_of_events_stops_two_buffers(file: MemoryFile, tmp_path: Path, held: str) -> None:
    """The smallest staging, more chunks than buffers in both directions, one direction held at first."""
    with engine_on(file, str(tmp_path), host_budget_bytes=0) as engine:
        old = offload(engine, ORIGINALS[2].clone())
        engine.wait_until_idle()
        (file.reads_may_go_on if held == "reads" else file.writes_may_go_on).clear()
        fresh = [engine.offload(original, "x") for original in ORIGINALS]
        ys = [engine.reload(old, (1100,), (1,), torch.int64, torch.device("cpu")) for _ in range(4)]
        file.reads_may_go_on.set()
        for y in ys:
            engine.wait(y, old)
            assert torch.equal(y, ORIGINALS[2])
        file.writes_may_go_on.set()
        for token, original in zip(fresh, ORIGINALS, strict=True):
            engine.release(token, original)
        for (token, original), _ in itertools.product(zip(fresh, ORIGINALS, strict=True), range(2)):
            assert torch.equal(fetch(engine, token, original), original)
        assert engine.statistics().staging_bytes <= 2 * 4096
