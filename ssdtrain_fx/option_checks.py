"""Checks of option values. Every message names the option, the value that was found, and what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from ssdtrain_fx._torch_private import NO_AUTO_CHUNKER, has_auto_chunker
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.passes.analysis.module_wishes import Wish


def as_paths(ssd_dir: object) -> str | Path | tuple[str | Path, ...] | None:
    """``ssd_dir`` as an immutable value."""
    if ssd_dir is None or isinstance(ssd_dir, (str, Path)):
        return ssd_dir
    entries = tuple(cast(Sequence[object], ssd_dir)) if isinstance(ssd_dir, Sequence) else ()
    paths = tuple(entry for entry in entries if isinstance(entry, (str, Path)))
    if paths and paths == entries:
        return paths
    raise wrong("ssd_dir", cast(object, ssd_dir), "a path, a sequence of at least one path, or None")


def as_wishes(modules: object) -> tuple[tuple[str, Wish], ...]:
    """``modules`` as an immutable value."""
    pairs: object = modules
    if isinstance(modules, Mapping):
        pairs = tuple(cast("Mapping[object, object]", modules).items())
    if not isinstance(pairs, tuple) or not all(map(_is_wish, cast("tuple[object, ...]", pairs))):
        wishes = ", ".join(map(repr, get_args(Wish)))
        expected = f"a dictionary from patterns to one of {wishes}, such as {{'layers.*': 'keep'}}"
        raise wrong("modules", cast("object", modules), expected)
    return cast("tuple[tuple[str, Wish], ...]", pairs)


def _is_wish(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(cast("tuple[object, ...]", pair)) != 2:
        return False
    pattern, wish = cast("tuple[object, object]", pair)
    return isinstance(pattern, str) and wish in get_args(Wish)


def wrong(name: str, found: object, expected: str) -> ConfigError:
    return ConfigError(f"Option {name!r} of backend 'ssdtrain' is {found!r}; expected {expected}.")


def require_choice(name: str, value: object, choices: tuple[str, ...], *, or_else: str = "") -> None:
    if value not in choices:
        expected = "one of " + ", ".join(map(repr, choices))
        raise wrong(name, value, f"{expected}, or {or_else}" if or_else else expected)


def check_chunk_loss(value: object, choices: tuple[str, ...], *, inner: str) -> None:
    if value in choices:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else ()
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise wrong("chunk_loss", value, f"'off', 'auto', or a number of chunks >= 2{hint}")
    if inner != "inductor":
        raise ConfigError(
            f"Option 'chunk_loss' of backend 'ssdtrain' is {value}, and inner={inner!r} has no auto-chunker. "
            "Use inner='inductor', or leave chunk_loss out."
        )
    if not has_auto_chunker():
        raise ConfigError(
            f"Option 'chunk_loss' of backend 'ssdtrain' is {value}, but {NO_AUTO_CHUNKER}. Use a newer torch, or "
            "chunk_loss='auto', which does without where there is none."
        )


def as_functions(name: str, value: object) -> tuple[Callable[..., Any], ...]:
    functions = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else (None,)
    if not all(callable(function) for function in functions):
        raise wrong(name, cast(object, value), "a sequence of functions")
    return tuple(cast("Sequence[Callable[..., Any]]", functions))


def require_int(name: str, value: object, *, minimum: int, of: str = "bytes", or_else: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        expected = f"an integer number of {of}"
        raise wrong(name, value, f"{expected}, {or_else}" if or_else else expected)
    if value < minimum:
        raise wrong(name, value, f"at least {minimum}")
