"""Probes that the doctor runs in separate processes: ``python -P doctor_probes.py NAME [ARGUMENT]`` prints JSON.

Each probe may hang on a faulty machine: a driver that does not respond, KvikIO without a driver, a network mount whose
server is down. The doctor then kills the process and reports it. Probes import only the standard library, so that they
start fast.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK_BYTES = 4096
LEFTOVER = re.compile(r"ssdtrain-(rank-\d+-)?[a-z0-9_]{8}")
"""Names of files and directories that the runtime creates and removes at once, where unnamed files are unsupported."""
MOMENT_S = 60.0
Answer = dict[str, Any]


def ask_driver() -> Answer:
    """Ask libcuda for the version of the NVIDIA driver and the GPUs."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"missing": str(error)}
    code = cuda.cuInit(0)
    if code != 0:
        return {"init_error": code}
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    cuda.cuDeviceGetCount(ctypes.byref(number))
    gpus: list[str] = []
    for idx in range(number.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        cuda.cuDeviceGet(ctypes.byref(device), idx)
        cuda.cuDeviceGetName(name, len(name), device)
        gpus.append(name.value.decode(errors="replace"))
    return {"cuda": version, "gpus": gpus}


def ask_kvikio() -> Answer:
    """Test whether KvikIO can be imported, and whether it finds GPUDirect Storage."""
    try:
        importlib.import_module("kvikio")
    except ModuleNotFoundError as error:
        if error.name == "kvikio":
            return {"installed": False}
        raise
    return {"installed": True, "gds": bool(importlib.import_module("kvikio.cufile_driver").get("is_gds_available"))}


def ask_directory(name: str) -> Answer:
    """Examine a directory for spill files: its mount, its free space, and whether direct I/O works there.

    An empty name means the temporary directory.
    """
    path = Path(name or tempfile.gettempdir()).expanduser().absolute()
    answer: Answer = {"path": str(path)}
    if not path.is_dir():
        return {**answer, "missing": "is not a directory" if path.exists() else "does not exist"}
    room = os.statvfs(path)
    device = path.stat().st_dev
    answer["free_bytes"] = room.f_bavail * room.f_frsize
    answer["size_bytes"] = room.f_blocks * room.f_frsize
    answer["device"] = f"{os.major(device)}:{os.minor(device)}"
    answer["mount"] = find_mount(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"), str(path.resolve()))
    answer["leftovers"] = find_leftovers(path)
    answer["direct"] = try_direct_io(path)
    return answer


def find_mount(mountinfo: str, path: str) -> Answer:
    """The mount that contains ``path``: type, source, and options of the mount and of the file system."""
    best_point = ""
    found: Answer = {"type": "unknown", "source": "", "options": []}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, source, *rest) = left.split(" "), [*right.split(" "), "", ""]
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and len(point) >= len(best_point):  # a later mount on the same point hides the earlier one
            best_point = point
            options = dict.fromkeys([*fields[5].split(","), *(rest[0] or "").split(",")])
            found = {"type": kind, "source": source, "options": [option for option in options if option]}
    return found


def find_leftovers(path: Path) -> list[str]:
    """Files and directories of processes that died before they could remove them."""
    now_s = time.time()
    with os.scandir(path) as entries:
        return sorted(
            entry.name
            for entry in entries
            if LEFTOVER.fullmatch(entry.name) and now_s - entry.stat(follow_symlinks=False).st_mtime > MOMENT_S
        )


def try_direct_io(path: Path) -> str:
    """Write and read one block of an unnamed file with direct I/O. Returns an empty text, or the reason for failure."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return f"open: {error.strerror}"
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as block, mmap.mmap(-1, BLOCK_BYTES) as back:
            block[:] = bytes(range(256)) * (BLOCK_BYTES // 256)
            os.pwrite(descriptor, block, 0)
            if os.preadv(descriptor, [back], 0) != BLOCK_BYTES or back[:] != block[:]:
                return "the block that was read differs from the block that was written"
    except OSError as error:
        return f"transfer: {error.strerror}"
    finally:
        os.close(descriptor)
    return ""


PROBES = {"driver": ask_driver, "kvikio": ask_kvikio, "directory": ask_directory}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
