"""The value that ``explain`` returns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import networkx as nx

from ssdtrain_fx.passes.planning.chain_memory import in_a_row, peak_of_chain
from ssdtrain_fx.passes.planning.plan import Plan
from ssdtrain_fx.plain_values import from_plain
from ssdtrain_fx.report.endurance import ASSUMED_ENDURANCE_BYTES, Endurance
from ssdtrain_fx.report.graph_report import EMPTY, GraphReport
from ssdtrain_fx.report.page import render_page
from ssdtrain_fx.report.table import Sort
from ssdtrain_fx.units import format_bytes

SCHEMA = "ssdtrain_fx.report/3"
"""Incremented when an existing field changes; new fields do not count."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """The memory of the compiled steps that this process has run on a CPU before ``explain``."""

    allocated_bytes: int
    """The most that they have used at a time."""
    planned_bytes: int
    """What their plans predict."""

    def __str__(self) -> str:
        return (
            f"measured {format_bytes(self.allocated_bytes)} at the peak of the steps that this process has run so far; "
            f"their plans predict {format_bytes(self.planned_bytes)}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What ``explain`` returns. ``print(report)`` shows everything but the graphs; ``save`` writes an HTML page."""

    graphs: tuple[GraphReport, ...]
    """One per compiled graph: several when Dynamo breaks the graph, none for code without gradients."""
    rated_endurance_bytes: int = ASSUMED_ENDURANCE_BYTES
    """Rating of the drive whose lifetime is predicted."""
    measured: MeasuredPeak | None = None
    """None if no compiled step has run."""

    @property
    def plan(self) -> Plan:
        """The plan of the only graph.

        Raises:
            ValueError: the report does not have exactly one graph.
        """
        if len(self.graphs) != 1:
            raise ValueError(
                f"This report has {len(self.graphs)} graphs; expected one. Each of report.graphs has its own plan."
            )
        return self.graphs[0].plan

    @property
    def endurance(self) -> Endurance:
        """Drive lifetime if every graph runs once per step."""
        parts = [graph.endurance(self.rated_endurance_bytes) for graph in self.graphs]
        return Endurance(
            self.rated_endurance_bytes, sum(part.written_bytes for part in parts), sum(part.step_s for part in parts)
        )

    @property
    def step_peak_bytes(self) -> tuple[int, int]:
        """Predicted activation peak, before and after, of a step that runs all graphs: their forwards, then their
        backwards in reverse order, as Dynamo runs the parts of a model with graph breaks."""
        plans = [graph.plan for graph in self.graphs]
        if len(plans) == 1:
            return plans[0].peak_before_bytes, plans[0].peak_after_bytes
        order = in_a_row(len(plans))
        before, after = [plan.chain_before for plan in plans], [plan.chain_after for plan in plans]
        return peak_of_chain(before, order), peak_of_chain(after, order)

    def step_summary(self) -> str:
        """One line on the step that runs all graphs. Empty if there is only one, whose summary says it all."""
        if len(self.graphs) < 2:
            return ""
        before, after = map(format_bytes, self.step_peak_bytes)
        return f"a step runs {len(self.graphs)} graphs; predicted activation peak of the step {before} -> {after}"

    def __str__(self) -> str:
        return self.text()

    def text(self, sort: Sort = "order") -> str:
        """Peak of the step if it runs several graphs, then summary, peaks and table of every graph.

        Raises:
            ConfigError: ``sort`` is unknown.
        """
        if not self.graphs:
            return EMPTY
        parts = [summary] if (summary := self.step_summary()) else []
        for idx, graph in enumerate(self.graphs):
            title = f"graph {idx} of {len(self.graphs)}: " if len(self.graphs) > 1 else ""
            summary = graph.summary(self.rated_endurance_bytes)
            parts.append(f"{title}{summary}\n{graph.where()}\n{graph.decided()}\n{graph.costs}\n\n{graph.table(sort)}")
        if self.measured is not None:
            parts.append(str(self.measured))
        return "\n\n".join(parts)

    def diff(self) -> str:
        """Changes of all graphs as one unified diff."""
        return "\n".join(graph.diff() for graph in self.graphs)

    def to_networkx(self) -> list[nx.DiGraph[str]]:
        """The rewritten graphs. ``report.graphs[0].to_networkx(after=False)`` is the first graph before the rewrite."""
        return [graph.to_networkx() for graph in self.graphs]

    def to_json(self) -> str:
        """Serialise to stable JSON, described in docs/report.md: equal reports give equal bytes."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Inverse of ``to_json``.

        Raises:
            ValueError: the text is not a report, or has another schema version.
        """
        try:
            plain: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"This is no report, because it is not JSON: {error}.") from None
        fields = cast("dict[str, Any]", plain) if isinstance(plain, dict) else {}
        schema = fields.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(
                f"The schema of this report is {schema!r}; expected {SCHEMA!r}. Run explain again with this version."
            )
        return from_plain(cls, fields)

    def save(self, path: str | Path) -> Path:
        """Write one HTML page that needs no network and no other file. Returns its path."""
        measured = "" if self.measured is None else str(self.measured)
        page = render_page(
            self.graphs,
            rated_endurance_bytes=self.rated_endurance_bytes,
            step=self.step_summary(),
            measured=measured,
        )
        target = Path(path)
        target.write_text(page, encoding="utf-8")
        return target
