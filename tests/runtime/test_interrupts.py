"""Ctrl-C and an exhausted memory at any instruction: the next step is right, and nothing is left behind.

The property: after an exception at any point of a loop of ops, a second loop gets the right data, and after ``close()``
there are as many descriptors and threads as before, and no slot, request or tensor of the interrupted loop.
"""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine_steps import KINDS, Steps, resources
from interrupter import Interrupter
from runtime_fakes import FakeCuda, MemoryFile, open_engine

from ssdtrain_fx.errors import ActivationLostError, SSDTrainError
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.engines import Engines
from ssdtrain_fx.runtime.handles.tokens import make_token

QUICK_POINTS = 40
HANDLER_POINTS = 10
QUICK_SIGNALS = 10
MANY_SIGNALS = 1000
MANY_POINTS = 10_000


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
    assert count > 400  # Python 3.13 stops at fewer points than 3.11
    generator = random.Random(0)
    places = {interrupt_at(steps, generator.randrange(count), error) for _ in range(QUICK_POINTS)}
    assert len(places) > QUICK_POINTS / 4


def interrupt_for_real(steps: Steps, count: int, generator: random.Random) -> None:
    """SIGINT while steps run, ``count`` times."""
    before = resources()
    for _ in range(count):
        delay_s = generator.random() * 0.03
        sender = threading.Timer(delay_s, signal.raise_signal, [signal.SIGINT])
        with contextlib.suppress(KeyboardInterrupt):
            sender.start()
            while sender.is_alive():
                steps.run_and_close()
            steps.run_and_close()
        sender.join()
        steps.check()
        assert resources() == before


def test_a_step_that_is_interrupted_by_a_signal(steps: Steps) -> None:
    interrupt_for_real(steps, QUICK_SIGNALS, random.Random(3))


# -- signal handlers ---------------------------------------------------------------------------------------------------


HANDLERS: dict[str, Callable[[Engines], object]] = {
    "statistics": Engines.statistics,
    "empty_cache": Engines.release_idle,
    "close": Engines.close,
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_signal_handler_may_look_and_close_anywhere(steps: Steps, handler: str) -> None:
    """A preemption handler, at any instruction of a step. If it closes the engines, the step may fail, but says why."""
    count = count_points(steps)
    generator = random.Random(2)
    calls: list[object] = []
    before = resources(), signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: calls.append(HANDLERS[handler](steps.engines)))
    try:
        for _ in range(HANDLER_POINTS):
            with Interrupter(generator.randrange(count), lambda: signal.raise_signal(signal.SIGUSR1)) as points:
                try:
                    steps.run()
                except ActivationLostError as error:
                    if handler != "close" or "was closed" not in str(error):
                        raise
                steps.engines.close()
            steps.check()
            assert resources() == before[0], points.place
        assert len(calls) > HANDLER_POINTS / 2  # threads change the number of points
    finally:
        signal.signal(signal.SIGUSR1, before[1])


def test_a_step_within_an_op_is_refused(tmp_path: Path) -> None:
    """A signal handler runs a step while its thread changes the ledger: that is an error, and the engine goes on."""
    with Engine(EngineConfig(ssd_dir=str(tmp_path))) as engine:
        x = torch.arange(1000)
        owner = engine.release(engine.offload(x, "x"), x)
        with (
            engine._ledger.lock,
            engine._ledger.change,
            pytest.raises(SSDTrainError, match="a signal handler or a finaliser ran a compiled step"),
        ):
            engine.offload(torch.arange(10), "y")
        y = engine.reload(owner, (1000,))
        engine.wait(y, owner)
        assert torch.equal(y, torch.arange(1000))


def test_a_change_whose_end_was_interrupted_is_noticed(tmp_path: Path) -> None:
    """1. The end of a change is interrupted before anything is recorded. 2. The engine has failed all the same."""
    with Engine(EngineConfig(ssd_dir=str(tmp_path))) as engine:
        assert not engine.has_failed
        with engine._ledger.lock:
            engine._ledger.change.__enter__()
        assert engine.has_failed
        with pytest.raises(ActivationLostError, match="was given up"):
            engine.offload(torch.arange(10), "x")


