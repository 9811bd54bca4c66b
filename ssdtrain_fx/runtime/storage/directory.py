"""Choice and checks of the directories that hold the spill files.

Why: a wrong directory must be an error before anything is traced, not a failure in the middle of a training step.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ssdtrain_fx.errors import ConfigError

log = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "SSDTRAIN_DIR"
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
_NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"}
)


def check_directories(ssd_dir: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the absolute paths of the directories to use: ``ssd_dir``, else the list in ``$SSDTRAIN_DIR``, separated
    by ``os.pathsep``, else the temporary directory.

    Raises ConfigError if one is empty, is missing, is not a directory, is named twice, or no file can be created in it.
    Warns once per directory if it is on a file system in memory, where offloading is useless, or on a network or
    user-space file system, where it is slow.
    """
    if ssd_dir is not None:
        directories, origin = [ssd_dir] if isinstance(ssd_dir, str) else list(ssd_dir), "ssd_dir"
    elif listed := [path for path in os.environ.get(DIRECTORY_VARIABLE, "").split(os.pathsep) if path]:
        directories, origin = listed, f"the environment variable {DIRECTORY_VARIABLE}"
    else:
        directories, origin = [tempfile.gettempdir()], "the default temporary directory"
    if not directories:
        raise ConfigError(f"{origin} names no directory. Name at least one on a local SSD.")
    if len(directories) == 1:
        return (_check(directories[0], origin, "set ssd_dir to another one, on a local SSD"),)
    checked: dict[Path, str] = {}
    for number, directory in enumerate(directories, start=1):
        which = f"directory {number} of {len(directories)} in {origin}"
        path = _check(directory, which, "leave it out")
        if Path(path).resolve() in checked:
            raise ConfigError(f"{which} is {path!r}, which was named before. Name each directory once.")
        checked[Path(path).resolve()] = path
    return tuple(checked.values())


def _check(directory: str, origin: str, otherwise: str) -> str:
    """Return the absolute path of ``directory``. Raises ConfigError if it cannot be used."""
    if not directory:  # Path("") is the working directory, which nobody named
        raise ConfigError(f"{origin} names no directory. Name at least one on a local SSD.")
    path = Path(directory).expanduser().absolute()
    directory = str(path)
    try:
        if not path.exists():
            raise ConfigError(f"{origin} is {directory!r}, which does not exist. Create it, or {otherwise}.")
        if not path.is_dir():
            raise ConfigError(f"{origin} is {directory!r}, which is not a directory. Replace it, or {otherwise}.")
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"{origin} is {directory!r}, where no file can be created: {error.strerror or error}. "
            f"Make it writable for this user, or {otherwise}."
        ) from error
    _warn_of_file_system(directory, file_system_type(directory) or "")
    return directory


def file_system_type(path: str) -> str | None:
    """The type of the file system that holds ``path``, such as "ext4"; None if the system does not report it."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    path = str(Path(path).resolve())
    best_mount, best_type = "", None
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount = _unescape(fields[1])
        inside = mount == "/" or path == mount or path.startswith(mount + "/")
        if inside and len(mount) >= len(best_mount):  # a later mount on the same point hides the earlier one
            best_mount, best_type = mount, fields[2]
    return best_type


def is_network_file_system(kind: str) -> bool:
    """Whether ``kind`` is a network file system, or a user-space one (FUSE), which is as slow and as little private."""
    return kind in _NETWORK_FILE_SYSTEMS or kind == "fuse" or kind.startswith("fuse.")


def _unescape(mount: str) -> str:
    """Decode space, tab, newline and backslash. Mount points spell them in three octal digits: ``\\040`` is a space."""
    for character in " \t\n\\":
        mount = mount.replace(f"\\{ord(character):03o}", character)
    return mount


@functools.cache
def _warn_of_file_system(directory: str, kind: str) -> None:
    if kind in MEMORY_FILE_SYSTEMS:
        log.warning(
            "%s is on a file system in memory (%s): offloading there frees no memory. Set ssd_dir to a directory on "
            "an SSD.",
            directory,
            kind,
        )
    elif is_network_file_system(kind):
        log.warning(
            "%s is on a network or user-space file system (%s): transfers there are slow, and may be seen by others. "
            "Set ssd_dir to a directory on a local SSD.",
            directory,
            kind,
        )
