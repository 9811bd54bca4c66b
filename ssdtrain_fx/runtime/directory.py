"""Which directory the spill file goes to, and whether it can.

Why: a wrong directory must be an error before anything is traced, not a failure in the middle of a training step.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from pathlib import Path

from ssdtrain_fx.errors import ConfigError

log = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "SSDTRAIN_DIR"
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


def check_directory(ssd_dir: str | None) -> str:
    """The absolute path of the directory to use: ``ssd_dir``, else ``$SSDTRAIN_DIR``, else the temporary directory.

    Raises ConfigError when it is missing, is not a directory, or no file can be created in it. Warns once per directory
    when it lies in memory, because offloading there frees nothing.
    """
    if ssd_dir is not None:
        directory, origin = ssd_dir, "ssd_dir"
    elif os.environ.get(DIRECTORY_VARIABLE):
        directory, origin = os.environ[DIRECTORY_VARIABLE], f"the environment variable {DIRECTORY_VARIABLE}"
    else:
        directory, origin = tempfile.gettempdir(), "the default temporary directory"
    path = Path(directory).expanduser().absolute()
    directory = str(path)
    advice = "Create it, or set ssd_dir to a directory on a local SSD."
    if not path.exists():
        raise ConfigError(f"{origin} is {directory!r}, which does not exist. {advice}")
    if not path.is_dir():
        raise ConfigError(f"{origin} is {directory!r}, which is not a directory. {advice}")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"{origin} is {directory!r}, where no file can be created: {error.strerror or error}. "
            "Make it writable for this user, or set ssd_dir to another directory."
        ) from error
    if file_system_type(directory) in _MEMORY_FILE_SYSTEMS:
        _warn_of_memory_file_system(directory)
    return directory


def file_system_type(path: str) -> str | None:
    """The type of the file system that holds ``path``, such as "ext4"; None where the system does not tell."""
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


def _unescape(mount: str) -> str:
    """Mount points spell space, tab, newline and backslash as three octal digits: ``\\040`` is a space."""
    for character in " \t\n\\":
        mount = mount.replace(f"\\{ord(character):03o}", character)
    return mount


@functools.cache
def _warn_of_memory_file_system(directory: str) -> None:
    log.warning(
        "%s lies on a file system in memory: offloading there frees no memory. Set ssd_dir to a directory on an SSD.",
        directory,
    )
