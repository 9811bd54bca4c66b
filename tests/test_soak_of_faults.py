"""Thousands of steps at a disk that is full, fails and recovers, with dropped forwards and interrupts: nothing grows.

The steps are those of the ops, on real files. The collector runs only where the test says so.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from engine_steps import KINDS, Steps, resources
from interrupter import Interrupter

from ssdtrain_fx.errors import ActivationLostError
from ssdtrain_fx.runtime.lanes.aio.kernel import KernelAio
from ssdtrain_fx.runtime.storage import spill_file
from ssdtrain_fx.runtime.storage.spill_file import SpillFile

log = logging.getLogger(__name__)

INTERRUPTED_POINTS = 1500
RESIDENT_LIMIT_MIB = 64
"""One leaked tensor of 320 kB in each of 250 steps takes more."""


def full(*_: object) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


class Soak:
    """Steps under changing faults."""

    def __init__(self, steps: Steps, patch: pytest.MonkeyPatch) -> None:
        self.steps, self.patch = steps, patch
        self.generator = random.Random(0)
        self.events: dict[str, Callable[[], None]] = {
            "healthy": steps.run,
            "full": self.on_a_full_disk,
            "broken": self.on_a_broken_disk,
            "dropped": self.dropped,
            "interrupted": self.interrupted,
            "closed": steps.run_and_close,
        }

    def run(self, count: int) -> None:
        for _ in range(count):
            self.events[self.generator.choice(list(self.events))]()
            self.steps.storages.clear()

    def on_a_full_disk(self) -> None:
        with self.patch.context() as patch:
            patch.setattr(SpillFile, "grow", full)
            self.steps.run()

    def on_a_broken_disk(self) -> None:
        """It takes nothing; it is well again in the next step."""
        with self.patch.context() as patch:
            patch.setattr(SpillFile, "write", broken)
            patch.setattr(KernelAio, "submit", broken)
            self.steps.run()

    def dropped(self) -> None:
        self.steps.forward(is_dropped=True)

    def interrupted(self) -> None:
        sys.unraisablehook = lambda _: None  # a finaliser was interrupted
        try:
            with Interrupter(self.generator.randrange(INTERRUPTED_POINTS)):
                self.steps.run()
            self.steps.run()  # if a finaliser was interrupted, the next op raises the interrupt
        except (KeyboardInterrupt, ActivationLostError):
            pass
        finally:
            sys.unraisablehook = sys.__unraisablehook__

    def levels(self, directory: Path) -> dict[str, int]:
        self.steps.check()
        descriptors, threads = resources()
        return {
            "descriptors": descriptors,
            "threads": threads,
            "files": len(list(directory.iterdir())),
            "resident MiB": psutil.Process().memory_info().rss >> 20,
        }


@pytest.fixture(params=KINDS)
def steps(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    monkeypatch.setattr(spill_file, "GROWTH_STEP_BYTES", 1 << 20)  # of files that are opened thousands of times
    steps = Steps(request.param, tmp_path)
    gc.collect()
    gc.freeze()
    gc.disable()
    yield steps
    gc.enable()
    gc.unfreeze()
    steps.engines.close()


@pytest.mark.parametrize(
    "count", [pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]), 300], ids=["long", "short"]
)
def test_nothing_grows(steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    soak = Soak(steps, monkeypatch)
    soak.run(count // 6)
    early = soak.levels(tmp_path)
    soak.run(count)
    late = soak.levels(tmp_path)
    log.info("early %s, %d steps later %s", early, count, late)
    for name in ("descriptors", "threads", "files"):
        assert late[name] <= early[name], name
    assert late["resident MiB"] <= early["resident MiB"] + RESIDENT_LIMIT_MIB
