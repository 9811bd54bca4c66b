"""GPUs and NVMe drives by the figures of their data sheets.

    gpus.json, drives.json -> Gpu, Drive

A profile (``ssdtrain_fx.hardware``) says what was measured on one machine. The catalogue says what makers promise, and
no machine reaches these peaks: real matrix products, copies and transfers to files take longer.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.resources.abc import Traversable
from typing import Any, TypeVar, cast

from ssdtrain_fx.errors import ConfigError

FOLDER: Traversable = importlib.resources.files("ssdtrain_fx.projection")
"""Where the two data files are."""
DTYPES = ("float32", "bfloat16", "float16")
"""The keys that every :attr:`Gpu.flops_per_s` has. The only other one is ``fp8``."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU, at its nominal rates."""

    name: str
    memory_bytes: int
    """The GB of the data sheet times 2**30, as is meant there. The driver and the context take some of it."""
    flops_per_s: Mapping[str, float]
    """Matrix products without sparsity, by dtype name: ``float32`` (not TF32), ``bfloat16``, ``float16``, and ``fp8``
    if the GPU has it."""
    memory_bytes_per_s: float
    """Reads plus writes of its own memory."""
    host_bytes_per_s: float
    """To or from host memory, in each direction: 16 lanes of PCIe, or NVLink-C2C."""
    link_bytes_per_s: float
    """To or from all other GPUs of its node together, in each direction: NVLink, Infinity Fabric or PCIe."""
    gpus_per_node: int
    """How many are usually in one machine: a habit, not a property of the GPU."""
    price_usd: float | None
    """A price that somebody names; prices of data-centre GPUs are not public. None: no source."""
    sources: tuple[str, ...]
    """Title and address of each page."""
    verified: bool
    """Whether all figures but ``gpus_per_node`` were found on pages of ``sources``. If not, the note names the
    others."""
    note: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drive:
    """One NVMe drive, at its nominal rates."""

    name: str
    capacity_bytes: int
    write_bytes_per_s: float
    """Sequential writes. Drives for clients reach it only until their cache is full."""
    read_bytes_per_s: float
    """Sequential reads."""
    endurance_bytes: int
    """Bytes that may be written to it: its TBW times 10**12. The note tells where drive writes per day are rated."""
    price_usd: float | None
    """A price that somebody names. None: no source."""
    sources: tuple[str, ...]
    """Title and address of each page."""
    verified: bool
    """Whether all figures were found on pages of ``sources``. If not, the note names the others."""
    note: str | None = None


def gpus() -> tuple[Gpu, ...]:
    """All GPUs of the catalogue, in the order of the file.

    Raises:
        ConfigError: the data file is damaged.
    """
    return tuple(Gpu(**values) for values in _read("gpus.json", _GPU_FIELDS))


def drives() -> tuple[Drive, ...]:
    """All drives of the catalogue, in the order of the file.

    Raises:
        ConfigError: the data file is damaged.
    """
    return tuple(Drive(**values) for values in _read("drives.json", _DRIVE_FIELDS))


def find_gpu(name: str) -> Gpu:
    """The GPU with this name, or with a name of which this is a part: ``"h100-sxm"`` finds ``H100 SXM``.

    Upper and lower case are equal, and blanks, hyphens and underscores do not count.

    Raises:
        ConfigError: no name fits, or several do.
    """
    return _find(name, gpus(), kind="GPU")


def find_drive(name: str) -> Drive:
    """The drive with this name, or with a name of which this is a part: ``"980 pro 1tb"`` finds
    ``Samsung 980 PRO 1TB``.

    Upper and lower case are equal, and blanks, hyphens and underscores do not count.

    Raises:
        ConfigError: no name fits, or several do.
    """
    return _find(name, drives(), kind="drive")


def normalised(name: str) -> str:
    """What is compared of a name."""
    return re.sub(r"[\s_-]+", "", name).casefold()


Device = TypeVar("Device", Gpu, Drive)


