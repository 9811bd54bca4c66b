"""Steps of training as the ops see them, on real files, and what they leave behind."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from runtime_fakes import FakeCuda, StandInEngine

from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.engines import Engines
from ssdtrain_fx.runtime.handles.tokens import Owner
from ssdtrain_fx.runtime.storage.spill_file import SpillFile

KINDS = ["aio", "posix", "cuda"]
SIZES = [1000, 40_000]  # int64: through staging, and straight from the tensor


def open_stand_in(config: EngineConfig, handles: Iterator[int]) -> Engine:
    cuda, file = FakeCuda(keeps_log=False), SpillFile(str(config.ssd_dir))
    return StandInEngine(config, file, cuda, handles=handles, chunk_bytes=1 << 16, thread_count=2)


class Steps:
    """Steps on engines of one kind, and what is left of them."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.engines = Engines(open_stand_in) if kind == "cuda" else Engines()
        config = EngineConfig(ssd_dir=str(directory), io="posix" if kind == "cuda" else kind)  # type: ignore[arg-type]
        self.argument = config.to_argument()
        self.storages: list[Callable[[], object]] = []
        self.step = 0

    def run(self) -> None:
        """Two tensors that come back, after two that are dropped before their backward."""
        self.forward(is_dropped=True)
        owners = self.forward(is_dropped=False)
        while owners:
            self.reload(owners.pop(), SIZES[len(owners)])

    def forward(self, *, is_dropped: bool) -> list[Owner]:
        self.step += 1
        owners: list[Owner] = []
        for size in SIZES:
            x = torch.arange(size) + self.step
            self.storages.append(weakref.ref(x.untyped_storage()))
            engine = self.engines.open(self.argument)
            owner = engine.offload(x, f"x{size}", graph_name="graph", reload_order=size)
            engine.release(owner, x, deferred=is_dropped, exclusive=is_dropped)
            owners.append(owner)
            del x, owner
        return owners

    def reload(self, owner: Owner, size: int) -> None:
        y = owner.engine.reload(owner, (size,), None)
        self.storages.append(weakref.ref(y.untyped_storage()))
        owner.engine.wait(y, owner)
        assert torch.equal(y, torch.arange(size) + self.step)

    def run_and_close(self) -> None:
        self.run()
        self.engines.close()

    def check(self) -> None:
        """Nothing that the interrupted step held is alive once the engines are closed. They can be closed again."""
        self.run()
        for engine in tuple(self.engines._by_config.values()):
            engine.wait_until_idle()
            statistics = engine.statistics()
            assert (statistics.slots_in_use, statistics.in_flight_bytes) == (0, 0)
        self.engines.close()
        self.engines.close()
        assert self.engines._retired == []
        gc.collect()  # a record that was torn apart may be a cycle
        assert [storage() for storage in self.storages if storage() is not None] == []
        self.storages.clear()


def resources() -> tuple[int, int]:
    """Descriptors, and threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208
