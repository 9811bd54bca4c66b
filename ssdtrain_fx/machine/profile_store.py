"""Stores hardware profiles: one small JSON file per machine, device and file system (or set of file systems).

The files are in ``$SSDTRAIN_PROFILE_DIR``, else ``$XDG_CACHE_HOME/ssdtrain_fx``, else ``~/.cache/ssdtrain_fx``.

The key has many parts, because machines may share a home directory and drives may exchange their names when a machine
restarts. When any part differs, the machine is measured again, which takes seconds. The profile of another drive would
mislead every plan.

Guarantees:

* A file exists completely or not at all: it is written under a temporary name and renamed.
* Processes that measure at the same time end up with the same profile, the one that was stored first.
* Processes that load a profile that is not stored measure one after the other, where a directory can be locked. If the
  first could store its profile, the others read it.
* A profile of a disturbed machine counts for minutes: long enough for the ranks of one run, and no later run gets it.
* A file that cannot be read or written costs a warning and a measurement, never an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.machine.system import cpu_model
from ssdtrain_fx.whole_file import written_beside

log = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "SSDTRAIN_PROFILE_DIR"
FORMAT = 9
WAIT_S = 120.0
"""How long a process waits for others to measure. Each takes seconds, unless its disk hangs."""
DISTURBED_COUNTS_S = 600.0
"""How long a profile counts that was measured beside other programs. A guess."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProfileKey:
    """What a profile is valid for. No field changes when the machine restarts."""

    device: str
    processor: str
    cores: int
    """Cores that this process may use."""
    threads: int
    """``torch.get_num_threads()``."""
    torch_version: str
    file_system: str

    @property
    def file_name(self) -> str:
        """A readable file name, different for every key."""
        return key_file_name(dataclasses.asdict(self))


def key_file_name(key: Mapping[str, Any]) -> str:
    """A file name for what is stored under ``key``, which has ``device`` and ``threads``."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', key['device'])}-{key['threads']}-threads-{digest[:16]}.json"


def profile_key(device_name: str, directories: Sequence[str]) -> ProfileKey:
    """The key of this process on this machine, for tensors striped over existing ``directories`` in any order."""
    return ProfileKey(
        device=device_name,
        processor=cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        file_system=" + ".join(sorted(_file_system(directory) for directory in directories)),
    )


def profile_directory() -> Path:
    """The directory of all profiles. It may not exist."""
    if chosen := os.environ.get(DIRECTORY_VARIABLE):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    return (Path(cache) if Path(cache).is_absolute() else Path("~/.cache").expanduser()) / "ssdtrain_fx"


def profile_path(key: ProfileKey) -> Path:
    return profile_directory() / key.file_name


def read_profile(key: ProfileKey) -> Hardware | None:
    """The stored profile. None if there is none, or, with a warning, if it cannot be used."""
    path = profile_path(key)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        log.warning("The hardware profile %s cannot be read (%s); measuring again.", path, error)
        return None
    try:
        raw = cast(dict[str, Any], json.loads(text))
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']}, expected {FORMAT}")
        if raw["key"] != dataclasses.asdict(key):
            raise ValueError(f"its key is {raw['key']}, expected {dataclasses.asdict(key)}")
        if raw.get("disturbed") and not 0 <= time.time() - path.stat().st_mtime <= DISTURBED_COUNTS_S:
            return None
        return Hardware.from_json(json.dumps(raw["hardware"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("The hardware profile %s cannot be used (%s); measuring again.", path, error)
        return None


def was_disturbed(key: ProfileKey) -> bool:
    """Whether the stored profile was measured beside other programs. False if there is none that can be read."""
    try:
        return bool(json.loads(profile_path(key).read_text(encoding="utf-8")).get("disturbed"))
    except (OSError, ValueError, AttributeError):
        return False


def store_profile(key: ProfileKey, hardware: Hardware, *, replace: bool, disturbed: bool = False) -> Hardware:
    """Store ``hardware`` and return the profile to use.

    Without ``replace``, a profile that another process has stored first is kept and returned. A ``disturbed`` one was
    measured beside other programs.

    Raises:
        OSError: the profile cannot be stored; no part of it remains.
    """
    path = profile_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "key": dataclasses.asdict(key), "hardware": json.loads(hardware.to_json())}
    if disturbed:
        content["disturbed"] = True
    with written_beside(path, json.dumps(content, indent=1, sort_keys=True) + "\n") as temporary:
        if not replace:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
                return hardware
            other = read_profile(key)
            if other is not None and (disturbed or not was_disturbed(key)):
                return other
        temporary.replace(path)
        return hardware


@contextlib.contextmanager
def measuring_alone(wait_s: float = WAIT_S, *, interrupted: threading.Event | None = None) -> Generator[None]:
    """A block that runs in one process at a time, of those that store profiles in the same directory.

    After ``wait_s``, or where a directory cannot be locked, as on NFS, it runs anyway. Raises KeyboardInterrupt while
    it waits if ``interrupted`` is set.
    """
    interrupted = threading.Event() if interrupted is None else interrupted
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            directory = profile_directory()
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            end_s = time.monotonic() + wait_s
            while not _try_lock(descriptor) and time.monotonic() < end_s:
                if interrupted.wait(0.05):
                    raise KeyboardInterrupt
            stack.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)  # a forked child may have inherited the descriptor
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# -- what identifies the machine ---------------------------------------------------------------------------------------


def _file_system(directory: str) -> str:
    """Type, source, size and identifiers of the file system and its drive, as far as the system reports them.

    ``f_fsid`` comes from the UUID for ext4 and btrfs, but from the device number for xfs. So the links in
    ``/dev/disk/by-uuid`` and the identifiers of the drive are included too. ``st_dev`` is not: it changes at restarts.
    """
    status = os.statvfs(directory)
    device = Path(directory).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kind, source = _mount(number)
    parts = [kind, source, f"fsid={status.f_fsid:x}", f"bytes={status.f_blocks * status.f_frsize}"]
    parts += [f"uuid={uuid}" for uuid in _uuids(source)]
    block = Path("/sys/dev/block") / number
    with contextlib.suppress(OSError):
        block = block.resolve(strict=True)
        for name in ("wwid", "device/wwid", "device/serial", "device/model"):
            for owner in (block, block.parent):  # a partition, and the drive that it is on
                with contextlib.suppress(OSError):
                    parts.append(f"{name}={(owner / name).read_text(errors='replace').strip()}")
    return " ".join(part for part in parts if part)


def _mount(number: str) -> tuple[str, str]:
    """Type and source of the mounted file system with this device number; empty if the system does not report them."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return "", ""
    found = ("", "")
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split(" ")[2:3] == [number]:
            kind, source, *_ = [*rest.split(" "), ""]
            found = (kind, source)
    return found


def _uuids(source: str) -> list[str]:
    """Names in ``/dev/disk/by-uuid`` that link to ``source``."""
    directory = Path("/dev/disk/by-uuid")
    try:
        return sorted(link.name for link in directory.iterdir() if link.resolve() == Path(source).resolve())
    except OSError:
        return []
