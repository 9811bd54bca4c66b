"""JSON files of what was measured on this machine, each under the key of what it is valid for.

They are next to the hardware profiles (``profile_store``). There is one file for each device, processor, number of
threads, version of torch, and setting by which torch chooses kernels. If any of them differs, another file is read. A
file exists completely or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar, cast

import torch

from ssdtrain_fx.machine.probe_hardware import device_name
from ssdtrain_fx.machine.profile_store import key_file_name, profile_directory
from ssdtrain_fx.machine.system import cpu_model
from ssdtrain_fx.whole_file import write_whole

log = logging.getLogger(__name__)

Content = TypeVar("Content")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimesKey:
    """What measured times are valid for."""

    device: str
    processor: str
    cores: int
    """Cores that this process may use."""
    threads: int
    """``torch.get_num_threads()``."""
    torch_version: str
    libraries: str
    settings: str
    """Settings by which torch chooses kernels."""


def times_key(device: str) -> TimesKey:
    """The key of this process on this machine, with its current settings.

    Raises:
        ConfigError: there is no such device.
    """
    backends = cast(Any, torch.backends)
    settings = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "mkldnn": backends.mkldnn.enabled,
        "fp16_accumulation": backends.cuda.matmul.allow_fp16_accumulation,
        "fp32": tuple(
            one.fp32_precision
            for one in (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
        ),
    }
    return TimesKey(
        device=device_name(device),
        processor=cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        libraries=f"CUDA {torch.version.cuda} cuDNN {backends.cudnn.version()}",
        settings=repr(settings),
    )


class KeyedFile:
    """The file of one key.

    Args:
        kind: what the file holds, such as ``node-times``: the first part of its name, which is different for each key.
    """

    def __init__(self, kind: str, key: TimesKey, file_format: int) -> None:
        self.path = profile_directory() / f"{kind}-{key_file_name(dataclasses.asdict(key))}"
        self._head: dict[str, Any] = {"format": file_format, "key": dataclasses.asdict(key)}

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Exclude other processes. The lock is a separate file, because the file itself is replaced.

        Raises:
            OSError: nothing can be stored here.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def read(self, parse: Callable[[Mapping[str, Any]], Content]) -> Content | None:
        """What ``parse`` makes of the content. None if there is no file, or, with a warning, none that can be used.

        Args:
            parse: raises ValueError, KeyError, TypeError or AttributeError for what cannot be used.
        """
        try:
            raw: Any = json.loads(self.path.read_text(encoding="utf-8"))
            found = {name: raw[name] for name in self._head}
            if found != self._head:
                raise ValueError(f"it has {found}, expected {self._head}")
            return parse(raw)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("The times in %s cannot be used (%s); measuring again.", self.path, error)
            return None

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the file.

        Raises:
            OSError: it cannot be written.
        """
        write_whole(self.path, json.dumps({**self._head, **content}, indent=1, sort_keys=True) + "\n")
