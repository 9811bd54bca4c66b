"""How much memory this process may use: the tightest of all limits that the system sets.

    source                      limit                    used
    cgroup v2, every ancestor   memory.max               memory.current - inactive_file
    cgroup v1, every ancestor   memory.limit_in_bytes    memory.usage_in_bytes - total_inactive_file
    RLIMIT_DATA, RLIMIT_AS      the soft limit           VmData, VmSize of this process
    the machine                 MemTotal                 MemTotal - MemAvailable

The limit that leaves the least memory counts. That is not always the smallest one: a large cgroup may be nearly full of
other processes, and a container may be allowed more than its machine has. A cgroup counts everything in it. Page cache
that the kernel can drop at once is not counted as used.

``/proc/self/cgroup`` names the cgroup by its path in a hierarchy, and ``/proc/self/mountinfo`` says which part of that
hierarchy is mounted where. In a container, the path may lie outside what is mounted. The root of the mount is then the
cgroup of the container.
"""

from __future__ import annotations

import dataclasses
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ssdtrain_fx.accelerators import device_functions
from ssdtrain_fx.units import format_bytes

UNLIMITED_BYTES = 1 << 62
"""Limits from here on mean that there is none. cgroup v1 shows the largest multiple of a page below 2**63."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """One limit, and how much of it is used."""

    limit_bytes: int
    used_bytes: int
    """What counts against the limit now, without page cache that the kernel can drop at once."""
    source: str
    """A name for people, such as ``cgroup v2 /sys/fs/cgroup/job/memory.max``."""
    ranks: int = 1
    """How many ranks of a distributed run share what is left."""

    @property
    def left_bytes(self) -> int:
        """What is left for each of the ``ranks``."""
        return max(0, self.limit_bytes - self.used_bytes) // self.ranks

    def __str__(self) -> str:
        for_each = f" for each of {self.ranks} ranks" if self.ranks > 1 else ""
        left, limit = format_bytes(self.left_bytes), format_bytes(self.limit_bytes)
        return f"{left} are left{for_each} of {limit} ({self.source})"


def read_memory_limit(
    *,
    ranks: int = 1,
    root: Path = Path("/"),
    soft_limit: Callable[[int], int] = lambda kind: resource.getrlimit(kind)[0],
) -> MemoryLimit | None:
    """The limit that leaves this process the least memory. None if the system shows no limit at all.

    Args:
        ranks: the ranks of a distributed run on this machine. They share all limits but those of a process.
        root: the directory that contains ``proc``, and below which the mount points are.
        soft_limit: the soft limit of a resource, such as ``RLIMIT_DATA``.
    """
    shared = (dataclasses.replace(limit, ranks=ranks) for limit in (*_cgroup_limits(root), *_machine_limits(root)))
    found = [*shared, *_process_limits(root, soft_limit)]
    return min(found, key=lambda limit: limit.left_bytes, default=None)


def read_device_memory(device: torch.device, functions: Any = None) -> MemoryLimit:
    """The memory of an accelerator. Memory that torch's allocator holds and can use again is not counted as used.

    ``functions`` replaces those of the device.
    """
    functions = functions or device_functions(device.type)
    free_bytes, total_bytes = functions.mem_get_info(device)
    reusable_bytes = functions.memory_reserved(device) - functions.memory_allocated(device)
    return MemoryLimit(
        limit_bytes=total_bytes,
        used_bytes=max(0, total_bytes - free_bytes - reusable_bytes),
        source=f"memory of {device}",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class CgroupVersion:
    """The files of one version of cgroups."""

    name: str
    limit: str
    usage: str
    inactive_file: str
    """The field of ``memory.stat``, over the whole subtree."""


V1 = CgroupVersion("cgroup v1", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = CgroupVersion("cgroup v2", "memory.max", "memory.current", "inactive_file")


def find_cgroups(root: Path = Path("/")) -> Iterator[tuple[CgroupVersion, tuple[Path, ...]]]:
    """The cgroup of this process and its ancestors as far as they are mounted, in each hierarchy that is mounted."""
    paths = _cgroup_paths(root)
    for version, mounted, mount_point in _cgroup_mounts(root):
        if version.name not in paths:
            continue
        top = root / mount_point.relative_to("/")
        path = paths[version.name]
        inside = path.relative_to(mounted) if path.is_relative_to(mounted) else PurePosixPath()
        own = top / inside if (top / inside).is_dir() else top
        yield version, tuple(directory for directory in (own, *own.parents) if directory.is_relative_to(top))


def _cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    for version, directories in find_cgroups(root):
        for directory in directories:
            limit = _cgroup_limit(version, directory, "/" / directory.relative_to(root))
            if limit is not None:
                yield limit


def _cgroup_paths(root: Path) -> dict[str, PurePosixPath]:
    """The path of this process in both hierarchies, by the name of the version."""
    paths: dict[str, PurePosixPath] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[V2.name] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths[V1.name] = PurePosixPath(path)
    return paths


def _cgroup_mounts(root: Path) -> Iterator[tuple[CgroupVersion, PurePosixPath, PurePosixPath]]:
    """Version, mounted part of the hierarchy, and mount point of every mount that may have memory limits."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
        mounted, mount_point = (PurePosixPath(_unescape(field)) for field in fields[3:5])
        if kind == "cgroup2":
            yield V2, mounted, mount_point
        elif kind == "cgroup" and "memory" in options.split(","):
            yield V1, mounted, mount_point


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _cgroup_limit(version: CgroupVersion, directory: Path, shown: Path) -> MemoryLimit | None:
    limit_bytes = _number(_read(directory / version.limit))  # "max" is no number
    usage_bytes = _number(_read(directory / version.usage))
    if limit_bytes is None or usage_bytes is None or limit_bytes >= UNLIMITED_BYTES:
        return None
    stat = dict(line.split(" ", 1) for line in _read(directory / "memory.stat").splitlines() if " " in line)
    inactive_bytes = _number(stat.get(version.inactive_file, "")) or 0
    return MemoryLimit(
        limit_bytes=limit_bytes,
        used_bytes=max(0, usage_bytes - inactive_bytes),
        source=f"{version.name} {shown / version.limit}",
    )


def _process_limits(root: Path, soft_limit: Callable[[int], int]) -> Iterator[MemoryLimit]:
    sizes = _kib_fields(root / "proc/self/status")
    for name, kind, field in (
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
    ):
        limit_bytes = soft_limit(kind)
        if limit_bytes != resource.RLIM_INFINITY and limit_bytes < UNLIMITED_BYTES:
            yield MemoryLimit(limit_bytes=limit_bytes, used_bytes=sizes.get(field, 0), source=name)


def _machine_limits(root: Path) -> Iterator[MemoryLimit]:
    sizes = _kib_fields(root / "proc/meminfo")
    if "MemTotal" in sizes and "MemAvailable" in sizes:
        yield MemoryLimit(
            limit_bytes=sizes["MemTotal"],
            used_bytes=max(0, sizes["MemTotal"] - sizes["MemAvailable"]),
            source="MemAvailable of the machine",
        )


def _kib_fields(path: Path) -> dict[str, int]:
    """The fields of a file of lines such as ``VmData:  1024 kB``, in bytes."""
    return {name: 1024 * int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", _read(path), re.MULTILINE)}


def _read(path: Path) -> str:
    """The text of a file; "" if it is not there or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