def _find(name: str, devices: Iterable[Device], *, kind: str) -> Device:
    known = {normalised(device.name): device for device in devices}
    wanted = normalised(name)
    # A whole name comes first: "b200" is also a part of "GB200".
    if wanted in known:
        return known[wanted]
    fitting = [device for key, device in known.items() if wanted and wanted in key]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ConfigError(f"{name!r} fits several {kind}s of the catalogue: {_names(fitting)}. Give more of the name.")
    # Names of drives are long, and a short one with an error in it resembles them little.
    near = [known[key] for key in difflib.get_close_matches(wanted, known, cutoff=0.4)]
    hint = f" The closest: {_names(near)}." if near else ""
    raise ConfigError(f"There is no {kind} {name!r} in the catalogue.{hint} All {kind}s: {_names(known.values())}.")


def _names(devices: Iterable[Gpu | Drive]) -> str:
    return ", ".join(device.name for device in devices)


Reader = Callable[[object], object]
"""Returns the value of a field; raises a ValueError that says what was expected."""


def _read(file: str, fields: Mapping[str, Reader]) -> list[dict[str, Any]]:
    """The objects of a data file, with every field checked."""
    try:
        raw: object = json.loads(FOLDER.joinpath(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(file, f"it cannot be read ({error})") from error
    if not isinstance(raw, list):
        raise _damaged(file, "it is not a list of objects")
    return [_checked(file, number, one, fields) for number, one in enumerate(cast("list[object]", raw), start=1)]


def _checked(file: str, number: int, raw: object, fields: Mapping[str, Reader]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise _damaged(file, f"object {number} is {raw!r}; expected a dictionary")
    given = cast("dict[str, object]", raw)
    where = f"object {number} ({given.get('name', 'without a name')})"
    if unknown := given.keys() - fields.keys():
        raise _damaged(file, f"{where} has the unknown field {min(unknown)!r}; expected {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name, reader in fields.items():
        if name not in given:
            if name != "note":
                raise _damaged(file, f"{where} has no field {name!r}")
            continue
        try:
            values[name] = reader(given[name])
        except ValueError as expected:
            raise _damaged(file, f"{where} has {name}={given[name]!r}; expected {expected}") from None
    return values


def _damaged(file: str, what: str) -> ConfigError:
    return ConfigError(f"{file} of the catalogue is damaged: {what}. Correct it, or install the package again.")


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError("a number above 0")
    return float(value)


def _whole_number(value: object) -> int:
    number = _number(value)
    if not number.is_integer():
        raise ValueError("a whole number above 0")
    return int(number)


def _price(value: object) -> float | None:
    return None if value is None else _number(value)


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _sources(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("a list of at least one text")
    return tuple(_text(source) for source in cast("list[object]", value))


def _rates(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ValueError("a dictionary from dtypes to rates")
    rates = cast("dict[str, object]", value)
    if rates.keys() - {"fp8"} != set(DTYPES):
        raise ValueError(f"rates for {', '.join(DTYPES)}, and fp8 if the GPU has it")
    return {dtype: _number(rate) for dtype, rate in rates.items()}


_GPU_FIELDS: Mapping[str, Reader] = {
    "name": _text,
    "memory_bytes": _whole_number,
    "flops_per_s": _rates,
    "memory_bytes_per_s": _number,
    "host_bytes_per_s": _number,
    "link_bytes_per_s": _number,
    "gpus_per_node": _whole_number,
    "price_usd": _price,
    "sources": _sources,
    "verified": _truth,
    "note": _text,
}
_DRIVE_FIELDS: Mapping[str, Reader] = {
    "name": _text,
    "capacity_bytes": _whole_number,
    "write_bytes_per_s": _number,
    "read_bytes_per_s": _number,
    "endurance_bytes": _whole_number,
    "price_usd": _price,
    "sources": _sources,
    "verified": _truth,
    "note": _text,
}
