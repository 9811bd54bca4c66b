"""Decide whether CUDA tensors move through KvikIO, by a trial in another process.

Why another process: if driver, library and drive do not work together, KvikIO's calls do not fail but hang. A thread
that hangs in them cannot be stopped; a process can.

Guarantees:

* Without a usable GPU, or without KvikIO, no part of KvikIO is imported.
* With ``io="auto"``, KvikIO is used only if it reports that GPUDirect Storage is available, a trial moved bytes in
  both directions unchanged, and this took less time than through pinned host memory.
* With ``io="kvikio"``, the trial must return the right bytes; its speed does not matter.
* A trial that hangs is killed after ``TRIAL_TIMEOUT_S``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.runtime.config import IOPath

log = logging.getLogger(__name__)

TRIAL_TIMEOUT_S = 120.0
"""Ten times what it takes to import torch and create a CUDA context on a slow machine."""


class Cuda(Protocol):
    """The part of ``torch.cuda`` that is queried before KvikIO is imported."""

    def is_available(self) -> bool: ...

    def current_device(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Kvikio:
    """The module, and whether its transfers bypass host memory."""

    module: Any
    gds: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial in which no byte changed; otherwise the trial fails."""

    gds: bool
    """KvikIO reports that GPUDirect Storage is available."""
    kvikio_s: float
    """Time to offload and reload a set of tensors through KvikIO."""
    staged_s: float
    """The same through pinned host memory."""


class TrialError(Exception):
    """A trial failed; the message says how."""


RunTrial = Callable[[str, tuple[str, ...]], Trial]


def may_use_kvikio(io: IOPath, cuda: Cuda = torch.cuda) -> bool:
    """Whether ``io`` allows KvikIO and it is available. Imports nothing.

    Raises:
        ConfigError: ``io`` requires KvikIO, and it is not available.
    """
    if io in ("posix", "aio"):
        return False
    usable_gpu = cuda.is_available()
    installed = usable_gpu and importlib.util.find_spec("kvikio") is not None
    if io == "kvikio" and not installed:
        found = "KvikIO is not installed" if usable_gpu else "torch finds no usable CUDA GPU"
        raise ConfigError(
            f'io="kvikio": {found}. It needs a CUDA GPU and `pip install ssdtrain-fx[gds]`; "posix" works everywhere.'
        )
    return installed


def choose_kvikio(
    io: IOPath, directories: Sequence[str], cuda: Cuda = torch.cuda, run_trial: RunTrial | None = None
) -> Kvikio | None:
    """Import KvikIO if it is to be used for CUDA tensors in ``directories``. Returns None if it is not.

    Raises:
        ConfigError: ``io`` requires KvikIO, and it does not work.
    """
    if not may_use_kvikio(io, cuda):
        return None
    try:
        trial = (run_trial or run_trial_once)(f"cuda:{cuda.current_device()}", tuple(directories))
    except TrialError as error:
        if io == "kvikio":
            raise ConfigError(f'io="kvikio": {error}. Fix this, or set io="posix", which works everywhere.') from error
        log.info("CUDA tensors go through host memory: %s.", error)
        return None
    log.info("trial of KvikIO in %s: %s", ", ".join(directories), trial)
    if io == "auto" and not (trial.gds and trial.kvikio_s < trial.staged_s):
        return None
    return Kvikio(importlib.import_module("kvikio"), trial.gds)


@functools.cache
def run_trial_once(device: str, directories: tuple[str, ...]) -> Trial:
    """Run the trial of :mod:`ssdtrain_fx.runtime.kvikio_trial`, once per process. Raises TrialError."""
    return run_in_child([sys.executable, "-m", "ssdtrain_fx.runtime.kvikio_trial", device, *directories])


def run_in_child(command: Sequence[str], timeout_s: float = TRIAL_TIMEOUT_S) -> Trial:
    """Run ``command`` and return the trial that it prints as JSON on its last line.

    Raises:
        TrialError: it failed, printed something else, or took longer than ``timeout_s`` and was killed.
    """
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    # Files, not pipes: a child that survives the kill would block this process by its end of a pipe.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment)
        except OSError as error:
            raise TrialError(f"the trial of KvikIO could not start: {error}") from error
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TrialError(f"the trial of KvikIO did not finish within {timeout_s:g} s and was killed") from error
        finally:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1)
        if code != 0:
            raise TrialError(f"the trial of KvikIO failed: {_last_line(errors) or code}")
        line = _last_line(output)
    try:
        return Trial(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise TrialError(f"the trial of KvikIO printed {line!r}, expected its result as JSON") from error


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