def test_tokens_of_an_engine_that_was_given_up_say_so(tmp_path: Path) -> None:
    engines = Engines()
    argument = EngineConfig(ssd_dir=str(tmp_path)).to_argument()
    engine = engines.open(argument)
    x = torch.arange(1000)
    token = make_token(engine.release(engine.offload(x, "x"), x))
    with pytest.raises(KeyboardInterrupt), engine._ledger.lock, engine._ledger.change:
        raise KeyboardInterrupt
    assert engines.open(argument) is not engine
    with pytest.raises(ActivationLostError, match=r"belongs to an engine that was given up after KeyboardInterrupt"):
        engines.owner_of(token)
    engines.close()
    assert engine.is_gone


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_was_given_up_frees_its_tensors_at_once(is_dropped: bool, kind: str) -> None:
    """Also those whose write had begun when it was interrupted, and whose owner has died. With the entry, its staging
    buffers are freed."""
    file = MemoryFile()
    file.direct = kind == "aio"
    file.cuda = FakeCuda(keeps_log=False) if kind == "cuda" else None
    file.writes_may_go_on.clear()
    engine = open_engine(file, EngineConfig(ssd_dir="/tmp"))
    x = torch.arange(100_000)
    storage = weakref.ref(x.untyped_storage())
    owner = engine.offload(x, "x")
    found = engine.find_entry(owner)
    assert found is not None
    entry = weakref.ref(found)
    del found
    assert file.write_begun.acquire(timeout=60)
    if is_dropped:
        del owner
    with pytest.raises(KeyboardInterrupt), engine._ledger.lock, engine._ledger.change:
        raise KeyboardInterrupt
    file.writes_may_go_on.set()
    engine.close()
    assert engine.is_gone
    del x
    assert storage() is None
    assert entry() is None


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_whose_owner_died_early_goes_when_its_transfers_end(kind: str) -> None:
    file = MemoryFile()
    file.direct = kind == "aio"
    file.cuda = FakeCuda(keeps_log=False) if kind == "cuda" else None
    file.writes_may_go_on.clear()
    with open_engine(file, EngineConfig(ssd_dir="/tmp")) as engine:
        owner = engine.offload(torch.arange(100_000), "x")
        found = engine.find_entry(owner)
        assert found is not None
        entry = weakref.ref(found)
        del found
        assert file.write_begun.acquire(timeout=60)
        del owner
        assert entry() is not None
        file.writes_may_go_on.set()
        engine.wait_until_idle()
        end_s = time.monotonic() + 30
        while entry() is not None and time.monotonic() < end_s:  # an I/O thread may still hold its last task
            engine.statistics()
            time.sleep(0.01)
        assert entry() is None


def test_what_is_logged_of_an_interrupt_holds_no_frame(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with open_engine(MemoryFile(), EngineConfig(ssd_dir="/tmp")) as engine:
        with pytest.raises(KeyboardInterrupt), engine._ledger.lock, engine._ledger.change:
            raise KeyboardInterrupt
        assert engine.has_failed
    (record,) = (record for record in caplog.records if "interrupted an op" in record.getMessage())
    assert isinstance(record.args, tuple)
    assert [type(argument) for argument in record.args] == [str, str]


# -- everywhere --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_step_that_is_interrupted_everywhere(steps: Steps, error: Callable[[], BaseException]) -> None:
    count = count_points(steps)
    generator = random.Random(1)
    for _ in range(MANY_POINTS // 6):
        interrupt_at(steps, generator.randrange(count), error)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_steps_that_are_interrupted_by_many_signals(steps: Steps) -> None:
    interrupt_for_real(steps, MANY_SIGNALS, random.Random(4))
