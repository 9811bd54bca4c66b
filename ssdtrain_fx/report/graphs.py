"""The graph before and after, as a diff and as a drawing."""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
from collections.abc import Mapping

import networkx as nx

from ssdtrain_fx.errors import SSDTrainError
from ssdtrain_fx.passes.analysis.dependencies import find_dependencies
from ssdtrain_fx.passes.analysis.describe_schedule import Schedule

GRAPHVIZ_TIMEOUT_S = 60
MAX_LINE = 500
_FREED = re.compile(r";  (?:\w+ = )+None$")
_DIRECTORY = re.compile(r"(# File: )\S*/")


def diff_graphs(before: str, after: str, *, context: int | None = 3) -> list[str]:
    """Unified diff of two printed graphs, headers included; empty when they are equal.

    Args:
        context: unchanged lines around each change; None for all of them.
    """
    old, new = code_lines(before), code_lines(after)
    around = len(old) + len(new) if context is None else context
    return list(difflib.unified_diff(old, new, "before", "after", n=around, lineterm=""))


def code_lines(text: str) -> list[str]:
    """The lines of a printed graph, without the parts that clutter a diff.

    ``; a = b = None`` at the end of a line frees values after their last read, and moves whenever a later reader is
    added. Directories of source files are removed because they are private. Long lines are cut: the signature of a
    large graph has thousands of characters.
    """
    lines: list[str] = []
    for line in text.splitlines():
        line = _DIRECTORY.sub(r"\1", _FREED.sub("", line))
        lines.append(line if len(line) <= MAX_LINE else line[:MAX_LINE] + " ...")
    return lines


def to_dot(schedule: Schedule, *, colors: Mapping[str, str], around: str | None = None, hops: int = 2) -> str:
    """The graph in the DOT language, in execution order, inserted nodes in colour.

    Args:
        colors: colours of storages, by name.
        around: draw only the nodes within ``hops`` edges of the nodes of this storage.
    """
    shown = {node.name for node in schedule.nodes} if around is None else _neighbourhood(schedule, around, hops)
    lines = [
        "digraph step {",
        '  node [shape=box style="rounded,filled" fillcolor="#f4f5f7" color="#8a8f98" fontname="sans-serif"]',
        '  edge [color="#8a8f98"]',
    ]
    nodes = [node for node in schedule.nodes if node.name in shown]
    for node in nodes:
        color = colors.get(node.storage or node.name)
        look = f' color="{color}" penwidth=2' if color else ""
        if node.storage:
            look += f' fillcolor="{color}" fontcolor="white"'
        label = f"{node.name}\n{node.op}"
        lines.append(f"  {_quote(node.name)} [label={_quote(label)}{look}]")
    for node in nodes:
        lines += [f"  {_quote(source)} -> {_quote(node.name)}" for source in node.inputs if source in shown]
    return "\n".join([*lines, "}"])


def render_svg(dot: str) -> str:
    """Render DOT text with Graphviz.

    Raises:
        SSDTrainError: ``dot`` is not installed, fails, or takes longer than GRAPHVIZ_TIMEOUT_S.
    """
    program = shutil.which("dot")
    if program is None:
        raise SSDTrainError(
            "Graphviz's program `dot` is not installed. Install Graphviz, or use to_dot(), which does not need it."
        )
    try:
        done = subprocess.run(
            [program, "-Tsvg"], input=dot, capture_output=True, text=True, check=False, timeout=GRAPHVIZ_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise SSDTrainError(
            f"Graphviz did not finish in {GRAPHVIZ_TIMEOUT_S} s. Draw only a part of the graph: to_svg(around=...)."
        ) from error
    if done.returncode != 0:
        raise SSDTrainError(f"Graphviz failed: {done.stderr.strip()}")
    return done.stdout


def _neighbourhood(schedule: Schedule, storage: str, hops: int) -> set[str]:
    nodes = [node.name for node in schedule.nodes]
    graph = find_dependencies(schedule).subgraph(nodes)
    seeds = [node.name for node in schedule.nodes if storage in (node.name, node.storage)]
    if not seeds:
        raise SSDTrainError(
            f"The graph has no node or storage named {storage!r}. Use a name from the first column of the table."
        )
    either_way = graph.to_undirected(as_view=True)
    near: set[str] = set()
    for seed in seeds:
        near.update(nx.single_source_shortest_path_length(either_way, seed, cutoff=hops))
    return near


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
