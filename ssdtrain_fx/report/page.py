"""The report as one self-contained HTML page: the template next to this file, with the report embedded as data.

The data is a compact form for this page only. Other programs should read ``Report.to_json``.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any

from ssdtrain_fx.passes.analysis.describe_schedule import Schedule
from ssdtrain_fx.report.decisions import style_of
from ssdtrain_fx.report.endurance import format_lifetime
from ssdtrain_fx.report.graph_report import EMPTY, GraphReport
from ssdtrain_fx.report.graphs import code_lines, diff_graphs
from ssdtrain_fx.report.table import Row

PLACE_OF_DATA = "/*REPORT*/"


def render_page(
    graphs: Sequence[GraphReport], *, rated_endurance_bytes: int, step: str = "", measured: str = ""
) -> str:
    """Return the page as text.

    Args:
        rated_endurance_bytes: of the drive whose lifetime is shown.
        step: one line on a step that runs all graphs; "" if there is only one.
        measured: what the steps of this process have used so far; "" if none has run.
    """
    template = importlib.resources.files("ssdtrain_fx.report").joinpath("page.html").read_text(encoding="utf-8")
    before, after = template.split(PLACE_OF_DATA)
    # An unescaped "<" could close the script element that holds the data.
    content = _page_data(graphs, rated_endurance_bytes) | {"step": step, "measured": measured}
    data = json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return before + data + after


def _page_data(graphs: Sequence[GraphReport], rated_endurance_bytes: int) -> dict[str, Any]:
    decisions = [storage.decision for graph in graphs for storage in graph.plan.storages]
    styles = {style.name: dataclasses.asdict(style) for style in map(style_of, decisions)}
    return {
        "empty": EMPTY,
        "styles": styles,
        "rated_bytes": rated_endurance_bytes,
        "graphs": [_graph_data(graph, rated_endurance_bytes) for graph in graphs],
    }


def _graph_data(graph: GraphReport, rated_endurance_bytes: int) -> dict[str, Any]:
    plan, timeline = graph.plan, graph.timeline
    texts = _Texts()
    rows = graph.rows()
    names = [storage.name for row in rows for storage in row.storages]
    idx_of = {name: idx for idx, name in enumerate(names)}
    modules = {node.name: node.module for node in timeline.before.nodes}
    return {
        "summary": graph.summary(rated_endurance_bytes),
        "lifetime": format_lifetime(graph.endurance(rated_endurance_bytes).lifetime_s),
        "hardware": graph.problem.hardware.device,
        "costs": str(graph.costs),
        "offloaded_bytes": plan.offloaded_bytes,
        "host_peak_bytes": plan.host_peak_bytes,
        "floor_bytes": plan.floor_bytes,
        "num_inputs": sum(storage.is_input for storage in plan.storages),
        "inputs_bytes": sum(storage.size_bytes for storage in plan.storages if storage.is_input),
        "before": _schedule_data(timeline.before, texts),
        "after": _schedule_data(timeline.after, texts),
        "rows": [_row_data(row, idx_of) for row in rows],
        "storages": [
            {
                "name": storage.name,
                "saved_nodes": storage.saved_nodes,
                "shape": storage.shape,
                "dtype": storage.dtype,
                "device": storage.device,
                "size_bytes": storage.size_bytes,
                "op": storage.op,
                "module": modules.get(storage.name, ""),
                "source": storage.source,
                "style": style_of(storage.decision).name,
                "decision": dataclasses.asdict(storage.decision),
            }
            for row in rows
            for storage in row.storages
        ],
        "activities": [
            [idx_of.get(one.storage, -1), one.kind, round(one.begin_s, 7), round(one.end_s, 7)]
            for one in timeline.activities
        ],
        "diff": _marked_lines(graph),
        "texts": texts.all,
    }


def _row_data(row: Row, idx_of: dict[str, int]) -> dict[str, Any]:
    return {"module": row.module, "storages": [idx_of[storage.name] for storage in row.storages]}


def _schedule_data(schedule: Schedule, texts: _Texts) -> dict[str, Any]:
    """Columns instead of rows, and texts by number, because thousands of nodes share few texts."""
    nodes = schedule.nodes
    return {
        "marker": schedule.marker,
        "step_s": schedule.step_s,
        "name": [node.name for node in nodes],
        "op": [texts.number(node.op) for node in nodes],
        "module": [texts.number(node.module) for node in nodes],
        "source": [texts.number(node.source) for node in nodes],
        "start_s": [round(node.start_s, 7) for node in nodes],
        "storage": {position: node.storage for position, node in enumerate(nodes) if node.storage},
        "live": [[span.storage, span.size_bytes, span.start, span.end] for span in schedule.live],
    }


class _Texts:
    """A table of texts that stores each text once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.all)
            self.all.append(text)
        return self._numbers[text]


def _marked_lines(graph: GraphReport) -> str:
    """All lines of both graphs, each prefixed with its mark in a unified diff."""
    lines = diff_graphs(graph.joint_before, graph.joint_after, context=None)[3:]
    return "\n".join(lines or (f" {line}" for line in code_lines(graph.joint_after)))
