"""Fixtures and settings that all tests share."""

from __future__ import annotations

import argparse
import os

# Several processes share the cores: threads that wait for work sleep instead of spinning, and Inductor compiles in the
# process that asks for it instead of starting workers, which import torch first. Kernels get no line numbers for
# profilers, which take a fifth of the time of the C++ compiler. For each fresh cache, Inductor would compile programs
# that try the vector instructions; those of this processor work. Set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from ssdtrain_fx._torch_private.arena import ArenaLibrary
from ssdtrain_fx.runtime import ops
from ssdtrain_fx.runtime.memory.step_memory import step_memory

# No deadlines: in a process that has compiled a lot, one garbage collection takes longer than the default deadline.
hypothesis.settings.register_profile(
    "ssdtrain_fx", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ssdtrain_fx")


@pytest.fixture(autouse=True, scope="session")
def _own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """The tests measure this machine, but do not store the result as the user's profile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSDTRAIN_PROFILE_DIR", str(tmp_path_factory.mktemp("profiles")))
        patch.setattr("ssdtrain_fx.machine.probe.MAX_PROBES", 1)  # other tests always run at the same time
        yield


@pytest.fixture(autouse=True, scope="session")
def _fast_linker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Inductor links each kernel with all of torch, a third of the time of a compilation. Gold needs half of that."""
    gold = shutil.which("ld.gold")
    with pytest.MonkeyPatch.context() as patch:
        if gold is not None:
            programs = tmp_path_factory.mktemp("programs")
            (programs / "ld").symlink_to(gold)
            patch.setenv("COMPILER_PATH", str(programs))  # where g++ looks first
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real-device", action="store_true", help="Run the tests of the simulated device on a GPU.")
    parser.addoption(
        "--repetitions",
        type=_at_least_one,
        default=1,
        help="Run each test of the simulated device so often, with other delays.",
    )


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few; expected at least 1")
    return number


@pytest.fixture(scope="session")
def real_device(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--real-device"))


def make_hostile(library: ArenaLibrary) -> ArenaLibrary:
    """Every tensor of compiled code comes from the arena, and what is freed is overwritten at once."""
    library.configure(min_bytes=1, poison=True)
    return library


@pytest.fixture(autouse=True, scope="session")
def _hostile_from_the_start() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """The arena is hostile from its first block on. It is still built only by the first test that needs it."""
    load = step_memory._load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_memory, "_load", lambda: make_hostile(load()))
        yield


@pytest.fixture(autouse=True)
def _fresh_process_state() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """No compiled code, engine or random state is left for the next test.

    The memory of compiled steps is hostile, so that a test of numerics also finds reads of freed memory, of small
    tensors too. A test that needs the arena as users have it calls ``configure()``.
    """
    if step_memory._library is not None:
        make_hostile(step_memory._library)
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    ops.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bits are reproducible only without races: on CPU, Inductor sums embedding gradients with atomic additions."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ssd_dir(tmp_path: Path) -> str:
    """A separate directory for this test."""
    return str(tmp_path)
