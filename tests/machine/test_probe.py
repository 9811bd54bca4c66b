"""Measuring a machine, storing the profile, and the command that shows it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from profiles import HARDWARE
from typer.testing import CliRunner

from ssdtrain_fx.cli import app
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.machine import other_load, probe, probe_transfers, profile_store
from ssdtrain_fx.machine.clocks import CpuClock, DeviceClock, clock_of
from ssdtrain_fx.machine.other_load import OtherLoad
from ssdtrain_fx.machine.probe import load_hardware, measure_hardware
from ssdtrain_fx.machine.probe_hardware import device_name
from ssdtrain_fx.machine.probe_transfers import Traffic, _BesideCompute, _Sample, fit_channel, share_of
from ssdtrain_fx.machine.profile_store import profile_directory, profile_key, profile_path, store_profile
from ssdtrain_fx.machine.reference_rates import run_fio
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.memory.staging import CPU_BUDGET_BYTES

OTHER = dataclasses.replace(HARDWARE, kernel_s=5e-6)


class Measurements:
    """Stands in for ``measure_hardware``: returns ``hardware``, and counts its calls."""

    def __init__(self) -> None:
        self.hardware = HARDWARE
        self.count = 0
        self.quick: bool | None = None
        self.ssd_dir: probe.SsdDir = None

    def __call__(
        self, device: str, ssd_dir: probe.SsdDir, *, quick: bool = False, on_step: probe.OnStep = probe.ignore
    ) -> Hardware:
        self.count += 1
        self.quick = quick
        self.ssd_dir = ssd_dir
        on_step("memory", 0, 2)
        on_step("done", 2, 2)
        return self.hardware


@pytest.fixture(autouse=True)
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory of profiles, and a process that has loaded none."""
    directory = tmp_path / "profiles"
    monkeypatch.setenv("SSDTRAIN_PROFILE_DIR", str(directory))
    monkeypatch.setattr(probe, "_known", {})
    monkeypatch.setattr(probe, "MAX_PROBES", 3)
    return directory


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> Measurements:
    stand_in = Measurements()
    monkeypatch.setattr(probe, "measure_hardware", stand_in)
    monkeypatch.setattr(probe.OtherLoad, "describe", lambda _: "")
    return stand_in


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget loaded profiles, as in another process."""
    monkeypatch.setattr(probe, "_known", {})


# -- the store ---------------------------------------------------------------------------------------------------------


def test_measured_once_per_machine_and_path(
    measurements: Measurements, ssd_dir: str, profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_hardware("cpu", ssd_dir) == HARDWARE
    assert measurements.quick is True
    forget(monkeypatch)
    assert load_hardware("cpu", ssd_dir) == HARDWARE
    assert measurements.count == 1
    (path,) = profiles.iterdir()
    assert path.name.startswith(f"cpu-{torch.get_num_threads()}-threads-")


def test_one_process_plans_with_one_profile(measurements: Measurements, ssd_dir: str, profiles: Path) -> None:
    first = load_hardware("cpu", ssd_dir)
    for path in profiles.iterdir():
        path.unlink()
    assert load_hardware("cpu", ssd_dir) is first


def test_threads_of_one_process_measure_once(measurements: Measurements, ssd_dir: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: load_hardware("cpu", ssd_dir), range(4)))
    assert all(hardware is found[0] for hardware in found)
    assert measurements.count == 1


def test_another_number_of_threads_has_a_separate_profile(
    measurements: Measurements, ssd_dir: str, profiles: Path, one_thread: None
) -> None:
    load_hardware("cpu", ssd_dir)
    torch.set_num_threads(3)
    load_hardware("cpu", ssd_dir)
    assert measurements.count == 2
    assert len(list(profiles.iterdir())) == 2


@pytest.mark.parametrize("field", ["device", "processor", "file_system", "torch_version"])
def test_another_machine_has_a_separate_profile(field: str, ssd_dir: str) -> None:
    key = profile_key("cpu", (ssd_dir,))
    assert dataclasses.replace(key, **{field: "other"}).file_name != key.file_name


def test_the_key_is_the_file_systems_not_the_directorys(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    here, below, other = str(tmp_path), str(tmp_path / "below"), "/proc"
    assert profile_key("cpu", [below]) == profile_key("cpu", [here])
    assert profile_key("cpu", [other]) != profile_key("cpu", [here])
    assert profile_key("cpu", [here, other]) == profile_key("cpu", [other, below])
    assert len({profile_key("cpu", chosen) for chosen in ([here], [here, below], [here, other])}) == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "Expecting value"),
        ('{"format": 1, "key"', "Expecting"),
        ("[]", "list indices"),
        ('{"format": 0}', f"format 0, expected {profile_store.FORMAT}"),
        (f'{{"format": {profile_store.FORMAT}, "key": {{}}}}', "its key is {}, expected"),
        ("\udcff", "can't decode"),
    ],
)
def test_what_cannot_be_used_is_measured_again(
    content: str, reason: str, measurements: Measurements, ssd_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = profile_path(profile_key("cpu", (ssd_dir,)))
    path.parent.mkdir()
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert load_hardware("cpu", ssd_dir) == HARDWARE
    assert measurements.count == 1
    warning = caplog.records[0]
    assert warning.levelno == logging.WARNING
    assert reason in warning.getMessage() and "measuring again" in warning.getMessage()
    assert json.loads(path.read_text())["hardware"]["device"] == "cpu"


def test_a_profile_with_other_fields_is_measured_again(measurements: Measurements, ssd_dir: str) -> None:
    key = profile_key("cpu", (ssd_dir,))
    store_profile(key, OTHER, replace=True)
    raw = json.loads(profile_path(key).read_text())
    del raw["hardware"]["kernel_s"]
    profile_path(key).write_text(json.dumps(raw))
    assert load_hardware("cpu", ssd_dir) == HARDWARE


def test_the_first_stored_profile_is_kept(
    measurements: Measurements, ssd_dir: str, monkeypatch: pytest.MonkeyPatch, profiles: Path
) -> None:
    """1. This process finds no profile and measures. 2. Another one stores its profile first. 3. Both use that one."""
    key = profile_key("cpu", (ssd_dir,))

    def measure(device: str, directory: str, **_: object) -> Hardware:
        store_profile(key, OTHER, replace=False)
        return HARDWARE

    monkeypatch.setattr(probe, "measure_hardware", measure)
    assert load_hardware("cpu", ssd_dir) == OTHER
    assert len(list(profiles.iterdir())) == 1


def test_many_store_at_once_and_agree(ssd_dir: str, profiles: Path) -> None:
    key = profile_key("cpu", (ssd_dir,))
    barrier = threading.Barrier(8)

    def store(index: int) -> Hardware:
        barrier.wait()
        return store_profile(key, dataclasses.replace(HARDWARE, kernel_s=index * 1e-6), replace=False)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(store, range(8)))
    assert len({hardware.to_json() for hardware in found}) == 1
    assert profile_store.read_profile(key) == found[0]
    assert [path.suffix for path in profiles.iterdir()] == [".json"]


def test_what_cannot_be_stored_is_used_all_the_same(
    measurements: Measurements, ssd_dir: str, profiles: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiles.write_text("a file where the directory should be")
    assert load_hardware("cpu", ssd_dir) == HARDWARE
    assert load_hardware("cpu", ssd_dir) == HARDWARE
    assert measurements.count == 1
    assert any("cannot be stored" in record.getMessage() for record in caplog.records)


def test_a_profile_of_a_busy_machine_counts_for_minutes(
    measurements: Measurements,
    ssd_dir: str,
    profiles: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    measurements.hardware = dataclasses.replace(HARDWARE, kernel_s=0.012)
    assert load_hardware("cpu", ssd_dir) is load_hardware("cpu", ssd_dir)
    assert "An empty kernel takes 12.0 ms: the machine is busy" in caplog.text
    forget(monkeypatch)
    load_hardware("cpu", ssd_dir)  # another rank of the same run
    assert measurements.count == probe.MAX_PROBES
    (path,) = profiles.iterdir()
    old_s = time.time() - profile_store.DISTURBED_COUNTS_S - 1
    os.utime(path, (old_s, old_s))
    measurements.hardware = HARDWARE
    forget(monkeypatch)
    assert load_hardware("cpu", ssd_dir) == HARDWARE
    forget(monkeypatch)
    os.utime(path, (old_s, old_s))
    assert load_hardware("cpu", ssd_dir) == HARDWARE
    assert measurements.count == probe.MAX_PROBES + 1


def test_a_product_slower_than_memory_is_measured_again(
    measurements: Measurements, ssd_dir: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This happened: threads waited for a processor, a product ran at a thousandth of its rate, and a plan used it."""
    caplog.set_level(logging.INFO, logger="ssdtrain_fx")
    slow = dataclasses.replace(HARDWARE, flops_per_s={"float32": 0.4e9})
    found = iter([slow, HARDWARE, slow])
    monkeypatch.setattr(probe, "measure_hardware", lambda *_, **__: next(found))
    assert probe.probe_and_store("cpu", ssd_dir).hardware == HARDWARE
    assert "A matrix product runs at 0.4 GFLOP/s: measuring again" in caplog.text


