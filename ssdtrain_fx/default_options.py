"""Options for programs that give none: from ``$SSDTRAIN_OPTIONS``, and from :func:`ssdtrain_fx.enable`.

Why: most training frameworks pass the name of a backend and nothing else.

The order, weakest first: defaults of the fields of OffloadConfig, ``$SSDTRAIN_OPTIONS``, ``enable(...)``, ``options=``.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from typing import Any, cast

from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.errors import ConfigError

log = logging.getLogger(__name__)

OPTIONS_VARIABLE = "SSDTRAIN_OPTIONS"

_enabled: dict[str, Any] = {}
"""What :func:`ssdtrain_fx.enable` was given. It belongs to the process, because a backend's name does too."""


def set_enabled_options(options: Mapping[str, Any]) -> None:
    """Replace the options of :func:`ssdtrain_fx.enable`. They count for what is compiled from now on."""
    _enabled.clear()
    _enabled.update(options)


def config_with_defaults(options: Mapping[str, Any] | None = None) -> OffloadConfig:
    """The configuration for ``options``. What they leave out comes from ``enable`` and from ``$SSDTRAIN_OPTIONS``.

    Raises:
        ConfigError: ``options`` is not a mapping, or as for :func:`config_over_environment`.
    """
    if options is not None and not isinstance(options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"The options of backend 'ssdtrain' are {options!r}; expected a dictionary, such as "
            '{"max_slowdown": 0.05}.'
        )
    return config_over_environment({**_enabled, **{str(name): value for name, value in (options or {}).items()}})


def given_or_default(config: OffloadConfig | None) -> OffloadConfig:
    """``config``; if it is None, the configuration of :func:`config_with_defaults`.

    Raises:
        ConfigError: ``config`` is something else, or as for :func:`config_with_defaults`.
    """
    if config is None:
        return config_with_defaults()
    if not isinstance(config, OffloadConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"The configuration of backend 'ssdtrain' is {config!r}; expected an OffloadConfig, such as "
            "OffloadConfig(max_slowdown=0.05), or None."
        )
    return config


def config_over_environment(given: Mapping[str, Any]) -> OffloadConfig:
    """The configuration for ``given``. What they leave out comes from ``$SSDTRAIN_OPTIONS``.

    Raises:
        ConfigError: an option is unknown or has a wrong value. The message names the variable if it is at fault.
    """
    config = OffloadConfig.from_options(given)
    of_environment = _read_environment()
    if not of_environment:
        return config
    if overridden := [name for name in of_environment if name in given and given[name] != of_environment[name]]:
        _log_overridden(", ".join(f"{name}={given[name]!r} (not {of_environment[name]!r})" for name in overridden))
    try:
        return OffloadConfig.from_options({**of_environment, **given})
    except ConfigError as error:
        raise ConfigError(
            f"The environment variable {OPTIONS_VARIABLE} sets {', '.join(of_environment)}, which does not suit the "
            f"options of the program. {error}"
        ) from error


def _read_environment() -> dict[str, Any]:
    """The options in ``$SSDTRAIN_OPTIONS``, checked on their own. An empty variable sets none."""
    text = os.environ.get(OPTIONS_VARIABLE, "")
    if not text.strip():
        return {}
    try:
        found: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise _not_an_object(text, f"which is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise _not_an_object(text, "which is not a JSON object")
    options = cast("dict[str, Any]", found)
    try:
        OffloadConfig.from_options(options)
    except ConfigError as error:
        raise ConfigError(f"The environment variable {OPTIONS_VARIABLE} cannot be used. {error}") from error
    return options


def _not_an_object(text: str, problem: str) -> ConfigError:
    return ConfigError(
        f"The environment variable {OPTIONS_VARIABLE} is {text!r}, {problem}; expected a JSON object with options of "
        """backend 'ssdtrain', such as '{"max_slowdown": 0.05}'."""
    )


@functools.cache
def _log_overridden(overridden: str) -> None:
    """Log it once, not for every graph."""
    log.info("the program sets options that %s sets too; those of the program count: %s", OPTIONS_VARIABLE, overridden)
