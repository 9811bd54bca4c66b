"""The module that a node comes from, by the name that ``model.named_modules()`` gives it."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

_ROOT = re.compile(r"^[LG]\['[^']*'\]\.?")
"""How Dynamo names the compiled module, or a module that a compiled function reads: ``L['self']``, ``G['model']``."""


def module_path(node: fx.Node) -> str:
    """``transformer.h.0.ln_1`` from the innermost entry, ``L['self'].transformer.h.0.ln_1``; empty if there is none."""
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return _ROOT.sub("", path)
