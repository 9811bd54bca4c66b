"""The doctor: checks whether a machine and a directory are suitable for offloading, and says what to change.

Guarantees:

* Checks that may hang run in separate processes (``doctor_probes``), all at once, and are stopped after a time limit.
  This module imports only what the package needs anyway, and does not initialise CUDA.
* The doctor changes nothing and leaves no file on disk.
* A check that fails is reported as a finding like the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch

from ssdtrain_fx.doctor import probes as doctor_probes
from ssdtrain_fx.machine.profile_store import profile_directory, profile_key, profile_path, read_profile, was_disturbed
from ssdtrain_fx.machine.system import cpu_model
from ssdtrain_fx.runtime.lanes.aio.kernel import QUEUE_DEPTH
from ssdtrain_fx.runtime.memory.staging import PINNED_BUDGET_BYTES
from ssdtrain_fx.runtime.storage.directory import DIRECTORY_VARIABLE, MEMORY_FILE_SYSTEMS, is_network_file_system
from ssdtrain_fx.units import format_bytes

Status = Literal["ok", "warning", "problem"]
Answer = dict[str, Any]
Ask = Callable[..., Answer]

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)
LITTLE_BYTES = 20 << 30
"""A training step of a model that needs offloading easily writes this much. A guess."""
TOO_LITTLE_BYTES = 1 << 30
SLOW_OPTIONS = {
    "sync": "every write waits for the drive: mount without sync",
    "dirsync": "every change of a directory waits for the drive: mount without dirsync",
    "data=journal": "ext4 writes everything twice and without direct I/O: mount with data=ordered",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """What to change; empty if nothing needs to change."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where to find the kernel's files. Tests use other directories."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")


def examine(directories: Sequence[str], *, timeout_s: float, machine: Machine | None = None) -> list[Finding]:
    """Run all checks. ``timeout_s`` limits the time for each of the two rounds of questions.

    Args:
        directories: directories for spill files; empty means those that the backend would use.
    """
    machine = Machine() if machine is None else machine
    directories = directories or _default_directories()
    with Questions(timeout_s) as questions:
        driver = questions.ask("driver")
        kvikio = questions.ask("kvikio")
        answers = [questions.ask("directory", directory) for directory in directories]
        driver_answer, kvikio_answer = driver(), kvikio()
        findings = [
            _sure("torch", lambda: check_torch(torch.__version__)),
            _sure("CUDA", lambda: check_cuda(torch.version.cuda, driver_answer)),
            _sure("driver", lambda: check_driver(driver_answer, machine)),
            _sure("KvikIO", lambda: check_kvikio(kvikio_answer, driver_answer)),
            _sure("GPUDirect Storage", lambda: check_gds(kvikio_answer, driver_answer, machine)),
            _sure("processor", lambda: check_cores(len(os.sched_getaffinity(0)), cpu_model())),
            _sure("locked memory", lambda: check_locked_memory(_locked_limit(), driver_answer)),
            _sure("AIO requests", lambda: check_aio(machine)),
            _sure("huge pages", lambda: check_huge_pages(machine)),
        ]
        found = [answer() for answer in answers]
        for name, answer in zip(directories, found, strict=True):
            findings += check_directory(name, answer)
            if "free_bytes" in answer:
                drive = find_drive(answer["device"], machine)
                findings.append(_sure("drive", lambda drive=drive: check_drive(drive, machine)))
                findings.append(_sure("endurance", lambda drive=drive: check_endurance(drive, questions)))
        if all("free_bytes" in answer for answer in found):
            paths = [answer["path"] for answer in found]
            findings.append(_sure("profile", lambda: check_profile(paths, driver_answer)))
    return findings


# -- asking ------------------------------------------------------------------------------------------------------------


