"""The table of saved storages. Storages that repeat in every layer share a row."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.passes.planning.plan import SavedStorage
from ssdtrain_fx.report.decisions import style_of
from ssdtrain_fx.units import format_bytes

Sort = Literal["order", "size", "name", "decision"]
SORTS: tuple[Sort, ...] = get_args(Sort)
LAYER = re.compile(r"(?<![^.])(\d+)(?![^.])")
"""The number of a layer in a module path: ``0`` in ``h.0.ln_1``."""
COLUMNS = ("storage", "count", "shape", "dtype", "size", "op", "module", "source", "decision", "reason")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Storages that differ only in their layer."""

    storages: tuple[SavedStorage, ...]
    module: str
    """Module path with the range of layers: ``h.0..11.mlp.c_fc``."""

    @property
    def size_bytes(self) -> int:
        """Total size of all storages."""
        return sum(storage.size_bytes for storage in self.storages)

    def cells(self) -> tuple[str, ...]:
        """Cell texts in the order of :data:`COLUMNS`."""
        first, count = self.storages[0], len(self.storages)
        name = first.name if count == 1 else f"{first.name}..{self.storages[-1].name}"
        size = format_bytes(first.size_bytes)
        return (
            name,
            str(count),
            "[" + ", ".join(first.shape) + "]",
            first.dtype,
            size if count == 1 else f"{count} x {size}",
            first.op,
            self.module,
            first.source,
            style_of(first.decision).name,
            first.decision.reason,
        )


def make_rows(
    storages: Iterable[SavedStorage], module_of: dict[str, str], *, sort: Sort = "order", fold: bool = True
) -> list[Row]:
    """Make one row per group of equal storages.

    Args:
        module_of: path of the module that allocates a storage, by the name of the storage.
        sort: ``order`` is the order of forward, ``size`` puts the largest row first, ``decision`` groups by decision.
        fold: False gives every storage a separate row.

    Raises:
        ConfigError: ``sort`` is unknown.
    """
    if sort not in SORTS:
        raise ConfigError(f"Sort order {sort!r} is unknown; expected one of {', '.join(SORTS)}.")
    groups: dict[object, list[SavedStorage]] = {}
    for storage in storages:
        key = _likeness(storage, module_of.get(storage.name, "")) if fold else storage.name
        groups.setdefault(key, []).append(storage)
    rows = [
        Row(tuple(group), _fold_modules([module_of.get(storage.name, "") for storage in group]))
        for group in groups.values()
    ]
    if sort == "size":
        rows.sort(key=lambda row: -row.size_bytes)
    elif sort == "name":
        rows.sort(key=lambda row: _natural(row.storages[0].name))
    elif sort == "decision":
        rows.sort(key=lambda row: (row.cells()[COLUMNS.index("decision")], -row.size_bytes))
    return rows


def format_table(rows: Sequence[Row]) -> str:
    """Format rows as plain-text columns. A column that is empty in every row is left out."""
    cells = [COLUMNS, *(row.cells() for row in rows)]
    shown = [column for column in range(len(COLUMNS)) if len(cells) == 1 or any(row[column] for row in cells[1:])]
    widths = {column: max(len(row[column]) for row in cells) for column in shown}
    lines = ["  ".join(row[column].ljust(widths[column]) for column in shown).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _likeness(storage: SavedStorage, module: str) -> tuple[object, ...]:
    return (
        LAYER.sub("*", module),
        storage.op,
        storage.shape,
        storage.dtype,
        storage.size_bytes,
        len(storage.saved_nodes),
        storage.source,
        style_of(storage.decision).name,
        storage.decision.reason,
    )


def _fold_modules(modules: Sequence[str]) -> str:
    """``h.0.mlp`` and ``h.1.mlp`` and ``h.2.mlp`` -> ``h.0..2.mlp``; gaps are named: ``h.0,2..3.mlp``."""
    parts = [LAYER.split(module) for module in modules]
    folded = list(parts[0])
    for place in range(1, len(folded), 2):
        folded[place] = _ranges(sorted({int(part[place]) for part in parts}))
    return "".join(folded)


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def _natural(name: str) -> list[object]:
    """Sort key that puts ``mul_9`` before ``mul_10``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
