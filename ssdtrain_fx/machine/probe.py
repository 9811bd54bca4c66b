"""Hardware profiles: measured once per device and path, then read from a file.

hardware = load_hardware("cpu", None)
hardware = probe_and_store("cpu", "/mnt/nvme0").hardware    # measures again, in under a minute
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from pathlib import Path

import torch

from ssdtrain_fx.accelerators import is_accelerator
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.fork_safe_lock import ForkSafeLock
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.machine.other_load import OtherLoad
from ssdtrain_fx.machine.probe_hardware import (
    FullDiskError,
    OnStep,
    SsdDir,
    assumed_hardware,
    device_name,
    ignore,
    measure_hardware,
)
from ssdtrain_fx.machine.probe_kernels import BUSY_KERNEL_S
from ssdtrain_fx.machine.profile_store import (
    DISTURBED_COUNTS_S,
    ProfileKey,
    measuring_alone,
    profile_key,
    profile_path,
    read_profile,
    store_profile,
)
from ssdtrain_fx.runtime.storage.directory import check_directories

log = logging.getLogger(__name__)

MAX_PROBES = 3
"""Maximum number of measurements of a machine that is disturbed."""

_known: dict[str, Hardware] = {}
_full: set[str] = set()
"""Profiles that could not be measured for want of room, of which a warning was logged."""
_known_lock = ForkSafeLock()


def load_hardware(
    device: str, ssd_dir: SsdDir, *, measure: bool = True, interrupted: threading.Event | None = None
) -> Hardware:
    """The profile of ``device`` ("cpu", "cuda" or "cuda:1") and of the file systems that hold ``ssd_dir``.

    It is read from the user's profiles. If none is stored, the machine is measured within seconds and the profile is
    stored. Later calls in this process return the same profile, whatever happens to the file. While other processes
    measure, the call waits for them; it ends with KeyboardInterrupt if ``interrupted`` is set.

    Raises:
        ConfigError: nothing can be written in ``ssd_dir``, or nothing is stored and ``measure`` is False.
    """
    directories = check_directories(ssd_dir)
    key = profile_key(device_name(device), directories)
    identity = str(profile_path(key))
    with _known_lock.current:
        hardware = _known.get(identity) or read_profile(key)
        if hardware is None:
            if not measure:
                raise ConfigError(
                    f"No hardware profile of {key.device} and {', '.join(map(repr, directories))} is stored in "
                    f"{profile_path(key).parent}. "
                    "Run `ssdtrain-fx probe` first."
                )
            try:
                with measuring_alone(interrupted=interrupted):  # the ranks of one run would disturb each other
                    hardware = read_profile(key) or _measure_quickly(device, directories, key)
            except FullDiskError as error:  # training can go on: what cannot be written stays in memory
                if identity not in _full:  # every graph asks
                    _full.add(identity)
                    log.warning("%s Until then, plans assume a drive of 2 GB/s.", error)
                return assumed_hardware(device_name(device), on_gpu=is_accelerator(torch.device(device)))
        _known[identity] = hardware
    return hardware


def _measure_quickly(device: str, directories: tuple[str, ...], key: ProfileKey) -> Hardware:
    """Measure and store. Raises FullDiskError."""
    log.info(
        "measuring %s and the SSD that holds %s; `ssdtrain-fx probe` measures longer",
        key.device,
        ", ".join(directories),
    )
    hardware, disturbance = _measure(device, directories, quick=True)
    if disturbance:
        log.warning(
            "%s: the machine is busy, or torch has more threads than cores. This hardware profile is used by what "
            "starts within %d minutes. `ssdtrain-fx probe` measures longer and stores its result.",
            disturbance,
            DISTURBED_COUNTS_S // 60,
        )
    try:
        return store_profile(key, hardware, replace=False, disturbed=bool(disturbance))
    except OSError as error:
        log.warning(
            "The hardware profile cannot be stored in %s (%s): every process will measure again.",
            profile_path(key).parent,
            error,
        )
        return hardware


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeResult:
    """A profile, the directories that it is for, and the file that stores it."""

    hardware: Hardware
    directories: tuple[str, ...]
    path: Path


def probe_and_store(device: str, ssd_dir: SsdDir, *, quick: bool = False, on_step: OnStep = ignore) -> ProbeResult:
    """Measure and replace the stored profile. A process that has already loaded a profile keeps using it.

    Raises:
        ConfigError: nothing can be written in ``ssd_dir``, or it has too little room.
        OSError: the profile cannot be stored.
    """
    directories = check_directories(ssd_dir)
    key = profile_key(device_name(device), directories)
    path = profile_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)  # fail now rather than in half a minute
    hardware, disturbance = _measure(device, directories, quick=quick, on_step=on_step)
    if disturbance:
        log.warning(
            "%s: the machine is busy, or torch has more threads than cores. The profile is stored all the same. "
            "Measure again when the machine is idle.",
            disturbance,
        )
    return ProbeResult(store_profile(key, hardware, replace=True), directories, path)


def _measure(
    device: str, directories: tuple[str, ...], *, quick: bool, on_step: OnStep = ignore
) -> tuple[Hardware, str]:
    """Measure again while other programs disturb. The faster of all measured values count, and the last disturbance is
    returned, as text."""
    best: Hardware | None = None
    disturbance = ""
    for number in range(MAX_PROBES):
        if number:
            log.info("%s: measuring again", disturbance)
        load = OtherLoad()
        try:
            hardware = measure_hardware(device, directories, quick=quick, on_step=on_step)
        except FullDiskError:
            if best is None:
                raise
            break  # the disk became full in between
        disturbance = load.describe() or _find_disturbance(hardware)
        best = hardware if best is None or not disturbance else _faster(best, hardware)
        if not disturbance:
            break
    assert best is not None
    return best, disturbance


def _faster(one: Hardware, other: Hardware) -> Hardware:
    """A disturbance can only make a machine slower."""

    def rates(name: str) -> dict[str, float]:
        first, second = getattr(one, name), getattr(other, name)
        return {key: max(first[key], second[key]) for key in first}

    def channel(name: str) -> Channel:
        return min(getattr(one, name), getattr(other, name), key=_tensor_s)

    def shorter(name: str) -> float | None:
        found = [value for value in (getattr(one, name), getattr(other, name)) if value is not None]
        return min(found, default=None)

    return dataclasses.replace(
        one,
        **{name: rates(name) for name in ("flops_per_s", "elements_per_s")},
        **{name: channel(name) for name in ("write", "read", "copy_out", "copy_in")},
        **{name: shorter(name) for name in _TIMES},
        memory_bytes_per_s=max(one.memory_bytes_per_s, other.memory_bytes_per_s),
        # A rate together with the share of it that was seen beside: the best of both may not go together.
        share_when_both=min(one, other, key=lambda seen: _tensor_s(seen.write)).share_when_both,
    )


def _tensor_s(channel: Channel) -> float:
    """What a tensor of common size takes.

    The rate alone is too high if a smaller transfer was disturbed: the fitted line then begins higher and rises less.
    """
    return channel.transfer_s(8 << 20)


_TIMES = ("kernel_s", "offload_s", "reload_s", "next_offload_s", "next_reload_s")


def _find_disturbance(hardware: Hardware) -> str:
    """A measured value that only a disturbed machine has, as text; empty if there is none."""
    if hardware.kernel_s > BUSY_KERNEL_S:
        return f"An empty kernel takes {hardware.kernel_s * 1e3:.1f} ms"
    product = hardware.flops_per_s["float32"]
    if product < hardware.memory_bytes_per_s:  # every processor multiplies faster than it reads memory
        return f"A matrix product runs at {product / 1e9:.1f} GFLOP/s"
    return ""