class Questions:
    """Starts one process per question, and waits a limited time for its answer: JSON on its stdout.

    If there is no answer, the result is ``{"silent": why}``.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Questions:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            _end(process)

    def ask(self, name: str, *arguments: str) -> Callable[[], Answer]:
        """Start a probe of ``doctor_probes``. The returned function waits for its answer."""
        return self.run([sys.executable, "-P", doctor_probes.__file__, name, *arguments])

    def run(self, command: Sequence[str]) -> Callable[[], Answer]:
        """Start a program. The returned function waits for its answer."""
        began_s = time.monotonic()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that _end also kills its child processes
            )
        except OSError as error:
            reason = str(error)
            return lambda: {"silent": reason}
        self._processes.append(process)

        def wait() -> Answer:
            try:
                output, errors = process.communicate(timeout=max(0.0, began_s + self.timeout_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                _end(process)
                return {"silent": f"no answer within {self.timeout_s:g} s"}
            if process.returncode != 0:
                lines = errors.decode(errors="replace").strip().splitlines()
                how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
                return {"silent": f"{how}: {lines[-1]}" if lines else how}
            try:
                return cast(Answer, json.loads(output))
            except ValueError:
                return {"silent": f"output is not JSON: {output[:80]!r}"}

        return wait


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children. A process stuck in the kernel is left behind: waiting for it would hang too."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _default_directories() -> list[str]:
    """The choice of :func:`ssdtrain_fx.runtime.storage.directory.check_directories`, without accessing any
    directory."""
    return [path for path in os.environ.get(DIRECTORY_VARIABLE, "").split(os.pathsep) if path] or [""]


def _sure(name: str, check: Callable[[], Finding]) -> Finding:
    """Run a check and turn its errors into a finding, so that the other checks still run on an unusual system."""
    try:
        return check()
    except (OSError, ValueError, KeyError, IndexError) as error:
        return Finding(name=name, status="warning", found=f"check failed: {error!r}")


def _locked_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


# -- the processor, the GPU, the kernel --------------------------------------------------------------------------------


def check_torch(version: str) -> Finding:
    """``version`` is ``torch.__version__``."""
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST_TORCH, NEWEST_TORCH))
    number = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if number < OLDEST_TORCH:
        advice = f"supported versions: {oldest} to {newest}; run pip install 'torch>={oldest}'"
        return Finding(name="torch", status="problem", found=version, advice=advice)
    if number > NEWEST_TORCH:
        advice = f"supported versions: {oldest} to {newest}; newer versions are untested"
        return Finding(name="torch", status="warning", found=version, advice=advice)
    return Finding(name="torch", status="ok", found=version)


def check_cuda(built_for: str | None, driver: Answer) -> Finding:
    """``built_for`` is ``torch.version.cuda``."""
    gpus: list[str] = driver.get("gpus", [])
    if built_for is None:
        if gpus:
            advice = "only CPU tensors can be offloaded: to use the GPU, install a torch built for CUDA"
            return Finding(name="CUDA", status="warning", found=f"torch without CUDA, but {gpus[0]}", advice=advice)
        return Finding(name="CUDA", status="ok", found="torch without CUDA: CPU tensors are offloaded")
    if not gpus:
        return Finding(name="CUDA", status="ok", found=f"torch for CUDA {built_for}, no GPU: CPU tensors are offloaded")
    found = f"torch for CUDA {built_for}, {len(gpus)} x {gpus[0]}"
    if int(driver["cuda"].split(".")[0]) < int(built_for.split(".")[0]):
        advice = f"the driver supports CUDA {driver['cuda']}: update the driver, or install a torch for that version"
        return Finding(name="CUDA", status="problem", found=found, advice=advice)
    return Finding(name="CUDA", status="ok", found=found)


def check_driver(driver: Answer, machine: Machine) -> Finding:
    if "silent" in driver:
        advice = "the driver hangs or crashes: check dmesg and nvidia-smi, then restart the machine"
        return Finding(name="driver", status="problem", found=driver["silent"], advice=advice)
    version = machine.proc / "driver" / "nvidia" / "version"
    loaded = re.search(r"Module.*?\s(\d[\d.]+)", version.read_text()) if version.exists() else None
    if "missing" in driver:
        if loaded:
            advice = "install the driver's libcuda.so.1, or pass it into the container (--gpus all)"
            return Finding(
                name="driver", status="problem", found=f"{loaded[1]} is loaded, but libcuda is missing", advice=advice
            )
        return Finding(name="driver", status="ok", found="no NVIDIA driver; CPU tensors need none")
    if "init_error" in driver:
        code = driver["init_error"]
        if code == 100:
            return Finding(name="driver", status="ok", found="libcuda finds no GPU (error 100)")
        advice = "check nvidia-smi: libcuda and the kernel module must have the same version"
        return Finding(name="driver", status="problem", found=f"cuInit fails with error {code}", advice=advice)
    return Finding(name="driver", status="ok", found=f"{loaded[1] if loaded else 'present'}, CUDA {driver['cuda']}")


def check_kvikio(kvikio: Answer, driver: Answer) -> Finding:
    if "silent" in kvikio:
        advice = 'reinstall it (pip install "ssdtrain-fx[gds]"), or set io="posix"'
        status: Status = "problem" if driver.get("gpus") else "warning"
        return Finding(name="KvikIO", status=status, found=f"import fails: {kvikio['silent']}", advice=advice)
    if not kvikio["installed"]:
        return Finding(name="KvikIO", status="ok", found="not installed: transfers go through host memory")
    return Finding(name="KvikIO", status="ok", found=_version_of("kvikio-cu13", "kvikio-cu12", "kvikio"))


def check_gds(kvikio: Answer, driver: Answer, machine: Machine) -> Finding:
    """GPUDirect Storage needs a GPU, the kernel module nvidia-fs and KvikIO, and KvikIO must report it as available."""
    modules = machine.proc / "modules"
    loaded = modules.exists() and re.search(r"^nvidia_fs\s", modules.read_text(), re.MULTILINE) is not None
    missing = [
        reason
        for reason, holds in (
            ("there is no usable GPU", not driver.get("gpus")),
            ("KvikIO cannot be imported", "silent" in kvikio),
            ("KvikIO is not installed", kvikio.get("installed") is False),
            ("the kernel module nvidia-fs is not loaded", not loaded),
            ("KvikIO reports it as unavailable", kvikio.get("installed") and not kvikio.get("gds")),
        )
        if holds
    ]
    if not missing:
        return Finding(name="GPUDirect Storage", status="ok", found="usable")
    # Never a problem: without GPUDirect Storage, a GPU transfers through host memory.
    advice = "for the direct path install nvidia-fs and ssdtrain-fx[gds]" if driver.get("gpus") else ""
    return Finding(name="GPUDirect Storage", status="ok", found=f"not usable: {'; '.join(missing)}", advice=advice)


def check_cores(cores: int, model: str) -> Finding:
    found = f"{cores} cores for this process{f', {model}' if model else ''}"
    if cores < 2:
        advice = "I/O threads compete with compute: give the process a second core"
        return Finding(name="processor", status="warning", found=found, advice=advice)
    return Finding(name="processor", status="ok", found=found)


def check_locked_memory(limit_bytes: int, driver: Answer) -> Finding:
    """Pinned staging memory counts towards the limit on some systems. CPU tensors need no pinned memory."""
    if limit_bytes == resource.RLIM_INFINITY:
        return Finding(name="locked memory", status="ok", found="unlimited")
    found = f"at most {format_bytes(limit_bytes)} (ulimit -l)"
    if driver.get("gpus") and limit_bytes < PINNED_BUDGET_BYTES:
        advice = f"staging pins up to {format_bytes(PINNED_BUDGET_BYTES)}: raise ulimit -l, or lower host_budget_bytes"
        return Finding(name="locked memory", status="warning", found=found, advice=advice)
    return Finding(name="locked memory", status="ok", found=found)


def check_aio(machine: Machine) -> Finding:
    """Only ``io="aio"`` needs free AIO requests."""
    in_use, limit = (int((machine.proc / "sys" / "fs" / name).read_text()) for name in ("aio-nr", "aio-max-nr"))
    found = f"{in_use} of {limit} in use"
    if limit - in_use < QUEUE_DEPTH:
        advice = 'io="aio" falls back to threads: run sysctl fs.aio-max-nr=1048576'
        return Finding(name="AIO requests", status="warning", found=found, advice=advice)
    return Finding(name="AIO requests", status="ok", found=found)


def check_huge_pages(machine: Machine) -> Finding:
    setting = machine.sys / "kernel" / "mm" / "transparent_hugepage" / "enabled"
    chosen = re.search(r"\[(\w+)\]", setting.read_text()) if setting.exists() else None
    found = chosen[1] if chosen else "not supported by the kernel"
    if found in ("always", "madvise"):
        return Finding(name="huge pages", status="ok", found=f"transparent huge pages: {found}")
    advice = "transfers take more CPU time: run echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding(name="huge pages", status="warning", found=f"transparent huge pages: {found}", advice=advice)


# -- a directory -------------------------------------------------------------------------------------------------------


def check_directory(name: str, answer: Answer) -> list[Finding]:
    """Turn the answer of the probe ``directory`` for ``name`` into findings."""
    if "silent" in answer:
        advice = "the file system does not answer or denies access: choose another directory on a local SSD"
        found = f"{name or 'temporary directory'}: {answer['silent']}"
        return [Finding(name="directory", status="problem", found=found, advice=advice)]
    if "missing" in answer:
        create = "create it, or " if answer["missing"] == "does not exist" else ""
        advice = f"{create}choose another directory with --ssd-dir"
        found = f"{answer['path']} {answer['missing']}"
        return [Finding(name="directory", status="problem", found=found, advice=advice)]
    return list(_check_existing(answer))


def _check_existing(answer: Answer) -> Iterator[Finding]:
    mount, path = answer["mount"], answer["path"]
    kind, options = mount["type"], mount["options"]
    found = f"{path} on {kind}{' of ' + mount['source'] if mount['source'] else ''}"
    if kind in MEMORY_FILE_SYSTEMS:
        advice = "this file system is in memory, so offloading frees no memory: choose a directory on an SSD"
        yield Finding(name="directory", status="problem", found=found, advice=advice)
    elif is_network_file_system(kind):
        advice = "a network or user-space file system is slow, and others may read the data: choose a local SSD"
        yield Finding(name="directory", status="warning", found=found, advice=advice)
    elif kind == "overlay":
        advice = "this is the container's own layer: mount a directory of the host's SSD into the container"
        yield Finding(name="directory", status="warning", found=found, advice=advice)
    else:
        yield Finding(name="directory", status="ok", found=found)

    reason = answer["direct"]
    if not reason:
        yield Finding(name="direct I/O", status="ok", found="O_DIRECT works: one block written and read back")
    elif "ro" in options or "ermission" in reason or "ead-only" in reason:
        advice = "make the directory writable for this user, or choose another one"
        yield Finding(name="direct I/O", status="problem", found=f"no file can be written: {reason}", advice=advice)
    else:
        advice = "the page cache is used, which costs memory and CPU time: choose ext4 or XFS on a local SSD"
        yield Finding(name="direct I/O", status="warning", found=f"O_DIRECT does not work: {reason}", advice=advice)

    free_bytes = answer["free_bytes"]
    found = f"{format_bytes(free_bytes)} free of {format_bytes(answer['size_bytes'])}"
    if free_bytes < LITTLE_BYTES:
        advice = "tensors that do not fit stay in memory: free some space, or choose another directory"
        status: Status = "problem" if free_bytes < TOO_LITTLE_BYTES else "warning"
        yield Finding(name="free space", status=status, found=found, advice=advice)
    else:
        yield Finding(name="free space", status="ok", found=found)

    slow = [SLOW_OPTIONS[option] for option in options if option in SLOW_OPTIONS]
    status = "warning" if slow else "ok"
    yield Finding(name="mount options", status=status, found=",".join(options), advice="; ".join(slow))

    leftovers = answer["leftovers"]
    if leftovers:
        shown = ", ".join(leftovers[:3]) + (", ..." if len(leftovers) > 3 else "")
        advice = "processes died before they could unlink these files: remove them"
        yield Finding(name="leftovers", status="warning", found=f"{len(leftovers)}: {shown}", advice=advice)
    else:
        yield Finding(name="leftovers", status="ok", found="none")


def find_drive(device: str, machine: Machine) -> Path | None:
    """Find the drive of a device number such as "259:2" in sysfs; for a partition, the drive that contains it."""
    block = machine.sys / "dev" / "block" / device
    if not block.exists():
        return None
    block = block.resolve()
    return block.parent if (block / "partition").exists() else block


def check_drive(drive: Path | None, machine: Machine) -> Finding:
    if drive is None:
        return Finding(name="drive", status="ok", found="unknown, no block device: run lsblk on the host")
    model = drive / "device" / "model"
    found = f"{drive.name}, {model.read_text().strip() if model.exists() else 'model unknown: run lsblk -o +MODEL'}"
    rotational = drive / "queue" / "rotational"
    # Virtual disks often report that they rotate, whatever the physical drive is.
    if rotational.exists() and rotational.read_text().strip() == "1" and not drive.name.startswith(("vd", "xvd")):
        advice = "a rotating disk is too slow: choose a directory on an SSD"
        return Finding(name="drive", status="warning", found=found, advice=advice)
    return Finding(name="drive", status="ok", found=found)


def check_endurance(drive: Path | None, questions: Questions) -> Finding:
    """Report the bytes written to the drive and the share of its life that is used, if its SMART log can be read."""
    name = drive.name if drive is not None else "DRIVE"
    where = "see TBW in its data sheet"
    if not name.startswith("nvme"):
        return Finding(name="endurance", status="ok", found=f"unknown: {where}")
    program = shutil.which("nvme")
    answer = {"silent": "nvme-cli is not installed"}
    if program is not None:
        answer = questions.run([program, "smart-log", f"/dev/{name}", "--output-format=json"])()
    if "silent" in answer:
        return Finding(
            name="endurance", status="ok", found=f"unknown: run sudo nvme smart-log /dev/{name}, and {where}"
        )
    used_percent = int(answer.get("percent_used", answer.get("percentage_used", 0)))
    written_bytes = int(answer["data_units_written"]) * 512_000  # NVMe counts thousands of sectors
    found = f"{written_bytes / 1e12:,.1f} TB written, {used_percent} % of the rated endurance used"
    if used_percent >= 80:
        advice = "the drive is nearly worn out: choose another one, or write less to it (memory_budget_bytes)"
        return Finding(name="endurance", status="warning", found=found, advice=advice)
    return Finding(name="endurance", status="ok", found=found)


def check_profile(paths: Sequence[str], driver: Answer) -> Finding:
    """Look for a stored hardware profile of this machine, this device and these file systems together."""
    gpus: list[str] = driver.get("gpus", [])
    device = gpus[0] if gpus and torch.version.cuda is not None else "cpu"
    key = profile_key(device, paths)
    if not profile_path(key).exists():
        advice = "the first compilation measures for a few seconds; ssdtrain-fx probe measures more accurately"
        return Finding(name="profile", status="ok", found=f"none for {device} in {profile_directory()}", advice=advice)
    if read_profile(key) is None and not was_disturbed(key):
        advice = "it is unusable, and the next compilation measures again; or run ssdtrain-fx probe"
        return Finding(name="profile", status="warning", found=str(profile_path(key)), advice=advice)
    if was_disturbed(key):
        advice = (
            "it was measured beside other programs, so plans move too much; run ssdtrain-fx probe when none computes"
        )
        return Finding(name="profile", status="warning", found=str(profile_path(key)), advice=advice)
    return Finding(name="profile", status="ok", found=str(profile_path(key)))


def _version_of(*distributions: str) -> str:
    for distribution in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{distribution} {importlib.metadata.version(distribution)}"
    return "installed"
