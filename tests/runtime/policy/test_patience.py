"""A disk that hangs: an error instead of an endless wait, and the engine afterwards."""

from __future__ import annotations

import dataclasses
import gc
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_disk import Fail, Fault, FaultyDisk, Hang, LaneKind
from runtime_fakes import fetch, offload

from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.errors import ActivationLostError, StalledDiskError
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.lanes.threads.staged import StagedTransport
from ssdtrain_fx.runtime.policy.patience import BLOCK_S, Patience
from ssdtrain_fx.runtime.policy.stalls import Stalls

X = torch.arange(1536)  # 3 chunks of 4096 bytes

by_lane = pytest.mark.parametrize("lane", ["aio", "threads"])


@dataclasses.dataclass
class FakeLedger:
    ended_transfers: int = 0


def test_every_end_of_a_transfer_renews_patience() -> None:
    ledger, now_s = FakeLedger(), [100.0]
    patience = Patience(ledger, 10.0, lambda: now_s[0])  # type: ignore[arg-type]
    seen: list[float] = []
    for count, ends in ((4, 0), (4, 0), (1, 2), (9, 0), (1, 0), (5, 0), (0, 1)):
        for _ in range(2 * count):
            now_s[0] += BLOCK_S
            patience.left_s()
        ledger.ended_transfers += ends
        seen.append(patience.left_s())
    assert seen == [6, 2, 10, 1, 0, 0, 10]


def test_the_time_for_which_the_process_was_suspended_does_not_count() -> None:
    now_s = [100.0]
    patience = Patience(FakeLedger(), 10.0, lambda: now_s[0])  # type: ignore[arg-type]
    now_s[0] += 3600
    assert patience.left_s() == 10.0 - 2 * BLOCK_S


def test_no_timeout_is_endless_patience() -> None:
    now_s = [0.0]
    patience = Patience(FakeLedger(), None, lambda: now_s[0])  # type: ignore[arg-type]
    now_s[0] = 1e12
    assert patience.left_s() == float("inf")


def test_the_option_reaches_the_engine() -> None:
    for chosen in (None, 7, 2.5):
        config = OffloadConfig(io_timeout_s=chosen).engine_config()
        assert EngineConfig.from_argument(config.to_argument()).io_timeout_s == chosen
    assert OffloadConfig().engine_config().io_timeout_s == 300


@by_lane
def test_the_error_shows_the_queues(lane: LaneKind, tmp_path: Path) -> None:
    disk = FaultyDisk(Fault("write", None, Hang()))
    with disk.engine(lane, str(tmp_path), host_budget_bytes=8192) as engine:
        token = engine.offload(X, "gelu_3")
        with pytest.raises(StalledDiskError) as caught:
            engine.release(token, X)
        message = str(caught.value)
        for part in (
            "no transfer has finished for 2.0 s while waiting for 'gelu_3': the disk hangs",
            "/nowhere/(faulty file): 12288 bytes in flight; chunks: ",
            " to be copied, 0 being copied, ",
            " being written, 0 being reloaded; free staging buffers, cpu: ",
            " of 2",
        ):
            assert part in message
        with pytest.raises(StalledDiskError, match="while waiting for the transfers in flight"):
            engine.wait_until_idle()
        disk.let_go()
        token = engine.release(token, X)
        assert torch.equal(fetch(engine, token, X), X)


@by_lane
def test_a_wait_can_be_repeated_when_the_disk_is_back(lane: LaneKind, tmp_path: Path) -> None:
    disk = FaultyDisk(Fault("read", 1, Hang()))
    with disk.engine(lane, str(tmp_path)) as engine:
        token = offload(engine, X.clone(), "gelu_3")
        engine.wait_until_idle()
        y = engine.reload(token, X.size(), X.stride(), X.dtype, X.device)
        with pytest.raises(
            ActivationLostError, match=r"'gelu_3' .* cannot be read back .*: no transfer has finished"
        ) as lost:
            engine.wait(y, token)
        assert isinstance(lost.value.__cause__, StalledDiskError)
        disk.let_go()
        engine.wait(y, token)
        assert torch.equal(y, X)


@by_lane
@pytest.mark.parametrize("operation", ["write", "read"])
def test_closing_leaves_a_hung_disk_alone(
    lane: LaneKind, operation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """:class:`FaultyFile` and :class:`FaultyAio` refuse to be closed while a transfer hangs."""
    disk = FaultyDisk(Fault("read" if operation == "read" else "write", 0, Hang()))
    with disk.engine(lane, str(tmp_path)) as engine:
        x = X[:512].clone()  # one chunk: with several, some may not have left at the release, because the write hangs
        token = offload(engine, x)
        if operation == "read":
            engine.wait_until_idle()
            y = engine.reload(token, x.size(), x.stride(), x.dtype, x.device)
            del y
        disk.hanging.wait()
        engine.close()
        (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "closed an engine although its transfers do not finish" in record.getMessage()
        assert "bytes in flight; chunks: " in record.getMessage()
        assert engine.find_entry(token) is None
        engine.close()
        del engine, token
        gc.collect()
        disk.let_go()  # late transfers still have their memory and their file


def test_what_is_over_when_the_time_is_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A release finds that its tensor has not left. 2. It leaves. 3. The disk hangs, and a second passes. 4. The
    release begins to wait."""
    disk = FaultyDisk(Fault("write", 0, Hang()))
    may_leave = threading.Event()
    copy_out, wait_for_progress = StagedTransport._copy_out, Stalls.wait_for_progress

    def copy_out_later(transport: StagedTransport, *arguments: Any) -> None:
        assert may_leave.wait(30)
        copy_out(transport, *arguments)

    def wait_later(stalls: Stalls, *arguments: Any) -> None:
        may_leave.set()
        assert disk.hanging.wait(30)
        wait_for_progress(stalls, *arguments)

    monkeypatch.setattr(StagedTransport, "_copy_out", copy_out_later)
    monkeypatch.setattr(Stalls, "wait_for_progress", wait_later)
    with disk.engine("threads", str(tmp_path), io_timeout_s=1.0) as engine:
        x = X[:512].clone()
        token = engine.release(engine.offload(x, "x"), x)
        disk.let_go()
        assert torch.equal(fetch(engine, token, x), x)


def test_growth_that_hangs(tmp_path: Path) -> None:
    """Threads grow the file; while one of them hangs, the others wait for the lock of the file."""
    disk = FaultyDisk(Fault("grow", 0, Hang()), Fault("grow", 1, Fail(28)))
    with disk.engine("threads", str(tmp_path), host_budget_bytes=8192) as engine:
        token = engine.offload(X, "x")
        with pytest.raises(StalledDiskError):
            engine.release(token, X)
        disk.let_go()
        token = engine.release(token, X)
        assert torch.equal(fetch(engine, token, X), X)
