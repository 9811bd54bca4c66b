"""Models of users, named by the function that makes them: ``package.module:function``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

ModelFunction = Callable[..., tuple[Any, tuple[Any, ...]]]
"""Returns a model and a tuple of its inputs."""


class OwnModelError(ValueError):
    """A name of a function that makes a model is wrong, or the function is."""


def is_own_model(name: str) -> bool:
    """Whether ``name`` names a function, and no model of the zoo."""
    return ":" in name


def load_model_function(name: str) -> ModelFunction:
    """Import ``package.module:function``. The working directory is searched too.

    Raises:
        OwnModelError: there is no such function. When the function that is returned is called: it does not take these
            arguments, or it does not return a model and its inputs.
    """
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module_name), attribute)
        signature = inspect.signature(make)
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        raise OwnModelError(str(error)) from error
    finally:
        sys.path.remove("")

    def make_checked(*arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise OwnModelError(
                f"{name} cannot be called with {len(arguments)} arguments ({error}). --help says what is expected."
            ) from error
        made: object = make(*arguments)
        parts = cast("Sequence[Any]", made) if isinstance(made, (tuple, list)) else (made,)
        if len(parts) == 2 and callable(parts[0]) and isinstance(parts[1], (tuple, list)):
            return parts[0], tuple(cast("Sequence[Any]", parts[1]))
        found = ", ".join(type(part).__name__ for part in parts)
        raise OwnModelError(f"{name} returned {found}; expected a model and a tuple of its inputs.")

    return make_checked
