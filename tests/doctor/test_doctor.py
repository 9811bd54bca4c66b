"""The doctor: every line of its report, and that it never hangs."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from steps import FAST_DISK
from test_cli import ROOT, run_command

from ssdtrain_fx.doctor import examine as doctor
from ssdtrain_fx.doctor import probes as doctor_probes
from ssdtrain_fx.doctor.examine import Answer, Finding, Machine, Questions
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.machine.profile_store import profile_key, profile_path, store_profile

GPU: Answer = {"cuda": "13.0", "gpus": ["NVIDIA H200"]}
NO_GPU: Answer = {"missing": "libcuda.so.1: cannot open shared object file"}
GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine whose /proc and /sys are empty."""
    return Machine(proc=tmp_path / "proc", sys=tmp_path / "sys")


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def expect(finding: Finding, status: str, found: str, advice: str = "") -> None:
    assert finding.status == status, finding
    assert found in finding.found
    assert advice in finding.advice
    assert bool(advice) or finding.advice == ""


# -- one finding each --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "status", "advice"),
    [
        ("2.13.0+cpu", "ok", ""),
        ("2.11.0", "ok", ""),
        ("2.15.1a0+git", "ok", ""),
        ("2.10.2", "problem", "supported versions: 2.11 to 2.15; run pip install"),
        ("2.16.0", "warning", "newer versions are untested"),
    ],
)
def test_torch(version: str, status: str, advice: str) -> None:
    expect(doctor.check_torch(version), status, version, advice)


def test_the_supported_versions_are_those_that_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = (need for need in project["dependencies"] if need.startswith("torch"))
    (major, newest), (_, oldest) = doctor.NEWEST_TORCH, doctor.OLDEST_TORCH
    assert needed == f"torch>={major}.{oldest},<{major}.{newest + 1}"


@pytest.mark.parametrize(
    ("built_for", "driver", "status", "found", "advice"),
    [
        (None, NO_GPU, "ok", "torch without CUDA: CPU tensors", ""),
        (None, GPU, "warning", "torch without CUDA, but NVIDIA H200", "install a torch built for CUDA"),
        ("13.0", NO_GPU, "ok", "no GPU: CPU tensors", ""),
        ("13.0", {"silent": "no answer"}, "ok", "no GPU", ""),
        ("13.2", GPU, "ok", "torch for CUDA 13.2, 1 x NVIDIA H200", ""),
        ("13.0", {**GPU, "cuda": "12.8"}, "problem", "1 x NVIDIA H200", "the driver supports CUDA 12.8"),
    ],
)
def test_cuda(built_for: str | None, driver: Answer, status: str, found: str, advice: str) -> None:
    expect(doctor.check_cuda(built_for, driver), status, found, advice)


LOADED = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 13\n"


@pytest.mark.parametrize(
    ("loaded", "driver", "status", "found", "advice"),
    [
        (False, NO_GPU, "ok", "CPU tensors need none", ""),
        (True, NO_GPU, "problem", "580.95.05 is loaded, but libcuda is missing", "--gpus all"),
        (True, GPU, "ok", "580.95.05, CUDA 13.0", ""),
        (False, GPU, "ok", "present, CUDA 13.0", ""),
        (True, {"init_error": 803}, "problem", "cuInit fails with error 803", "the same version"),
        (False, {"init_error": 100}, "ok", "finds no GPU", ""),
        (True, {"silent": "no answer within 2 s"}, "problem", "no answer within 2 s", "dmesg"),
    ],
)
def test_driver(machine: Machine, loaded: bool, driver: Answer, status: str, found: str, advice: str) -> None:
    if loaded:
        put(machine.proc, "driver/nvidia/version", LOADED)
    expect(doctor.check_driver(driver, machine), status, found, advice)


