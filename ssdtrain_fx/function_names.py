"""Names of user functions for the keys of compile caches."""

from __future__ import annotations

import hashlib
import inspect
import marshal
import sys
import uuid
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any


def display_name(function: Callable[..., Any]) -> str:
    """``module.function``, for messages."""
    qualname = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{qualname}"


def stable_name(function: Callable[..., Any]) -> str | None:
    """``module.function``, with a hash of the source of the whole module and of the loaded code.

    The name is the same in every process and changes with the code. None for lambdas, functions inside functions,
    objects, and functions typed into a notebook: values that they depend on are not in any source file.

    The name does not cover what the module imports, or globals that change while the program runs.
    """
    if not inspect.isfunction(function) or "<" in function.__qualname__:
        return None
    module = sys.modules.get(function.__module__)
    path = getattr(module, "__file__", None)
    try:
        if path is None or attrgetter(function.__qualname__)(module) is not function:
            return None
        digest = hashlib.sha256(Path(path).read_bytes() + marshal.dumps(function.__code__))
    except (AttributeError, OSError):
        return None
    return f"{display_name(function)} {digest.hexdigest()}"


def cache_name(function: Callable[..., Any]) -> str:
    """:func:`stable_name`, or a unique name, which no cache entry has."""
    return stable_name(function) or f"{display_name(function)} {uuid.uuid4()}"
