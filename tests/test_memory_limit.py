"""The memory limit of this process, read from fake trees of /proc and /sys, and what a step may take of it."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ssdtrain_fx import ConfigError, OffloadConfig, config
from ssdtrain_fx.machine.automatic_budget import (
    OPTIMIZER_TENSORS,
    ROUNDED_TO_BYTES,
    automatic_budget,
    trained_parameter_bytes,
)
from ssdtrain_fx.memory_limit import MemoryLimit, read_device_memory, read_memory_limit

MIB = 1 << 20
GIB = 1 << 30
V2_MOUNT = "31 23 0:28 {mounted} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"
V1_MOUNT = "35 31 0:32 {mounted} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n"


class Machine:
    """A machine below ``root`` with 8 of 16 GiB available. The test adds cgroups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", MEMINFO)
        self.write("proc/self/status", "Name:\tpython\nVmSize:\t 3145728 kB\nVmData:\t 1048576 kB\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def mount(self, line: str, mounted: str, cgroup: str) -> None:
        self.write("proc/self/mountinfo", f"22 1 8:1 / / rw - ext4 /dev/root rw\n{line.format(mounted=mounted)}\n")
        self.write("proc/self/cgroup", f"{cgroup}\n")

    def v2(self, path: str, limit: str, used_bytes: int = 0, inactive_bytes: int = 0) -> None:
        directory = f"sys/fs/cgroup{path}"
        self.write(f"{directory}/memory.max", f"{limit}\n")
        self.write(f"{directory}/memory.current", f"{used_bytes}\n")
        self.write(f"{directory}/memory.stat", f"anon 1\ninactive_file {inactive_bytes}\nactive_file 7\n")

    def v1(self, path: str, limit: int, used_bytes: int = 0, inactive_bytes: int = 0) -> None:
        directory = f"sys/fs/cgroup/memory{path}"
        self.write(f"{directory}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{directory}/memory.usage_in_bytes", f"{used_bytes}\n")
        self.write(f"{directory}/memory.stat", f"inactive_file 3\ntotal_inactive_file {inactive_bytes}\n")

    def read(self, limits: Mapping[int, int] | None = None) -> MemoryLimit | None:
        limits = {} if limits is None else limits
        return read_memory_limit(root=self.root, soft_limit=lambda kind: limits.get(kind, resource.RLIM_INFINITY))


@pytest.fixture
def fake(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_limit_the_machine_is_the_limit(fake: Machine) -> None:
    fake.mount(V2_MOUNT, "/", "0::/job")
    fake.v2("/job", "max")
    assert fake.read() == MemoryLimit(limit_bytes=16 * GIB, used_bytes=8 * GIB, source="MemAvailable of the machine")


def test_v2_page_cache_that_can_be_dropped_is_not_used(fake: Machine) -> None:
    fake.mount(V2_MOUNT, "/", "0::/job")
    fake.v2("/job", str(4 * GIB), used_bytes=3 * GIB, inactive_bytes=2 * GIB)
    found = fake.read()
    assert found == MemoryLimit(limit_bytes=4 * GIB, used_bytes=GIB, source="cgroup v2 /sys/fs/cgroup/job/memory.max")
    assert found.left_bytes == 3 * GIB
    assert str(found) == "3.00 GiB are left of 4.00 GiB (cgroup v2 /sys/fs/cgroup/job/memory.max)"


@pytest.mark.parametrize("tightest", ["", "/slice", "/slice/job"])
def test_every_ancestor_counts(fake: Machine, tightest: str) -> None:
    """The mount point counts too: in a container, it is the cgroup of the container."""
    fake.mount(V2_MOUNT, "/", "0::/slice/job")
    for path in ("", "/slice", "/slice/job"):
        fake.v2(path, str(GIB if path == tightest else 2 * GIB))
    found = fake.read()
    assert found is not None
    assert (found.limit_bytes, found.source) == (GIB, f"cgroup v2 /sys/fs/cgroup{tightest}/memory.max")


def test_a_large_limit_that_others_have_used_up_is_tighter_than_a_small_one(fake: Machine) -> None:
    fake.mount(V2_MOUNT, "/", "0::/slice/job")
    fake.v2("/slice", str(4 * GIB), used_bytes=4 * GIB - 100 * MIB)
    fake.v2("/slice/job", str(GIB), used_bytes=300 * MIB)
    found = fake.read()
    assert found is not None
    assert (found.limit_bytes, found.left_bytes) == (4 * GIB, 100 * MIB)


def test_the_machine_is_tighter_than_a_container_that_is_allowed_more(fake: Machine) -> None:
    fake.mount(V2_MOUNT, "/", "0::/job")
    fake.v2("/job", str(64 * GIB))
    found = fake.read()
    assert found is not None and found.source == "MemAvailable of the machine"


def test_v1_counts_the_subtree_and_no_limit_is_a_large_number(fake: Machine) -> None:
    fake.mount(V1_MOUNT, "/", "5:cpu:/elsewhere\n4:hugetlb,memory:/slice/job\n0::/")
    fake.v1("", 9223372036854771712)
    fake.v1("/slice", 2 * GIB, used_bytes=GIB, inactive_bytes=GIB // 2)
    fake.v1("/slice/job", 9223372036854771712)
    assert fake.read() == MemoryLimit(
        limit_bytes=2 * GIB,
        used_bytes=GIB // 2,
        source="cgroup v1 /sys/fs/cgroup/memory/slice/memory.limit_in_bytes",
    )


@pytest.mark.parametrize(
    ("mounted", "path"),
    [
        pytest.param("/docker/abc", "/docker/abc", id="the container is what is mounted"),
        pytest.param("/", "/docker/abc", id="the path of the host does not exist below the mount"),
        pytest.param("/docker/abc", "/", id="a cgroup namespace"),
        pytest.param("/docker/abc", "/../other", id="the process is outside of the namespace"),
    ],
)
def test_in_a_container_the_mount_is_the_cgroup(fake: Machine, mounted: str, path: str) -> None:
    fake.mount(V2_MOUNT, mounted, f"0::{path}")
    fake.v2("", str(GIB), used_bytes=MIB)
    assert fake.read() == MemoryLimit(limit_bytes=GIB, used_bytes=MIB, source="cgroup v2 /sys/fs/cgroup/memory.max")


def test_a_cgroup_inside_a_container(fake: Machine) -> None:
    fake.mount(V2_MOUNT, "/docker/abc", "0::/docker/abc/job")
    fake.v2("/job", str(GIB))
    found = fake.read()
    assert found is not None and found.source == "cgroup v2 /sys/fs/cgroup/job/memory.max"


def test_both_versions_at_once_and_a_mount_point_with_a_space(fake: Machine) -> None:
    mounts = f"{V1_MOUNT}\n41 31 0:38 / /sys/fs/c\\040group rw - cgroup2 cgroup2 rw"
    fake.mount(mounts, "/", "4:memory:/job\n0::/job")
    fake.v1("/job", 2 * GIB)
    for name, value in (("max", GIB), ("current", 0)):
        fake.write(f"sys/fs/c group/job/memory.{name}", f"{value}\n")
    found = fake.read()
    assert found is not None and found.source == "cgroup v2 /sys/fs/c group/job/memory.max"


def test_resource_limits(fake: Machine) -> None:
    limits = {resource.RLIMIT_DATA: 5 * GIB, resource.RLIMIT_AS: 6 * GIB}
    assert fake.read(limits) == MemoryLimit(limit_bytes=6 * GIB, used_bytes=3 * GIB, source="RLIMIT_AS")
    del limits[resource.RLIMIT_AS]
    assert fake.read(limits) == MemoryLimit(limit_bytes=5 * GIB, used_bytes=GIB, source="RLIMIT_DATA")


def test_a_limit_that_is_exceeded_leaves_nothing() -> None:
    assert MemoryLimit(limit_bytes=1, used_bytes=2, source="").left_bytes == 0


def test_a_system_that_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_memory_limit(root=tmp_path, soft_limit=lambda _: resource.RLIM_INFINITY) is None
    monkeypatch.setattr(config, "read_memory_limit", lambda **_: None)
    with pytest.raises(ConfigError, match=r"is 'auto', but the system shows no limit.*Give a number of bytes"):
        OffloadConfig(memory_budget_bytes="auto").find_budget()


def test_this_process_has_a_limit() -> None:
    found = read_memory_limit()
    assert found is not None
    assert 0 < found.left_bytes <= found.limit_bytes


def test_device_memory_that_torch_can_use_again_is_not_used() -> None:
    cuda = SimpleNamespace(
        mem_get_info=lambda _: (2 * GIB, 8 * GIB), memory_reserved=lambda _: 3 * GIB, memory_allocated=lambda _: GIB
    )
    assert read_device_memory(torch.device("cuda", 0), cuda) == MemoryLimit(
        limit_bytes=8 * GIB, used_bytes=4 * GIB, source="memory of cuda:0"
    )


# What a step may take


def test_an_automatic_budget_leaves_room_for_the_optimizer_and_is_rounded_down() -> None:
    limit = MemoryLimit(limit_bytes=4 * GIB, used_bytes=3 * GIB, source="a limit")
    budget = automatic_budget(limit, trained_bytes=100 * MIB)
    assert budget.size_bytes % ROUNDED_TO_BYTES == 0
    left_bytes = limit.left_bytes - OPTIMIZER_TENSORS * 100 * MIB
    assert 0.7 * left_bytes < budget.size_bytes < left_bytes
    assert budget.limit == (
        "1.00 GiB are left of 4.00 GiB (a limit); 302.40 MiB of it are reserved for the optimizer and others"
    )
    assert automatic_budget(limit, trained_bytes=GIB).size_bytes == 0


def test_equal_containers_get_equal_budgets() -> None:
    used = (900 * MIB, 903 * MIB)
    one, other = (
        automatic_budget(MemoryLimit(limit_bytes=4 * GIB, used_bytes=used_bytes, source=""), trained_bytes=0)
        for used_bytes in used
    )
    assert one.size_bytes == other.size_bytes


def test_only_parameters_that_are_trained_count_and_shared_ones_once() -> None:
    weight, frozen = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(8), requires_grad=False)
    x = torch.ones(2, requires_grad=True)
    assert trained_parameter_bytes([weight, frozen, x, weight, 3]) == 64
