"""The ranks of a distributed run on one machine share its drives and its host memory."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig, local_ranks
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.local_ranks import COUNT_VARIABLES, count_local_ranks
from ssdtrain_fx.machine import probe
from ssdtrain_fx.machine.profile_store import measuring_alone
from ssdtrain_fx.memory_limit import read_memory_limit
from ssdtrain_fx.runtime.memory.staging import CHUNK_BYTES
from ssdtrain_fx.testing import toy_hardware

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in COUNT_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    local_ranks._warn.cache_clear()
    yield
    local_ranks._warn.cache_clear()


# -- how many ----------------------------------------------------------------------------------------------------------


def test_a_process_without_a_launcher_is_alone() -> None:
    assert count_local_ranks() == 1


@pytest.mark.parametrize("variable", COUNT_VARIABLES)
def test_the_launcher_says_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "4")
    assert count_local_ranks() == 4


@pytest.mark.parametrize("value", ["", "0", "-2", "four", "4(x2)"])
def test_what_is_no_number_of_ranks_does_not_count(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert count_local_ranks() == 1


def test_ranks_without_a_launcher_are_warned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    for _ in range(2):
        assert OffloadConfig(hardware=alone()).load_hardware("cpu") == alone()
    (record,) = caplog.records
    assert record.getMessage() == (
        "torch.distributed has 4 ranks, but no launcher has set LOCAL_WORLD_SIZE: plans assume that no other rank uses "
        "the drives of this machine. Set the option local_ranks to the number of ranks on it."
    )


def alone() -> Hardware:
    return toy_hardware(8.0, staging_chunk_bytes=CHUNK_BYTES)


@pytest.mark.parametrize("option", ["local_ranks", "drive_ranks"])
def test_who_sets_the_option_is_not_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    config = OffloadConfig(hardware=alone(), **{option: 1})
    config.load_hardware("cpu")
    config.cache_key()
    assert caplog.records == []


# -- what they share ---------------------------------------------------------------------------------------------------


def test_the_option_counts_more_than_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert OffloadConfig(hardware=alone()).load_hardware("cpu") == alone().shared_by(4)
    assert OffloadConfig(hardware=alone(), local_ranks=1).load_hardware("cpu") == alone()
    assert OffloadConfig(hardware=alone(), drive_ranks=2).load_hardware("cpu") == alone().shared_by(2)


def test_ranks_share_the_rates_of_the_drives_and_nothing_else() -> None:
    alone = toy_hardware(8.0, kernel_s=0.5)
    shared = alone.shared_by(4)
    assert (shared.write.bytes_per_s, shared.read.bytes_per_s) == (2.0, 2.0)
    assert dataclasses.replace(shared, write=alone.write, read=alone.read) == alone


def test_ranks_share_the_host_budget() -> None:
    on_gpu = toy_hardware(device="toy GPU")
    config = OffloadConfig(hardware=on_gpu, host_budget_bytes=64 * MIB, local_ranks=4)
    assert config.load_hardware("cuda").staging_bytes == 16 * MIB
    assert config.engine_config().host_budget_bytes == 16 * MIB
    assert OffloadConfig(local_ranks=4).engine_config().host_budget_bytes is None
    assert OffloadConfig(local_ranks=4, host_budget_bytes=3).engine_config().host_budget_bytes == 1


def test_ranks_share_every_limit_but_that_of_their_process(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8192 kB\nMemAvailable: 4096 kB\n")
    (tmp_path / "proc/self/status").write_text("VmSize: 1024 kB\nVmData: 1024 kB\n")
    limits = {resource.RLIMIT_DATA: resource.RLIM_INFINITY, resource.RLIMIT_AS: resource.RLIM_INFINITY}

    def left_bytes(ranks: int) -> int:
        limit = read_memory_limit(ranks=ranks, root=tmp_path, soft_limit=limits.__getitem__)
        assert limit is not None
        return limit.left_bytes

    assert (left_bytes(1), left_bytes(4)) == (4 * MIB, MIB)
    limits[resource.RLIMIT_DATA] = 3 * MIB
    assert (left_bytes(1), left_bytes(4)) == (2 * MIB, MIB)
    limit = read_memory_limit(ranks=4, root=tmp_path, soft_limit=limits.__getitem__)
    assert str(limit) == "1.00 MiB are left for each of 4 ranks of 8.00 MiB (MemAvailable of the machine)"


def test_an_automatic_budget_is_for_one_rank() -> None:
    alone, shared = (OffloadConfig(memory_budget_bytes="auto", local_ranks=ranks).find_budget() for ranks in (1, 4))
    assert alone is not None and shared is not None
    assert 0 < shared.size_bytes < 0.3 * alone.size_bytes
    assert "for each of 4 ranks" in shared.limit


def test_plans_for_other_numbers_of_ranks_have_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OffloadConfig(hardware=toy_hardware())
    alone = config.cache_key()
    assert alone == OffloadConfig(hardware=toy_hardware(), local_ranks=1).cache_key()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert config.cache_key() != alone


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def moved_bytes(ranks: int) -> int:
    """What a plan moves that may take no time, at a disk that is just fast enough for one rank."""
    hardware = toy_hardware(200e6, kernel_s=1e-3)
    config = OffloadConfig(
        hardware=hardware, local_ranks=ranks, max_slowdown=0.0, min_tensor_bytes=0, recompute=False, inner="aot_eager"
    )
    report = ssdtrain_fx.explain(Layers(), torch.randn(1024, 64), config=config)
    return sum(graph.plan.offloaded_bytes for graph in report.graphs)


def test_a_shared_drive_moves_less_in_the_same_time() -> None:
    alone, of_four, of_many = moved_bytes(1), moved_bytes(4), moved_bytes(1000)
    assert alone > of_four > of_many == 0


def test_an_automatic_budget_is_not_for_several_forwards() -> None:
    with pytest.raises(ConfigError, match=r"'auto' and forwards_in_flight=8 .* contradict .* Use max_slowdown, or a"):
        OffloadConfig(memory_budget_bytes="auto", forwards_in_flight=8)


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(directory: str, times: multiprocessing.SimpleQueue[tuple[float, float]]) -> None:
    with measuring_alone():
        began_s = time.monotonic()
        time.sleep(0.2)
        times.put((began_s, time.monotonic()))


def test_processes_measure_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSDTRAIN_PROFILE_DIR", str(tmp_path))
    fork = multiprocessing.get_context("fork")
    times = fork.SimpleQueue()
    processes = [fork.Process(target=measure, args=(str(tmp_path), times)) for _ in range(3)]
    for process in processes:
        process.start()
    spans = sorted(times.get() for _ in processes)
    for process in processes:
        process.join()
    assert all(end_s <= next_s for (_, end_s), (next_s, _) in itertools.pairwise(spans))
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_measures_for_ever_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSDTRAIN_PROFILE_DIR", str(tmp_path))
    with measuring_alone():
        began_s = time.monotonic()
        with measuring_alone(wait_s=0.2):
            assert 0.2 <= time.monotonic() - began_s < 60


def test_an_interrupt_ends_the_wait_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSDTRAIN_PROFILE_DIR", str(tmp_path))
    interrupted = threading.Event()
    interrupted.set()
    with measuring_alone(), pytest.raises(KeyboardInterrupt), measuring_alone(interrupted=interrupted):
        raise AssertionError("it did not wait")
    with measuring_alone(interrupted=interrupted):
        pass


def test_an_interrupted_compilation_tells_the_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. The thread waits for another process. 2. Ctrl-C in the main thread. 3. The thread learns of it, and ends."""

    told: list[bool] = []

    def wait(*_: object, interrupted: threading.Event) -> None:
        told.append(interrupted.wait(30))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(probe, "load_hardware", wait)
    monkeypatch.setattr(Future, "result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        OffloadConfig().load_hardware("cpu")
    assert told == [True]


def test_where_no_directory_can_be_locked_everybody_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("SSDTRAIN_PROFILE_DIR", str(file))
    with measuring_alone(), measuring_alone():
        pass
