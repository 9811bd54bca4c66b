"""What the user wishes for the storages of single modules: option ``modules``.

    {"layers.*": "offload", "layers.*.attention": "recompute", "lm_head": "keep"}

A pattern names modules as ``model.named_modules()`` does, relative to what is compiled; ``*`` stands for any text. It
applies to a module and to everything in it. A storage belongs to the innermost module whose forward makes it. If
several patterns match, the last one counts.

A wish never makes a gradient wrong: a storage that must stay in memory stays there, and what cannot be recomputed bit
for bit is not recomputed.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torch import fx

from ssdtrain_fx.passes.analysis.candidates import Candidate
from ssdtrain_fx.passes.graph.module_paths import module_path

Wish = Literal["keep", "offload", "recompute"]
Modules = Sequence[tuple[str, Wish]]
"""Patterns and wishes, in the order in which the user gave them."""


def find_wishes(candidates: Iterable[Candidate], modules: Modules) -> dict[int, Wish]:
    """The wish for each storage that a pattern names, by index."""
    wishes: dict[int, Wish] = {}
    for candidate in candidates:
        names = _enclosing(module_path(candidate.storage.allocator))
        for pattern, wish in modules:
            if _matches(pattern, names):
                wishes[candidate.storage.idx] = wish
    return wishes


def modules_of(graph: fx.Graph) -> list[str]:
    """The names of all modules that ``graph`` has nodes of, sorted. The compiled module itself has an empty name."""
    return sorted({name for node in graph.nodes for name in _enclosing(module_path(node))})


def unmatched_patterns(names: Sequence[str], modules: Modules) -> list[str]:
    """The patterns that match none of ``names``."""
    return [pattern for pattern, _ in modules if not _matches(pattern, names)]


def keep_as_wished(candidates: Sequence[Candidate], wishes: Mapping[int, Wish]) -> tuple[Candidate, ...]:
    """``candidates``, of which those stay in memory that the user wishes to keep."""
    return tuple(
        candidate.kept("option modules keeps what its module makes")
        if wishes.get(candidate.storage.idx) == "keep" and not candidate.reason_to_keep
        else candidate
        for candidate in candidates
    )


def _enclosing(path: str) -> tuple[str, ...]:
    """``layers.0.mlp``, its parents ``layers.0`` and ``layers``, and the compiled module, whose name is ``""``."""
    parts = path.split(".") if path else []
    return tuple(".".join(parts[:count]) for count in range(len(parts), -1, -1))


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)
