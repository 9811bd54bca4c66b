"""Tables of results, for the terminal and for the docs: rows of cells, the head first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

Rows = Sequence[Sequence[str]]


def markdown(rows: Rows) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def rich_table(rows: Rows, title: str | None = None, caption: str | None = None) -> Table:
    table = Table(*rows[0], title=title, caption=caption)
    for row in rows[1:]:
        table.add_row(*row)
    return table
