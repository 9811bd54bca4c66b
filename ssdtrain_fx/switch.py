"""One call for programs that name a backend and nothing else: ``ssdtrain_fx.enable(max_slowdown=0.05)``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any, cast

from ssdtrain_fx.default_options import config_over_environment, set_enabled_options
from ssdtrain_fx.runtime.storage.directory import check_directories

log = logging.getLogger(__name__)

NAME = "ssdtrain"

_undo = contextlib.ExitStack()
"""What ``disable`` has to undo. Names of backends belong to the process, so this does too."""


def enable(**options: Any) -> None:
    """Let programs that can only name a backend use ``"ssdtrain"``, and set the options that such a backend gets.

    - Accelerate, and with it the Trainer of transformers and TRL, accepts only the backends that it lists. ``ssdtrain``
      is added to its list, if Accelerate is installed and does not know the name.
    - ``options`` (the fields of ``OffloadConfig``) become the defaults wherever the program gives no
      ``OffloadConfig``: ``backend="ssdtrain"``, ``backend()``, ``explain(model, ...)``. Options given there count more,
      option by option; options in ``$SSDTRAIN_OPTIONS`` count less.

    Call it in every process that trains, before the trainer is built. What is compiled already keeps its options. A
    second call replaces the options of the first one.

    Raises:
        ConfigError: an option is unknown or has a wrong value, or ``ssd_dir`` cannot be used. Nothing is changed then.
    """
    check_directories(config_over_environment(options).engine_config().ssd_dir)
    disable()
    set_enabled_options(options)
    _undo.callback(set_enabled_options, {})
    names = _names_of_accelerate()
    if names is not None:
        _undo.callback(add_name(names, NAME.upper()))


def disable() -> None:
    """Undo ``enable``. Without it, nothing happens. What is compiled already stays as it is."""
    _undo.close()


def _names_of_accelerate() -> type[Enum] | None:
    """Accelerate's list of backends; None if there is none."""
    if importlib.util.find_spec("accelerate") is None:
        return None
    try:
        utils = importlib.import_module("accelerate.utils")
    except Exception as error:  # an Accelerate that does not fit the installed torch fails in many ways
        log.warning(
            "Accelerate is installed but cannot be imported (%s): it will not know the backend %r. Everything else is "
            "enabled.",
            error,
            NAME,
        )
        return None
    return cast("type[Enum] | None", getattr(utils, "DynamoBackend", None))


def add_name(names: type[Enum], value: str) -> Callable[[], None]:
    """Let ``names(value)`` return a member with this value, and return a function that undoes it.

    A value that ``names`` knows already is left alone. ``_missing_`` is Enum's documented way to answer for values that
    were not declared; the list of declared members does not change.
    """
    with contextlib.suppress(ValueError):
        names(value)
        return lambda: None
    member = cast(Any, str).__new__(names, value)
    member._name_ = member._value_ = value
    own = names.__dict__.get("_missing_")
    find_elsewhere = names._missing_

    def find(_: type[Enum], wanted: object) -> Any:
        return member if wanted == value else find_elsewhere(wanted)

    def undo() -> None:
        if own is None:
            del names._missing_
        else:
            names._missing_ = own

    names._missing_ = classmethod(find)  # pyright: ignore[reportAttributeAccessIssue]
    return undo