def test_what_was_measured_beside_other_programs_is_measured_again_and_the_faster_counts(
    ssd_dir: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loads = iter(["Other programs use 1.0 of 2 processors"] * 3)
    monkeypatch.setattr(probe.OtherLoad, "describe", lambda _: next(loads))
    found = iter(
        dataclasses.replace(
            HARDWARE,
            flops_per_s=dict.fromkeys(HARDWARE.flops_per_s, flops_per_s),
            write=Channel(bytes_per_s=write_bytes_per_s),
            share_when_both=1e9 / write_bytes_per_s,
            offload_s=offload_s,
            next_offload_s=None,
        )
        for flops_per_s, write_bytes_per_s, offload_s in ((3e11, 1e9, 3e-4), (9e11, 3e9, 2e-4), (6e11, 2e9, 4e-4))
    )
    monkeypatch.setattr(probe, "measure_hardware", lambda *_, **__: next(found))
    hardware = probe.probe_and_store("cpu", ssd_dir).hardware
    assert set(hardware.flops_per_s.values()) == {9e11}
    assert (hardware.write.bytes_per_s, hardware.offload_s, hardware.next_offload_s) == (3e9, 2e-4, None)
    assert hardware.memory_bytes_per_s == HARDWARE.memory_bytes_per_s
    assert hardware.share_when_both == 1 / 3  # that of the fastest writes
    assert "Other programs use 1.0 of 2 processors: the machine is busy" in caplog.text


def test_a_disturbed_small_transfer_does_not_make_the_disk_faster(
    ssd_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MiB in 8 ms, and a small transfer that took 6 ms instead of 1 in the second measurement."""
    monkeypatch.setattr(probe.OtherLoad, "describe", lambda _: "Other programs use 1.0 of 2 processors")
    undisturbed, disturbed = (
        fit_channel((1 << 20, small_s), (8 << 20, large_s)) for small_s, large_s in ((1e-3, 8e-3), (6e-3, 8.1e-3))
    )
    assert disturbed.bytes_per_s > 3 * undisturbed.bytes_per_s
    shares = {undisturbed: 0.9, disturbed: 0.5}
    for order in ((undisturbed, disturbed, disturbed), (disturbed, undisturbed, disturbed)):
        found = iter(
            dataclasses.replace(HARDWARE, write=channel, read=channel, share_when_both=shares[channel])
            for channel in order
        )
        monkeypatch.setattr(probe, "measure_hardware", lambda *_, found=found, **__: next(found))
        hardware = probe.probe_and_store("cpu", ssd_dir).hardware
        assert hardware.write == hardware.read == undisturbed
        assert hardware.share_when_both == 0.9


@pytest.mark.parametrize(
    ("busy_ticks", "steal_ticks", "own_s", "threads", "expected"),
    [
        (190, 0, 1.0, 2, "Other programs use 0.9 of 2 processors"),
        (190, 0, 1.9, 2, ""),
        (100, 40, 1.0, 2, "Other programs use 0.4 of 2 processors"),
        (190, 0, 1.0, 1, ""),  # the other processor is free
    ],
)
def test_processors_that_other_programs_use(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    busy_ticks: int,
    steal_ticks: int,
    own_s: float,
    threads: int,
    expected: str,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    now = [10.0, 5.0]
    monkeypatch.setattr(other_load.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(other_load.time, "process_time", lambda: now[1])
    stat = tmp_path / "stat"
    line = "cpu{core} {user} 0 0 1000 1000 0 0 {steal} 77 0\n"
    stat.write_text("cpu  9 9 9 9\n" + "".join(line.format(core=core, user=50, steal=0) for core in range(3)))
    load = OtherLoad(stat)
    assert load.describe() == ""
    now[:] = [11.0, 5.0 + own_s]
    after = ((0, 50 + busy_ticks // 2, steal_ticks), (1, 9999, 9999), (2, 50 + busy_ticks // 2, 0))
    stat.write_text("".join(line.format(core=core, user=user, steal=steal) for core, user, steal in after))
    assert load.describe() == expected


def test_processors_that_are_switched_on_or_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    now = [10.0]
    monkeypatch.setattr(other_load.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(other_load.time, "process_time", lambda: 5.0)
    stat, quota = tmp_path / "stat", tmp_path / "cpu.max"
    monkeypatch.setattr(other_load, "QUOTA", quota)
    monkeypatch.setattr(other_load, "QUOTA_V1", tmp_path / "none")
    stat.write_text("cpu0 100 0 0 0 0 0 0 0\n")
    load = OtherLoad(stat)
    now[0] = 14.0
    stat.write_text("cpu0 500 0 0 0 0 0 0 0\ncpu1 99999 0 0 0 0 0 0 0\n")
    assert load.describe() == "Other programs use 1.0 of 2 processors"
    quota.write_text("max 100000\n")
    assert load.describe() == "Other programs use 1.0 of 2 processors"
    quota.write_text("200000 100000\n")
    assert load.describe() == ""


def test_a_disk_that_becomes_full_between_two_measurements(ssd_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.OtherLoad, "describe", lambda _: "busy")
    answers = iter([HARDWARE])

    def measure(*_: object, **__: object) -> Hardware:
        found = next(answers, None)
        if found is None:
            raise probe.FullDiskError("full")
        return found

    monkeypatch.setattr(probe, "measure_hardware", measure)
    assert probe.probe_and_store("cpu", ssd_dir).hardware == HARDWARE


def test_a_calm_measurement_replaces_a_disturbed_one(ssd_dir: str) -> None:
    key = profile_key("cpu", (ssd_dir,))
    store_profile(key, OTHER, replace=False, disturbed=True)
    assert store_profile(key, HARDWARE, replace=False, disturbed=True) == OTHER
    assert store_profile(key, HARDWARE, replace=False) == HARDWARE
    assert store_profile(key, OTHER, replace=False) == HARDWARE


@pytest.mark.parametrize("content", [None, "cpu0 1 2\n", "cpu0 a b c d e f g h\n"])
def test_a_system_that_does_not_count_has_no_load(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "stat").write_text(content.replace("cpu0", f"cpu{min(os.sched_getaffinity(0))}"))
    assert OtherLoad(tmp_path / "stat").describe() == ""


def test_nothing_stored_and_nothing_to_be_measured(measurements: Measurements, ssd_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"No hardware profile of cpu .* Run `ssdtrain-fx probe` first"):
        load_hardware("cpu", ssd_dir, measure=False)
    assert measurements.count == 0


def test_where_profiles_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert profile_directory() == tmp_path / "profiles"
    monkeypatch.delenv("SSDTRAIN_PROFILE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert profile_directory() == Path("/somewhere/ssdtrain_fx")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert profile_directory() == Path.home() / ".cache" / "ssdtrain_fx"


# -- measuring ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_this_machine_has_sane_rates(ssd_dir: str) -> None:
    steps: list[tuple[str, int, int]] = []
    threads = torch.get_num_threads()
    start_s = time.monotonic()
    hardware = measure_hardware("cpu", ssd_dir, quick=True, on_step=lambda *step: steps.append(step))
    assert time.monotonic() - start_s < 120  # two or three seconds if nothing else runs
    assert torch.get_num_threads() == threads
    assert hardware == Hardware.from_json(hardware.to_json())
    assert hardware.device == "cpu" and hardware.copies_block_compute
    assert set(hardware.flops_per_s) >= {"float32", "bfloat16", "float32 convolution"}
    assert set(hardware.elements_per_s) == {"float32", "bfloat16"}
    assert hardware.flops_per_s["float32"] > 1e6
    for rate in (hardware.memory_bytes_per_s, hardware.write.bytes_per_s, hardware.read.bytes_per_s):
        assert 1e5 < rate < 1e13
    assert 0 < hardware.kernel_s < 10
    assert hardware.next_offload_s is not None and 0 <= hardware.next_offload_s <= hardware.offload_s
    assert hardware.next_reload_s is not None and 0 <= hardware.next_reload_s <= hardware.reload_s
    assert hardware.staging_bytes in (0, CPU_BUDGET_BYTES)  # 0 if the disk transfers tensors directly
    total = steps[0][2]
    assert [(done, of) for _, done, of in steps] == [(done, total) for done in range(total + 1)]
    assert list(Path(ssd_dir).iterdir()) == []


@pytest.mark.parametrize(("busy_s", "taken_s"), [((1.5, 3.0, 9.0), 2.0), ((0.5, 0.9, 5.0), 0.0)])
def test_what_transfers_take_from_the_products_beside_them_is_a_cost(
    tmp_path: Path, busy_s: tuple[float, ...], taken_s: float
) -> None:
    """The median of pairs counts. If products are faster during transfers, that is noise."""
    with Engine(EngineConfig(ssd_dir=str(tmp_path))) as engine:
        beside = _BesideCompute(Traffic(engine, torch.device("cpu")))
    beside._samples["in", 4096] = [
        _Sample(product_s=0.5, taken_s=busy - 1.0, ops_s=[ops_s], row_ops_s=[])
        for busy, ops_s in zip(busy_s, (0.1, 0.2, 7.0), strict=True)
    ]
    assert beside.cost_s("in", 4096) == pytest.approx(0.2 + taken_s / beside.COUNT)


def test_transfers_cost_what_they_would_on_an_undisturbed_machine(tmp_path: Path) -> None:
    """When everything takes three times as long, so do the ops; the products between them show it."""
    with Engine(EngineConfig(ssd_dir=str(tmp_path))) as engine:
        beside = _BesideCompute(Traffic(engine, torch.device("cpu")))
    beside._samples["out", 4096] = [_Sample(product_s=0.1, taken_s=0.0, ops_s=[9.0], row_ops_s=[])]
    beside._samples["in", 4096] = [
        _Sample(product_s=factor * 0.1, taken_s=factor * 0.04, ops_s=[factor * 0.01], row_ops_s=[])
        for factor in (3.0, 3.0, 2.0)
    ]
    assert beside.cost_s("in", 4096) == pytest.approx(0.01 + 0.04 / beside.COUNT)


def test_what_a_row_saves_is_the_difference_of_medians(tmp_path: Path) -> None:
    """Over all sizes, in products of the same sample: everything in the second one took twice as long."""
    with Engine(EngineConfig(ssd_dir=str(tmp_path))) as engine:
        beside = _BesideCompute(Traffic(engine, torch.device("cpu")))
    beside._samples["out", 4096] = [_Sample(product_s=0.1, taken_s=0.0, ops_s=[0.5, 0.5], row_ops_s=[0.2, 0.1])]
    beside._samples["out", 8192] = [_Sample(product_s=0.2, taken_s=0.0, ops_s=[1.0, 9.0], row_ops_s=[0.4, 9.0])]
    beside._samples["in", 4096] = [_Sample(product_s=0.1, taken_s=0.0, ops_s=[0.1], row_ops_s=[0.3])]
    assert beside.saved_in_row_s("out") == pytest.approx(0.3)
    assert beside.saved_in_row_s("in") == 0.0


def test_the_first_op_of_a_row_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(EngineConfig(ssd_dir=str(tmp_path))) as engine:
        beside = _BesideCompute(Traffic(engine, torch.device("cpu")))
    now_s = [0.0]
    monkeypatch.setattr(probe_transfers.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(beside, "_compute", lambda products: take(100.0))
    ended: list[tuple[int, int]] = []

    def take(seconds: float) -> None:
        now_s[0] += seconds

    def begin(number: int) -> int:
        take(2.0 if number else 10.0)
        return -number

    def end(number: int, begun: int) -> None:
        take(1.0 if number else 5.0)
        ended.append((number, begun))

    assert beside._run_row(3, begin, end) == [3.0, 3.0, 3.0]
    assert ended == [(0, 0), (1, -1), (2, -2), (3, -3)]


def test_a_line_through_two_transfers() -> None:
    """1 MB in 2 ms and 9 MB in 10 ms: 1 GB/s and 1 ms."""
    channel = fit_channel((1_000_000, 0.002), (9_000_000, 0.010))
    assert channel.bytes_per_s == pytest.approx(1e9)
    assert channel.latency_s == pytest.approx(0.001)


@pytest.mark.parametrize("large_s", [0.001, 0.002, 0.020])
def test_noise_makes_no_negative_latency_and_no_infinite_rate(large_s: float) -> None:
    channel = fit_channel((1_000_000, 0.002), (9_000_000, large_s))
    assert channel == Channel(bytes_per_s=9_000_000 / large_s)


@pytest.mark.parametrize(
    ("both_s", "share"),
    [(2.0, 1.0), (3.0, 0.5), (2.25, 0.8), (1.5, 1.0), (0.5, 1.0), (100.0, 0.1)],
)
def test_share_of_two_directions(both_s: float, share: float) -> None:
    """1 s and 2 s alone. At half rate, the short one takes 2 s. Then the long one is half done and takes 1 s more."""
    assert share_of(1.0, 2.0, both_s) == share_of(2.0, 1.0, both_s) == pytest.approx(share)


def test_too_little_room(ssd_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(ssd_dir)
    full = os.statvfs_result((*real[:4], 1, *real[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(ConfigError, match=r"has 0 MiB left; measuring needs \d+ MiB"):
        measure_hardware("cpu", ssd_dir, quick=True)


def test_a_full_disk_is_told_once_and_measured_when_there_is_room(
    ssd_dir: str, measurements: Measurements, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probe, "_full", set[str]())

    def refuse(*_: object, **__: object) -> Hardware:
        raise probe.FullDiskError("It is full.")

    with monkeypatch.context() as patch:
        patch.setattr(probe, "measure_hardware", refuse)
        assumed = [load_hardware("cpu", ssd_dir) for _ in range(3)]
    assert {hardware.write.bytes_per_s for hardware in assumed} == {2e9}
    assert caplog.messages == ["It is full. Until then, plans assume a drive of 2 GB/s."]
    assert load_hardware("cpu", ssd_dir) == measurements.hardware


class FakeEvent:
    """From one ``record`` to the next, 250 ms pass on the device's clock."""

    now_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = -1.0
        self.waited = False

    def record(self) -> None:
        FakeEvent.now_ms += 250
        self.at_ms = FakeEvent.now_ms

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: FakeEvent) -> float:
        assert later.waited
        return later.at_ms - self.at_ms


class FakeCuda:
    Event = FakeEvent

    def is_available(self) -> bool:
        return True

    def get_device_name(self, device: torch.device) -> str:
        return f"Fake {device}"


def test_a_gpu_is_timed_by_its_own_clock() -> None:
    calls: list[int] = []
    clock = clock_of(torch.device("cuda"), FakeCuda())
    assert isinstance(clock, DeviceClock)
    assert clock.seconds(lambda: calls.append(1)) == 0.25
    assert calls == [1]
    assert isinstance(clock_of(torch.device("cpu")), CpuClock)


def test_devices_and_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_name("cpu") == "cpu"
    assert device_name("cuda:1", FakeCuda()) == "Fake cuda:1"
    with pytest.raises(ConfigError, match="cannot offload from 'meta': meta is not one of cpu, cuda"):
        device_name("meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="The device is 'cuda', but torch sees no CUDA device"):
        device_name("cuda", torch.cuda)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_has_sane_rates(ssd_dir: str) -> None:
    hardware = measure_hardware("cuda", ssd_dir, quick=True)
    assert not hardware.copies_block_compute
    assert hardware.flops_per_s["bfloat16"] > hardware.flops_per_s["float32"] > 1e11
    assert hardware.copy_out.bytes_per_s > 1e9 and hardware.copy_in.bytes_per_s > 1e9


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PATH", "")  # no fio
    return CliRunner()


def test_the_command_shows_and_keeps_the_profile(
    wide: CliRunner, measurements: Measurements, ssd_dir: str, tmp_path: Path, profiles: Path
) -> None:
    path = tmp_path / "profile.json"
    done = wide.invoke(app, ["probe", "--device", "cpu", "--ssd-dir", ssd_dir, "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert measurements.quick is False
    assert Hardware.from_json(path.read_text()) == HARDWARE
    (kept,) = profiles.iterdir()
    assert f"Stored in: {kept}" in done.output
    for figure in ("200.0 GFLOP/s", "400.0 GFLOP/s", "50.0 GB/s", "3.00 GB/s", "100.0 µs", "60 %", "12.00 MiB"):
        assert figure in done.output
    assert load_hardware("cpu", ssd_dir) == HARDWARE
    assert measurements.count == 1


def test_several_directories_are_measured_together(
    wide: CliRunner, measurements: Measurements, tmp_path: Path, profiles: Path
) -> None:
    folders = [str(tmp_path / name) for name in ("one", "two")]
    for folder in folders:
        Path(folder).mkdir()
    done = wide.invoke(app, ["probe", "--ssd-dir", folders[0], "--ssd-dir", folders[1]])
    assert done.exit_code == 0, done.output
    assert f"SSD directory: {folders[0]}, {folders[1]}" in done.output
    assert measurements.ssd_dir == tuple(folders)
    assert load_hardware("cpu", folders[::-1]) == HARDWARE
    assert measurements.count == 1
    load_hardware("cpu", folders[0])
    assert measurements.count == 2


def test_shares_of_given_references(wide: CliRunner, measurements: Measurements, ssd_dir: str) -> None:
    arguments = ["probe", "--ssd-dir", ssd_dir, "--reference-write", "6", "--reference-read", "2.5"]
    rows = {line.split("│")[1].strip(): line for line in wide.invoke(app, arguments).output.splitlines() if "│" in line}
    assert "50 %" in rows["SSD write"]
    assert "80 %" in rows["SSD read"]
    assert "-" in rows["memory"]


def test_json_alone_on_standard_output(wide: CliRunner, measurements: Measurements, ssd_dir: str) -> None:
    done = wide.invoke(app, ["probe", "--ssd-dir", ssd_dir, "--json", "-"])
    assert Hardware.from_json(done.stdout) == HARDWARE
    assert "Stored in" in done.stderr


def test_the_command_measures_again_and_replaces(wide: CliRunner, measurements: Measurements, ssd_dir: str) -> None:
    store_profile(profile_key("cpu", (ssd_dir,)), OTHER, replace=True)
    assert wide.invoke(app, ["probe", "--device", "cpu", "--ssd-dir", ssd_dir, "--quick"]).exit_code == 0
    assert measurements.quick is True
    assert load_hardware("cpu", ssd_dir) == HARDWARE


def test_errors_are_clear(
    wide: CliRunner, measurements: Measurements, ssd_dir: str, profiles: Path, tmp_path: Path
) -> None:
    missing = wide.invoke(app, ["probe", "--ssd-dir", str(tmp_path / "nowhere")])
    assert missing.exit_code == 3
    assert "which does not exist. Create it" in missing.output
    no_parent = wide.invoke(app, ["probe", "--ssd-dir", ssd_dir, "--json", str(tmp_path / "no" / "x.json")])
    assert no_parent.exit_code == 2
    assert "does not exist" in no_parent.output
    profiles.write_text("in the way")
    in_the_way = wide.invoke(app, ["probe", "--ssd-dir", ssd_dir])
    assert in_the_way.exit_code == 3
    assert str(profiles) in in_the_way.output
    assert measurements.count == 0


def test_help_has_an_example(wide: CliRunner) -> None:
    done = wide.invoke(app, ["probe", "--help"])
    assert "Example: ssdtrain-fx probe --ssd-dir /mnt/nvme0" in done.output


FIO = """#!/bin/sh
case "$*" in
  *--rw=write*) echo 'a note{"jobs": [{"write": {"bw_bytes": 4000000000}}]}' ;;
  *) echo '{"jobs": [{"read": {"bw_bytes": 5000000000}}]}' ;;
esac
"""


def test_fio_is_asked_where_it_is_installed(
    wide: CliRunner, measurements: Measurements, ssd_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fio = tmp_path / "bin" / "fio"
    fio.parent.mkdir()
    fio.write_text(FIO.replace("a note", ""))
    fio.chmod(fio.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(fio.parent))
    done = wide.invoke(app, ["probe", "--ssd-dir", ssd_dir, "--reference-write", "30"])
    assert done.exit_code == 0, done.output
    rows = {line.split("│")[1].strip(): line for line in done.output.splitlines() if "│" in line}
    assert "10 %" in rows["SSD write"]  # the given rate has priority over the one that fio found
    assert "40 %" in rows["SSD read"]
    fio.write_text("#!/bin/sh\nexit 1\n")
    assert run_fio([ssd_dir]) is None
    fio.write_text(FIO)
    found = run_fio([ssd_dir])
    assert found is not None and found.write_bytes_per_s == 4e9
    fio.write_text(FIO.replace("case", 'case "$*" in *io_uring*) exit 1 ;; esac\ncase', 1))
    assert run_fio([ssd_dir]) == found  # through libaio


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_the_real_fio_over_two_directories(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two:three")]
    for folder in folders:
        folder.mkdir()
    found = run_fio([str(folder) for folder in folders], seconds=1, size_bytes=16 << 20)
    assert found is not None
    for rate in (found.write_bytes_per_s, found.read_bytes_per_s):
        assert rate is not None and rate > 1e6
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
