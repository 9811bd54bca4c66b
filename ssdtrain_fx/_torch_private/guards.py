"""Guards that a compilation adds for symbolic sizes (see the table in ``_torch_private``)."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["forgetting_guards"]

_VERSIONS = ("_version_counter", "_replacements_version_counter")
"""What says which cached results of a ``ShapeEnv`` are out of date."""


@contextmanager
def forgetting_guards(shape_env: ShapeEnv | None, guards: list[Any]) -> Generator[None]:
    """Undo what ``shape_env`` learns about symbols in this block. None: nothing is symbolic.

    Lowering compares sizes. The outcome becomes a guard, and a symbol that equals a number is replaced by it. Inductor
    cannot lower every graph after that.

    Args:
        guards: gets the new guards, for ``shape_env.evaluate_expr``.
    """
    if shape_env is None:
        yield
        return
    state: dict[str, Any] = vars(shape_env)
    before = {name: _copy(value) for name, value in state.items()}
    try:
        yield
    finally:
        guards += [guard.expr for guard in shape_env.guards[len(before["guards"]) :]]
        versions = {name: state[name] + 1 for name in _VERSIONS if name in state}
        for name, value in before.items():
            if _is_collection(value):  # others may hold the same object
                now = state[name]
                now.clear()
                (now.extend if hasattr(now, "extend") else now.update)(value)
            else:
                state[name] = value
        state.update(versions)
        members: list[Any] = list(vars(ShapeEnv).values())
        for member in members:  # a cached outcome would add no guard
            if hasattr(member, "cache_clear"):
                member.cache_clear()


def _copy(value: Any) -> Any:
    if not _is_collection(value):
        return value
    copied = copy.copy(value)
    for key, one in copied.items() if hasattr(copied, "items") else ():
        copied[key] = copy.copy(one) if _is_collection(one) else one
    return copied


def _is_collection(value: Any) -> bool:
    return hasattr(value, "clear")
