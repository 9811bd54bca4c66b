"""Build frozen dataclasses from JSON values: the inverse of ``dataclasses.asdict``."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Value = TypeVar("Value")


def from_plain(kind: type[Value], plain: Any) -> Value:
    """Build a ``kind`` from dicts, lists, strings and numbers.

    A field that is a union of dataclasses becomes the dataclass with exactly the fields found.

    Raises:
        ValueError: a field is missing, unknown or of the wrong type; the message says where.
    """
    return cast(Value, _read(kind, plain, kind.__name__))


def _read(kind: Any, plain: Any, where: str) -> Any:
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(cast(type[Any], kind), plain, where)
    if origin is tuple:
        return _read_tuple(get_args(kind), plain, where)
    if origin is Mapping or getattr(origin, "__name__", "") == "Mapping":
        _, value_kind = get_args(kind)
        return {key: _read(value_kind, value, f"{where}[{key!r}]") for key, value in plain.items()}
    if origin in (Union, types.UnionType):
        return _read_union(get_args(kind), plain, where)
    if origin is Literal:
        if plain not in get_args(kind):
            raise ValueError(f"{where} is {plain!r}; expected one of {get_args(kind)}.")
        return plain
    if kind is float and isinstance(plain, int) and not isinstance(plain, bool):
        return float(plain)
    if not isinstance(plain, kind) or (isinstance(plain, bool) and kind is not bool):
        raise ValueError(f"{where} is {plain!r}; expected {kind.__name__}.")
    return plain


def _read_dataclass(kind: type[Any], plain: Any, where: str) -> Any:
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    found = sorted(cast(Mapping[str, Any], plain)) if isinstance(plain, dict) else plain
    if found != sorted(names):
        raise ValueError(f"{where} has {found!r}; expected the fields of {kind.__name__}: {', '.join(sorted(names))}.")
    return kind(**{name: _read(hints[name], plain[name], f"{where}.{name}") for name in names})


def _read_tuple(kinds: tuple[Any, ...], plain: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(plain, (list, tuple)):
        raise ValueError(f"{where} is {plain!r}; expected a list.")
    values = cast("list[Any]", plain)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(values)
    if len(kinds) != len(values):
        raise ValueError(f"{where} has {len(values)} entries; expected {len(kinds)}.")
    return tuple(
        _read(kind, value, f"{where}[{idx}]") for idx, (kind, value) in enumerate(zip(kinds, values, strict=True))
    )


def _read_union(kinds: tuple[Any, ...], plain: Any, where: str) -> Any:
    if isinstance(plain, dict):
        keys = set(cast(Mapping[str, Any], plain))
        for kind in kinds:
            if dataclasses.is_dataclass(kind) and keys == {field.name for field in dataclasses.fields(kind)}:
                return _read(kind, plain, where)
    if plain is None and types.NoneType in kinds:
        return None
    if not isinstance(plain, dict):
        for kind in kinds:
            if isinstance(kind, type) and isinstance(plain, kind):
                return plain
    raise ValueError(f"{where} is {plain!r}; expected one of {', '.join(kind.__name__ for kind in kinds)}.")
