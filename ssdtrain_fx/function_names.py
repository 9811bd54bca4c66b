"""Names under which compile caches may keep what a function of a user made."""

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
    """``module.function`` and a hash of the source of the whole module and of the loaded code: the same in every
    process, another one after a change. None where there is no such name: for lambdas, for functions inside functions,
    for objects, and for what was typed into a notebook, since values that they depend on are nowhere written down.

    Not in the name: what the module imports, and globals that are changed while the program runs.
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
    """:func:`stable_name`, or a name that never comes again, so that no cache can answer."""
    return stable_name(function) or f"{display_name(function)} {uuid.uuid4()}"
