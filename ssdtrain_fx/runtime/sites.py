"""Call sites: what the plan says to an ``offload`` in a graph, as one string argument.

::

    name=addmm_3;out_s=0.0021;back_s=0.0034|ssd_dir=/mnt/nvme0;io=aio

Before the bar is the plan, after it the configuration of the engine; both list only what differs from the defaults. The
string is a constant in graphs, in generated Python and in generated C++. It has no quote, backslash, blank or other
character that a source code would have to escape: all but a few are written as ``%22``, as in a URL.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

_PLAIN = "/,:+"
"""Characters that stand for themselves, besides letters, digits and ``_.-~``. Never one of ``;=|%``."""


def to_text(values: Mapping[str, object]) -> str:
    """``values`` as ``name=value;name=value``. Values are what JSON has; a string that is no JSON stands for itself."""
    return ";".join(f"{name}={_quote(value)}" for name, value in values.items())


def from_text(text: str) -> dict[str, Any]:
    """Inverse of :func:`to_text`; a tuple becomes a list."""
    return {name: _unquote(value) for name, _, value in (part.partition("=") for part in text.split(";") if part)}


def changed_fields(value: Any) -> dict[str, object]:
    """The fields of a dataclass that differ from their defaults."""
    fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {field.name: now for field, now in fields if now != field.default}


def _quote(value: object) -> str:
    text = value if isinstance(value, str) and not _is_json(value) else json.dumps(value, separators=(",", ":"))
    return urllib.parse.quote(text, safe=_PLAIN, errors="surrogatepass")  # paths may have undecodable bytes


def _unquote(text: str) -> Any:
    value = urllib.parse.unquote(text, errors="surrogatepass")
    return json.loads(value) if _is_json(value) else value


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One ``offload`` in a graph. See :meth:`ssdtrain_fx.runtime.engine.Engine.offload` for what the fields mean."""

    name: str
    out_s: float | None = None
    back_s: float | None = None
    stall_s: float = 0.0
    graph_name: str = ""
    lead_s: float | None = None
    left_s: float | None = None
    external: bool = False
    host: bool = False
    reload_order: int | None = None
    engine: str = ""
    """``EngineConfig.to_argument()``."""

    def to_argument(self) -> str:
        """The string that the graph contains."""
        values = changed_fields(self)
        engine = values.pop("engine", "")
        return f"{to_text(values)}|{engine}"

    @classmethod
    def from_argument(cls, argument: str) -> Site:
        """Inverse of :meth:`to_argument`; parsed once per string."""
        return _parse(argument)


@functools.lru_cache(maxsize=4096)
def _parse(argument: str) -> Site:
    values, _, engine = argument.partition("|")
    return Site(engine=engine, **from_text(values))