@pytest.mark.parametrize(
    ("kvikio", "driver", "status", "found", "advice"),
    [
        ({"installed": False}, GPU, "ok", "not installed", ""),
        ({"installed": True, "gds": False}, GPU, "ok", "installed", ""),
        ({"silent": "exit code 1: ImportError: libkvikio.so"}, GPU, "problem", "libkvikio.so", "reinstall"),
        ({"silent": "no answer within 2 s"}, NO_GPU, "warning", "no answer", 'io="posix"'),
    ],
)
def test_kvikio(
    kvikio: Answer, driver: Answer, status: str, found: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version_of", lambda *names: "installed")
    expect(doctor.check_kvikio(kvikio, driver), status, found, advice)


@pytest.mark.parametrize(
    ("kvikio", "driver", "module", "found", "advice"),
    [
        ({"installed": True, "gds": True}, GPU, True, "usable", ""),
        ({"installed": True, "gds": True}, GPU, False, "not usable: the kernel module nvidia-fs", "install nvidia-fs"),
        (
            {"installed": True, "gds": False},
            GPU,
            True,
            "not usable: KvikIO reports it as unavailable",
            "install nvidia-fs",
        ),
        ({"installed": False}, GPU, True, "not usable: KvikIO is not installed", "ssdtrain-fx[gds]"),
        ({"silent": "exit code 1"}, GPU, True, "not usable: KvikIO cannot be imported", "ssdtrain-fx[gds]"),
        ({"installed": True, "gds": True}, NO_GPU, True, "not usable: there is no usable GPU", ""),
    ],
)
def test_gpudirect_storage(
    machine: Machine, kvikio: Answer, driver: Answer, module: bool, found: str, advice: str
) -> None:
    put(machine.proc, "modules", "nvidia_fs 262144 0 - Live\n" if module else "nvidia 9 0 - Live\nnot_nvidia_fs 1\n")
    finding = doctor.check_gds(kvikio, driver, machine)
    expect(finding, "ok", found, advice)
    assert finding.found.startswith(found)


def test_processor() -> None:
    expect(doctor.check_cores(16, "EPYC"), "ok", "16 cores for this process, EPYC")
    expect(doctor.check_cores(1, ""), "warning", "1 cores", "a second core")


def test_locked_memory() -> None:
    expect(doctor.check_locked_memory(resource.RLIM_INFINITY, GPU), "ok", "unlimited")
    expect(doctor.check_locked_memory(8 << 20, NO_GPU), "ok", "at most 8.00 MiB")
    expect(doctor.check_locked_memory(8 << 20, GPU), "warning", "at most 8.00 MiB", "staging pins up to 1.00 GiB")


def test_aio_requests(machine: Machine) -> None:
    put(machine.proc, "sys/fs/aio-max-nr", "65536\n")
    put(machine.proc, "sys/fs/aio-nr", "128\n")
    expect(doctor.check_aio(machine), "ok", "128 of 65536 in use")
    put(machine.proc, "sys/fs/aio-nr", "65500\n")
    expect(doctor.check_aio(machine), "warning", "65500 of 65536", "sysctl fs.aio-max-nr")


@pytest.mark.parametrize(
    ("setting", "status", "found", "advice"),
    [
        ("always [madvise] never\n", "ok", "madvise", ""),
        ("[always] madvise never\n", "ok", "always", ""),
        ("always madvise [never]\n", "warning", "never", "echo madvise"),
        (None, "warning", "not supported by the kernel", "echo madvise"),
    ],
)
def test_huge_pages(machine: Machine, setting: str | None, status: str, found: str, advice: str) -> None:
    if setting is not None:
        put(machine.sys, "kernel/mm/transparent_hugepage/enabled", setting)
    expect(doctor.check_huge_pages(machine), status, found, advice)


WELL: Answer = {
    "path": "/mnt/ssd",
    "free_bytes": 500 * GIB,
    "size_bytes": 1000 * GIB,
    "device": "259:2",
    "mount": {"type": "xfs", "source": "/dev/nvme0n1p2", "options": ["rw", "noatime"]},
    "leftovers": [],
    "direct": "",
}


def mounted(kind: str, *options: str) -> Answer:
    return {"mount": {"type": kind, "source": "/dev/nvme0n1p2", "options": ["rw", *options]}}


def lines(**changes: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor.check_directory("/mnt/ssd", {**WELL, **changes})}


def test_a_good_directory() -> None:
    found = lines()
    assert {finding.status for finding in found.values()} == {"ok"}
    expect(found["directory"], "ok", "/mnt/ssd on xfs of /dev/nvme0n1p2")
    expect(found["direct I/O"], "ok", "O_DIRECT works")
    expect(found["free space"], "ok", "500.00 GiB free of 1000.00 GiB")
    expect(found["mount options"], "ok", "rw,noatime")
    expect(found["leftovers"], "ok", "none")


@pytest.mark.parametrize(
    ("changes", "name", "status", "advice"),
    [
        (mounted("tmpfs"), "directory", "problem", "is in memory"),
        (mounted("nfs4"), "directory", "warning", "network"),
        (mounted("fuse.sshfs"), "directory", "warning", "network or user-space"),
        (mounted("overlay"), "directory", "warning", "container"),
        ({"direct": "open: Invalid argument"}, "direct I/O", "warning", "page cache"),
        ({"direct": "open: Permission denied"}, "direct I/O", "problem", "writable"),
        ({"direct": "open: Read-only file system"}, "direct I/O", "problem", "writable"),
        ({"free_bytes": 5 * GIB}, "free space", "warning", "stay in memory"),
        ({"free_bytes": GIB // 2}, "free space", "problem", "stay in memory"),
        (mounted("ext4", "sync"), "mount options", "warning", "mount without sync"),
        (mounted("ext4", "data=journal"), "mount options", "warning", "data=ordered"),
        ({"leftovers": ["ssdtrain-abcdefgh"]}, "leftovers", "warning", "remove them"),
    ],
)
def test_one_thing_wrong_with_a_directory_shows_in_one_line(
    changes: dict[str, Any], name: str, status: str, advice: str
) -> None:
    found = lines(**changes)
    expect(found[name], status, "", advice)
    assert {finding.name for finding in found.values() if finding.status != "ok"} == {name}


@pytest.mark.parametrize(
    ("answer", "found", "advice"),
    [
        ({"silent": "no answer within 2 s"}, "/mnt/ssd: no answer within 2 s", "does not answer"),
        ({"path": "/mnt/ssd", "missing": "does not exist"}, "/mnt/ssd does not exist", "create it, or choose"),
        (
            {"path": "/mnt/ssd", "missing": "is not a directory"},
            "/mnt/ssd is not a directory",
            "choose another directory",
        ),
    ],
)
def test_a_directory_that_cannot_be_used(answer: Answer, found: str, advice: str) -> None:
    (finding,) = doctor.check_directory("/mnt/ssd", answer)
    expect(finding, "problem", found, advice)


def make_drive(machine: Machine, name: str, *, model: str | None, rotational: str = "0") -> Path:
    """A drive with one partition, 259:2, as sysfs shows them."""
    drive = machine.sys / "devices" / name
    put(drive, f"{name}p2/partition", "2\n")
    put(drive, "queue/rotational", rotational + "\n")
    if model is not None:
        put(drive, "device/model", model + "   \n")
    (machine.sys / "dev/block").mkdir(parents=True)
    (machine.sys / "dev/block/259:2").symlink_to(drive / f"{name}p2")
    return drive


def test_drive(machine: Machine) -> None:
    drive = make_drive(machine, "nvme0n1", model="Samsung SSD 990 PRO 2TB")
    assert doctor.find_drive("259:2", machine) == drive
    assert doctor.find_drive("0:27", machine) is None
    expect(doctor.check_drive(drive, machine), "ok", "nvme0n1, Samsung SSD 990 PRO 2TB")
    expect(doctor.check_drive(None, machine), "ok", "unknown, no block device: run lsblk")


def test_a_rotating_disk(machine: Machine) -> None:
    drive = make_drive(machine, "sda", model=None, rotational="1")
    expect(doctor.check_drive(drive, machine), "warning", "sda, model unknown: run lsblk", "rotating")


@pytest.mark.parametrize(
    ("log", "status", "found", "advice"),
    [
        ('{"percent_used": 3, "data_units_written": 40000000}', "ok", "20.5 TB written, 3 % of the rated", ""),
        ('{"percentage_used": 91, "data_units_written": 1}', "warning", "91 % of the rated", "worn out"),
        ("Permission denied", "ok", "unknown: run sudo nvme smart-log /dev/nvme0n1, and see TBW in its data sheet", ""),
        (None, "ok", "unknown: run sudo nvme smart-log /dev/nvme0n1", ""),
    ],
)
def test_endurance(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: str | None,
    status: str,
    found: str,
    advice: str,
) -> None:
    """A script replaces nvme-cli."""
    drive = make_drive(machine, "nvme0n1", model="X")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    if log is not None:
        put(tmp_path, "bin/nvme", f"#!{sys.executable}\nprint('''{log}''')\n")
        (tmp_path / "bin/nvme").chmod(0o755)
    with Questions(60) as questions:
        expect(doctor.check_endurance(drive, questions), status, found, advice)
        expect(doctor.check_endurance(Path("sda"), questions), "ok", "unknown: see TBW in its data sheet")


def test_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSDTRAIN_PROFILE_DIR", str(tmp_path / "profiles"))
    hardware: Hardware = FAST_DISK
    key = profile_key("cpu", [str(tmp_path)])
    expect(
        doctor.check_profile([str(tmp_path)], NO_GPU),
        "ok",
        "none for cpu",
        "ssdtrain-fx probe measures more accurately",
    )
    store_profile(key, hardware, replace=True)
    expect(doctor.check_profile([str(tmp_path)], NO_GPU), "ok", str(profile_path(key)))
    store_profile(key, hardware, replace=True, disturbed=True)
    expect(doctor.check_profile([str(tmp_path)], NO_GPU), "warning", str(profile_path(key)), "beside other programs")
    for damaged in ("{}", "[]", "{"):
        profile_path(key).write_text(damaged)
        expect(doctor.check_profile([str(tmp_path)], NO_GPU), "warning", str(profile_path(key)), "measures again")


# -- the probes --------------------------------------------------------------------------------------------------------

MOUNTS = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
40 27 0:40 / /mnt/my\040disk rw,noatime shared:1 - xfs /dev/nvme0n1 rw,noquota
41 27 0:41 / /mnt/hidden rw - ext4 /dev/sda rw
42 27 0:42 / /mnt/hidden ro - nfs4 server:/x rw
""".strip()


@pytest.mark.parametrize(
    ("path", "kind", "source", "options"),
    [
        ("/home/me", "ext4", "/dev/vda", ["rw", "relatime", "discard"]),
        ("/mnt/my disk/a", "xfs", "/dev/nvme0n1", ["rw", "noatime", "noquota"]),
        ("/mnt/my diskette", "ext4", "/dev/vda", ["rw", "relatime", "discard"]),
        ("/mnt/hidden", "nfs4", "server:/x", ["ro", "rw"]),
    ],
)
def test_the_mount_of_a_path(path: str, kind: str, source: str, options: list[str]) -> None:
    assert doctor_probes.find_mount(MOUNTS, path) == {"type": kind, "source": source, "options": options}


def test_leftovers_are_old_and_named_as_the_runtime_names_files(tmp_path: Path) -> None:
    old = 1_000_000_000
    for name in ("ssdtrain-ab_cd123", "ssdtrain-demo.png", "other-abcdefgh", "ssdtrain-new45678"):
        (tmp_path / name).touch()
    (tmp_path / "ssdtrain-rank-3-abcdefgh").mkdir()
    for entry in tmp_path.iterdir():
        if "new" not in entry.name:
            os.utime(entry, (old, old))
    assert doctor_probes.find_leftovers(tmp_path) == ["ssdtrain-ab_cd123", "ssdtrain-rank-3-abcdefgh"]


def test_direct_io_is_really_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No such file" in doctor_probes.try_direct_io(tmp_path / "nowhere")
    monkeypatch.setattr(os, "pwrite", lambda *_: 4096)  # a disk that accepts writes and discards them
    assert doctor_probes.try_direct_io(tmp_path) != ""
    assert list(tmp_path.iterdir()) == []


# -- missing answers ---------------------------------------------------------------------------------------------------


def test_a_question_without_an_answer_is_given_up_with_everything_that_it_started(tmp_path: Path) -> None:
    """A child process waits forever and holds the pipe of its parent, which waits for the child."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = (
        "import subprocess, sys, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        f"pathlib.Path({str(pipe)!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    with Questions(0.0) as questions:
        answer = questions.run([sys.executable, "-c", program])
        child = os.pidfd_open(int(pipe.read_text()))
        assert answer() == {"silent": "no answer within 0 s"}
    ended, _, _ = select.select([child], [], [], 60)
    os.close(child)
    assert ended


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import sys; sys.exit('libfoo.so is missing')", "exit code 1: libfoo.so is missing"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("print('hello')", "output is not JSON: b'hello"),
    ],
)
def test_a_probe_that_fails_says_how(program: str, why: str) -> None:
    with Questions(60) as questions:
        assert questions.run([sys.executable, "-c", program])()["silent"].startswith(why)
        assert "No such file" in questions.run(["/nowhere/at/all"])()["silent"]


def test_a_check_that_fails_is_a_finding_and_the_others_stay(machine: Machine, tmp_path: Path) -> None:
    """A machine without /proc and /sys."""
    findings = {finding.name: finding for finding in doctor.examine([str(tmp_path)], timeout_s=60, machine=machine)}
    expect(findings["AIO requests"], "warning", "check failed: FileNotFoundError")
    assert {"torch", "directory", "leftovers", "drive"} <= set(findings)


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_real_run_names_every_line(tmp_path: Path) -> None:
    done = run_command("doctor", "--ssd-dir", str(tmp_path), "--timeout", "100", "--json", "-")
    assert done.returncode in (0, 1), done.stderr
    written = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in written["findings"]}
    assert len(findings) == len(written["findings"]) == 17
    assert findings["directory"]["found"].startswith(str(tmp_path))
    assert written["problem"] == sum(finding["status"] == "problem" for finding in findings.values())
    assert done.returncode == (1 if written["problem"] else 0)
    assert "found, and what to change" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_problem_is_exit_code_1() -> None:
    done = run_command("doctor", "--ssd-dir", "/nowhere/at/all", "--timeout", "100")
    assert done.returncode == 1
    assert re.search(r"problem .*directory .*/nowhere/at/all does not exist", done.stdout)
    assert "create it" in done.stdout


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_a_driver_and_a_kvikio_that_hang_do_not_hang_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call of libcuda and the import of KvikIO never return."""
    source = tmp_path / "stub.c"
    source.write_text("#include <unistd.h>\nint cuInit(unsigned flags) { for (;;) pause(); }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)], check=True)
    put(tmp_path, "kvikio/__init__.py", "import signal\nsignal.pause()\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    done = run_command("doctor", "--ssd-dir", str(tmp_path), "--timeout", "1", "--json", "-")
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1
    assert findings["driver"]["status"] == "problem"
    assert findings["driver"]["found"] == "no answer within 1 s"
    assert "no answer within 1 s" in findings["KvikIO"]["found"]
