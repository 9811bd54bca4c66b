"""Releases that wait while another thread uses the same tensor, or while tensors of other devices leave."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_fakes import FakeAio, MemoryFile, each_file, no_aio, open_engine

from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.lane import Lane
from ssdtrain_fx.runtime.lanes.open_lanes import Parts

file = each_file("aio", "threads", "cuda")
X = torch.arange(8 * 512)


def tight_engine(file: MemoryFile, tmp_path: Path, clock: Callable[[], float]) -> Engine:
    """Staging has room for two of the eight chunks of ``X``, and one request fits into the queue of the kernel."""
    config = EngineConfig(ssd_dir=str(tmp_path), host_budget_bytes=8192, max_stall_share=0.0, io_timeout_s=None)
    engine = open_engine(file, config, clock)
    if file.direct:
        file.aio.depth = 1
    return engine


def test_a_tensor_does_not_stay_if_a_reload_comes_while_its_release_waits(
    file: MemoryFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A release waits. 2. A reload waits for the chunks that have not left. 3. The release has waited for as long as
    it may. It goes on: the reload would never get the chunks that are not moved any more."""
    now_s = [0.0]
    with tight_engine(file, tmp_path, lambda: now_s[0]) as engine:
        file.writes_may_go_on.clear()
        x = X.clone()
        owner = engine.offload(x, "x")
        reloaded: list[torch.Tensor] = []
        wait_for_progress = engine._stalls.wait_for_progress

        def wait(*arguments: Any) -> None:
            if not reloaded:
                reloaded.append(engine.reload(owner, x.size()))
                now_s[0] += 3600
                file.writes_may_go_on.set()
                return
            wait_for_progress(*arguments)

        monkeypatch.setattr(engine._stalls, "wait_for_progress", wait)
        engine.release(owner, x)
        x.fill_(1)
        assert engine.statistics().kept_for_time == 0
        engine.wait(reloaded[0], owner)
        assert torch.equal(reloaded[0], X)


def test_a_reload_gets_the_tensor_if_it_stays_meanwhile(
    file: MemoryFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A reload begins. 2. The release decides that the tensor stays, and the file does not get all of it. 3. The
    reload goes on."""
    ticks = itertools.count(0, 3600)
    with tight_engine(file, tmp_path, lambda: float(next(ticks))) as engine:
        file.writes_may_go_on.clear()
        x = X.clone()
        owner = engine.offload(x, "x")
        entry = engine.find_entry(owner)
        assert entry is not None
        lane = engine._lanes.of_entry(entry)
        allocate = lane.allocate

        def release_and_allocate(*arguments: Any) -> torch.Tensor:
            if not entry.stays:
                engine.release(owner, x)
                x.fill_(1)
            return allocate(*arguments)

        monkeypatch.setattr(lane, "allocate", release_and_allocate)
        y = engine.reload(owner, X.size())
        assert entry.stays
        file.writes_may_go_on.set()
        engine.wait(y, owner)
        assert torch.equal(y, X)


def test_a_tensor_of_two_graphs_that_stays_is_kept_once(tmp_path: Path) -> None:
    """Its first release keeps it in memory while the kernel still reads it. The second one has nothing to do."""
    ticks = itertools.count(0, 3600)
    file = MemoryFile()
    file.direct = True
    file.aio = FakeAio(file)
    engine = Engine(
        EngineConfig(ssd_dir=str(tmp_path), max_stall_share=0.0, io_timeout_s=None),
        Parts(
            open_file=lambda _: file, open_aio=lambda: file.aio, from_source_bytes=1, clock=lambda: float(next(ticks))
        ),
    )
    with engine:
        file.writes_may_go_on.clear()
        x = X.clone()
        owners = [engine.release(engine.offload(x, "x", external=True), x) for _ in range(2)]
        x.fill_(1)
        assert owners[0] is owners[1]
        entry = engine.find_entry(owners[0])
        assert entry is not None
        found = entry.unsafe, entry.source is None, engine.statistics().kept_for_time, len(engine._ledger.residents)
        file.writes_may_go_on.set()
        assert found == (1, False, 1, 1)
        engine.wait_until_idle()
        y = engine.reload(owners[1], X.size())
        engine.wait(y, owners[1])
        assert torch.equal(y, X)
        owners.clear()
        assert engine._ledger.residents == {}


@pytest.mark.parametrize("earlier_kind", ["aio", "threads"])
def test_a_deferred_release_waits_for_tensors_of_another_kind_of_device(tmp_path: Path, earlier_kind: str) -> None:
    """The tensors of the run before leave through another lane, which nobody else may be driving."""
    file = MemoryFile()
    file.direct = True
    file.aio = FakeAio(file)
    file.aio.depth = 1
    config = EngineConfig(ssd_dir=str(tmp_path), host_budget_bytes=8192, io_timeout_s=20.0)
    aio = Engine(config, Parts(open_file=lambda _: file, open_aio=lambda: file.aio, chunk_bytes=4096))
    with aio, Engine(config, Parts(open_file=lambda _: file, open_aio=no_aio, chunk_bytes=4096)) as threads:
        engine = aio
        threads._lanes.ledger = aio._ledger  # its lane works for the other engine
        lanes: dict[str, Lane] = {"aio": aio._lanes.of("cpu"), "threads": threads._lanes.make("cpu")}
        file.writes_may_go_on.clear()
        earlier, later = X.clone(), torch.arange(10)
        aio._lanes.by_type = {"cpu": lanes.pop(earlier_kind)}
        first = engine.offload(earlier, "x", graph_name="graph")
        entry = engine.find_entry(first)
        assert entry is not None
        engine.release(first, earlier, deferred=True)
        assert entry.uncopied
        entry.device = torch.device("cuda:0")
        (other,) = lanes.values()
        engine._lanes.by_type = {"cuda": engine._lanes.by_type["cpu"], "cpu": other}
        second = engine.offload(later, "x", graph_name="graph")
        file.writes_may_go_on.set()
        engine.release(second, later, deferred=True)
        assert entry.uncopied == 0
        engine.wait_until_idle()
        threads._lanes.ledger = threads._ledger
