"""Ctrl-C and an exhausted memory at any instruction: the next step is right, and nothing is left behind.

The property: after an exception at any point of a loop of ops, a second loop gets the right data, and after ``close()``
there are as many descriptors and threads as before, and no slot, request or tensor of the interrupted loop.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from interrupter import Interrupter
from runtime_fakes import FakeCuda, StandInEngine
from torch import Tensor

from ssdtrain_fx.errors import ActivationLostError
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.engines import Engines
from ssdtrain_fx.runtime.storage.spill_file import SpillFile

KINDS = ["aio", "posix", "cuda"]
SIZES = [1000, 40_000]  # int64: through staging, and straight from the tensor
QUICK_POINTS = 70
MANY_POINTS = 10_000


def open_stand_in(config: EngineConfig, handles: Iterator[int]) -> Engine:
    return StandInEngine(
        config, SpillFile(str(config.ssd_dir)), FakeCuda(), handles=handles, chunk_bytes=1 << 16, thread_count=2
    )


class Steps:
    """Steps on engines of one kind, and what is left of them."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.engines = Engines(open_stand_in) if kind == "cuda" else Engines()
        config = EngineConfig(ssd_dir=str(directory), io="posix" if kind == "cuda" else kind)  # type: ignore[arg-type]
        self.argument = config.to_argument()
        self.storages: list[Callable[[], object]] = []
        self.step = 0

    def run(self) -> None:
        """Two tensors that come back, and one that is dropped before its backward."""
        self.step += 1
        for is_dropped in (True, False):
            owners = []
            for size in SIZES:
                x = torch.arange(size) + self.step
                self.storages.append(weakref.ref(x.untyped_storage()))
                engine = self.engines.open(self.argument)
                owner = engine.offload(x, f"x{size}", graph_name="graph", reload_order=size)
                owner.engine.release(owner, x, deferred=is_dropped, exclusive=is_dropped)
                owners.append(owner)
                del x, owner
            if not is_dropped:
                while owners:
                    self.reload(owners.pop(), SIZES[len(owners)])
            owners.clear()

    def reload(self, owner: object, size: int) -> None:
        y: Tensor = owner.engine.reload(owner, (size,))  # type: ignore[attr-defined]
        self.storages.append(weakref.ref(y.untyped_storage()))
        owner.engine.wait(y, owner)  # type: ignore[attr-defined]
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


@pytest.fixture(params=KINDS)
def steps(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Steps]:
    steps = Steps(request.param, tmp_path)
    steps.run_and_close()  # what is made once per process
    steps.storages.clear()
    gc.collect()
    gc.freeze()  # objects that exist already, mainly those of torch, need not be searched every time
    yield steps
    gc.unfreeze()
    steps.engines.close()


def interrupt_at(steps: Steps, at: int, error: Callable[[], BaseException]) -> str:
    """Interrupt a step, and check what is left. Returns where it was interrupted."""
    before = resources()
    swallowed: list[object] = []
    sys.unraisablehook = swallowed.append  # a finaliser was interrupted
    try:
        with Interrupter(at, error) as points:
            steps.run_and_close()
        is_raised = False
    except (KeyboardInterrupt, MemoryError):
        is_raised = True
    finally:
        sys.unraisablehook = sys.__unraisablehook__
    swallowed.clear()
    try:
        steps.check()
        assert resources() == before
    except BaseException as found:
        found.add_note(f"after {error.__name__} at point {at}, {points.place}, raised: {is_raised}")
        raise
    return points.place


def count_points(steps: Steps) -> int:
    with Interrupter() as points:
        steps.run_and_close()
    steps.storages.clear()
    return points.count


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_step_that_is_interrupted_anywhere(steps: Steps, error: Callable[[], BaseException]) -> None:
    count = count_points(steps)
    assert count > 500
    generator = random.Random(0)
    places = {interrupt_at(steps, generator.randrange(count), error) for _ in range(QUICK_POINTS)}
    assert len(places) > QUICK_POINTS / 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_step_that_is_interrupted_everywhere(steps: Steps, error: Callable[[], BaseException]) -> None:
    count = count_points(steps)
    generator = random.Random(1)
    for _ in range(MANY_POINTS // 6):
        interrupt_at(steps, generator.randrange(count), error)
