"""What a step leaves behind that has no backward, or whose tensors die while another one waits for them.

Nothing here runs the garbage collector: a cycle that holds a tensor fails the test.
"""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from runtime_fakes import MemoryFile, each_file, engine_on, fetch
from torch import Tensor

from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.handles.tokens import Owner

file = each_file("aio", "threads", "cuda")
SIZE = 512
CHUNK_BYTES = 4096


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def forward(engine: Engine, names: str, *, deferred: bool = False) -> tuple[list[Owner], list[weakref.ref[object]]]:
    owners: list[Owner] = []
    storages: list[weakref.ref[object]] = []
    for name in names:
        x = torch.arange(SIZE)
        storages.append(weakref.ref(x.untyped_storage()))
        owner = engine.offload(x, name, graph_name="graph")
        owners.append(engine.release(owner, x, deferred=deferred, exclusive=True))
    return owners, storages


def deaths_of(things: Iterable[object]) -> threading.Semaphore:
    """Released once for each of ``things`` that dies."""
    died = threading.Semaphore(0)
    for thing in things:
        weakref.finalize(thing, died.release)
    return died


def kept_in(engine: Engine) -> list[Tensor]:
    """The bytes that could not be written."""
    return [c.kept for e in engine._ledger.entries.values() for c in e.chunks if c.kept is not None]


def test_a_dropped_forward_is_gone_without_another_op(file: MemoryFile, tmp_path: Path) -> None:
    """What had to stay in memory dies with its owner, and so do the slots of the others."""
    file.write_error = lambda index: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if index % 2 else None
    with engine_on(file, str(tmp_path)) as engine:
        owners, storages = forward(engine, "abcd")
        engine.wait_until_idle()
        died = deaths_of(kept_in(engine))
        assert engine._ledger.slots.slots_in_use == 4
        del owners
        assert (engine._ledger.slots.slots_in_use, len(engine._ledger.entries)) == (0, 0)
        assert [storage() for storage in storages] == [None] * 4
        assert all(died.acquire(timeout=10) for _ in range(2))  # a thread may still be about to let go of one


def test_an_owner_that_dies_under_the_lock_waits_for_nothing(file: MemoryFile, tmp_path: Path) -> None:
    """Neither on the thread that holds the lock, nor on another one. The next op removes the entries."""
    with engine_on(file, str(tmp_path)) as engine:
        (mine, others), _ = forward(engine, "ab")
        engine.wait_until_idle()
        owners = {"mine": mine, "others": others}
        del mine, others
        with engine._ledger.lock:
            del owners["mine"]
            thread = threading.Thread(target=owners.popitem)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
            assert engine._ledger.slots.slots_in_use == 2
        assert engine.statistics().slots_in_use == 0


def test_an_owner_whose_finaliser_is_interrupted_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the start of the finaliser, before it has done anything."""
    with engine_on(MemoryFile(), str(tmp_path)) as engine:
        owners, _ = forward(engine, "a")
        engine.wait_until_idle()
        monkeypatch.setattr(Owner, "__del__", lambda owner: None)
        del owners
        assert engine._ledger.slots.slots_in_use == 1
        assert engine.statistics().slots_in_use == 0


def test_a_late_release_does_not_wait_for_what_has_died(file: MemoryFile, tmp_path: Path) -> None:
    """1. Writes are held, and there is no more room: run 1 leaves tensors behind. 2. The next run waits for them.
    3. The loss of run 1 is dropped, so they are never written. 4. The next run goes on, although no write has ended."""
    with engine_on(file, str(tmp_path), host_budget_bytes=2 * CHUNK_BYTES, io_timeout_s=30.0) as engine:
        if file.direct:
            file.aio.depth = 1
        file.writes_may_go_on.clear()
        losses: list[list[Owner]] = []

        def train() -> None:
            losses.append(forward(engine, "abc", deferred=True)[0])
            forward(engine, "abc", deferred=True)

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        while not (engine._ledger.progress._waiting or (file.direct and file.aio.blocked.is_set())):
            assert thread.is_alive()
        losses.clear()
        thread.join(25)
        assert not thread.is_alive()


@pytest.mark.parametrize("fault", ["growth", "submission", "write"])
def test_dropped_forwards_at_a_full_disk_leave_nothing(
    file: MemoryFile, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of the disk are recorded without the frames that they passed, which hold tensors."""

    def refuse(*_: object) -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def reject(*_: object) -> bool:
        raise refuse()

    with engine_on(file, str(tmp_path)) as engine:
        if fault == "growth":
            file.capacity_bytes = 0
        elif fault == "submission" and file.direct:
            monkeypatch.setattr(file.aio, "submit", reject)
        else:
            monkeypatch.setattr(file, "write_error", refuse)
        for _ in range(50):
            owners, storages = forward(engine, "abcd")
            engine.wait_until_idle()
            assert engine.statistics().kept > 0
            died = deaths_of(kept_in(engine))
            del owners
            assert [storage() for storage in storages] == [None] * 4
            assert all(died.acquire(timeout=10) for _ in range(4))
        file.capacity_bytes = None
        monkeypatch.undo()
        owners, _ = forward(engine, "a")
        engine.wait_until_idle()
        assert torch.equal(fetch(engine, owners[0], torch.arange(SIZE)), torch.arange(SIZE))  # type: ignore[arg-type]
        assert engine.statistics().bytes_written > 0
