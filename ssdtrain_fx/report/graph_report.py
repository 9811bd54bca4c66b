"""The report on one training graph."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

import networkx as nx

from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.passes.analysis.dependencies import find_dependencies
from ssdtrain_fx.passes.analysis.describe_schedule import Timeline
from ssdtrain_fx.passes.analysis.node_calls import CostSources
from ssdtrain_fx.passes.planning.plan import Peak, PeakRole, Plan
from ssdtrain_fx.passes.planning.transfer_problem import TransferProblem
from ssdtrain_fx.report.decisions import style_of
from ssdtrain_fx.report.endurance import Endurance
from ssdtrain_fx.report.graphs import diff_graphs, render_svg, to_dot
from ssdtrain_fx.report.table import Row, Sort, format_table, make_rows
from ssdtrain_fx.units import format_bytes, format_seconds

EMPTY = (
    "No graph of this call saves anything for backward (no gradient is needed, or nothing was captured). Let "
    'parameters or inputs require gradients; TORCH_LOGS="graph_breaks" shows what was not captured.'
)


_ROLES: Mapping[PeakRole, str] = {
    "logits": "logits and values of their size",
    "chunk": "inside one chunk of the loss",
    "gradients": "gradients",
    "saved": "saved for backward",
    "other": "other intermediate results",
}


@dataclasses.dataclass(frozen=True, slots=True)
class GraphReport:
    """One training graph: its plan, its memory and transfers over time, and its scheduled joint graph as text."""

    plan: Plan
    timeline: Timeline
    """When each node runs and where each storage is, before and after."""
    problem: TransferProblem
    """The problem that the plan solves: seconds and bytes of the graph, and the hardware."""
    costs: CostSources
    """Where the seconds in ``problem`` come from."""
    joint_before: str
    joint_after: str

    def endurance(self, rated_bytes: int) -> Endurance:
        """Drive lifetime if only this graph runs."""
        return Endurance(rated_bytes, self.plan.written_bytes, self.plan.step_s + self.plan.exposed_s)

    def summary(self, rated_endurance_bytes: int) -> str:
        """One line: memory saved, time added, and drive lifetime."""
        plan = self.plan
        peaks = f"{format_bytes(plan.peak_before_bytes)} -> {format_bytes(plan.peak_after_bytes)}"
        on_host = f", up to {format_bytes(plan.host_peak_bytes)} in host memory" if plan.on_host else ""
        chunks = f"; loss in {plan.loss_chunks} chunks" if plan.loss_chunks else ""
        step = f"a step of {format_seconds(plan.step_s)} ({100 * plan.slowdown:+.1f} %)"
        return (
            f"predicted activation peak {peaks}{chunks}; "
            f"{format_bytes(plan.offloaded_bytes)} out and back per step{on_host}; "
            f"{format_seconds(plan.exposed_s)} exposed in {step}; {self.endurance(rated_endurance_bytes)}"
        )

    def decided(self) -> str:
        """One line: number of saved storages per decision, without inputs."""
        names = [style_of(storage.decision).name for storage in self.plan.storages if not storage.is_input]
        counts = collections.Counter(names)
        return f"{len(names)} saved storages: " + (", ".join(f"{counts[name]} {name}" for name in counts) or "none")

    def optimality(self, config: OffloadConfig, *, time_limit_s: float = 60) -> str:
        """One line: how far the plan is from the lowest peak that any placement can reach in the same time.

        Solves the problem exactly, which takes minutes for about fifty storages or more; if the time limit is reached,
        the proven bound is reported. The exact planner has no host tier, so a plan with one may be below the bound.
        """
        from ssdtrain_fx.passes.planning.solve_exactly import solve_exactly  # scipy takes a second to import

        allowed = max(config.max_slowdown, self.plan.slowdown)
        problem = self.problem.with_ops_in_one_row()  # no placement takes less time
        exact = solve_exactly(problem, max_slowdown=allowed, time_limit_s=time_limit_s)
        found = self.plan.peak_after_bytes
        above = found / exact.lower_bound_bytes - 1 if exact.lower_bound_bytes else 0.0
        tier, this = (", no host tier", "this plan has a host tier and") if self.plan.on_host else ("", "this plan")
        where = f"at most {100 * above:.1f} % above the optimum" if above >= 0 else f"{-100 * above:.1f} % below that"
        return (
            f"exact planner, {100 * allowed:.1f} % of the step time allowed{tier}: no placement has a peak below "
            f"{format_bytes(exact.lower_bound_bytes)}; {this} is {where}"
        )

    def where(self) -> str:
        """Where the peak is before and after, and how low it could be."""
        plan = self.plan
        lines = [
            f"{name:7}{_describe_peak(peak)}"
            for name, peak in (("before", plan.peak_before), ("after", plan.peak_after))
        ]
        lines.append(_describe_parts(plan))
        if plan.peak_after_bytes == plan.floor_bytes:
            lines.append("this is the floor: everything live there is in use or cannot move")
        else:
            lines.append(f"floor  {format_bytes(plan.floor_bytes)}, if everything moved at any cost in time")
        if plan.why_nothing_moves:
            lines.append(f"nothing is offloaded: {plan.why_nothing_moves}")
        return "\n".join(lines)

    def rows(self, sort: Sort = "order", *, fold: bool = True) -> list[Row]:
        """Saved storages that the graph allocates, without inputs; see :func:`~ssdtrain_fx.report.table.make_rows`."""
        made = [storage for storage in self.plan.storages if not storage.is_input]
        modules = {node.name: node.module for node in self.timeline.before.nodes}
        return make_rows(made, modules, sort=sort, fold=fold)

    def table(self, sort: Sort = "order", *, fold: bool = True) -> str:
        """Table of the saved storages that the graph allocates, equal layers in one row. A last line counts the inputs.

        Args:
            sort: ``order`` (of forward), ``size``, ``name`` or ``decision``.
            fold: False gives every storage a separate row.

        Raises:
            ConfigError: ``sort`` is unknown.
        """
        inputs = [storage for storage in self.plan.storages if storage.is_input]
        inputs_bytes = sum(storage.size_bytes for storage in inputs)
        return (
            f"{format_table(self.rows(sort, fold=fold))}\n"
            f"and {len(inputs)} inputs, {format_bytes(inputs_bytes)}: parameters, buffers and data stay in memory"
        )

    def diff(self, *, context: int = 3) -> str:
        """Unified diff of the printed graph before and after; empty when the graph does not change. Leaves out where
        values are freed and the directories of source files."""
        return "\n".join(diff_graphs(self.joint_before, self.joint_after, context=context))

    def to_networkx(self, *, after: bool = True) -> nx.DiGraph[str]:
        """The rewritten graph, or with ``after=False`` the original one: its nodes and storages, and which node makes,
        reads, views and frees which storage. See
        :func:`~ssdtrain_fx.passes.analysis.dependencies.find_dependencies`."""
        return find_dependencies(self.timeline.after if after else self.timeline.before)

    def to_dot(self, *, after: bool = True, around: str | None = None, hops: int = 2) -> str:
        """The graph in the DOT language, storages in the colour of their decision.

        Args:
            around: name of a storage. Draws only the nodes within ``hops`` edges of it and of its four inserted nodes.

        Raises:
            SSDTrainError: the graph has no node or storage named ``around``.
        """
        schedule = self.timeline.after if after else self.timeline.before
        colors = {storage.name: style_of(storage.decision).color for storage in self.plan.storages}
        return to_dot(schedule, colors=colors, around=around, hops=hops)

    def to_svg(self, *, after: bool = True, around: str | None = None, hops: int = 2) -> str:
        """:meth:`to_dot`, rendered by Graphviz. A graph of thousands of nodes takes minutes; use ``around``.

        Raises:
            SSDTrainError: the program ``dot`` is not installed or fails, or as in :meth:`to_dot`.
        """
        return render_svg(self.to_dot(after=after, around=around, hops=hops))


def _describe_parts(plan: Plan) -> str:
    """What the peak after consists of, and what would lower it."""
    parts = plan.peak_after.parts
    text = ", ".join(f"{format_bytes(part.size_bytes)} {_ROLES[part.role]}" for part in parts)
    largest = parts[0].role if parts else "other"
    advice = ""
    if largest == "logits":
        advice = "; chunk_loss may lower it" if plan.loss_chunks == 0 else ""
    elif largest == "chunk":
        advice = f"; more than {plan.loss_chunks} chunks may lower it" if plan.loss_chunks else ""
    return f"parts  {text}{advice}"


def _describe_peak(peak: Peak) -> str:
    largest = ", ".join(f"{name} {format_bytes(size_bytes)}" for name, size_bytes in peak.largest)
    source = f" ({peak.source})" if peak.source else ""
    return f"{format_bytes(peak.size_bytes)} in {peak.phase} at {peak.node}{source}: {largest}, ..."
