"""Look inside: what would be offloaded, and why not the rest. Nothing is compiled to code, nothing touches a disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ssdtrain_fx.aot_eager import compile_with_aot_eager
from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.dry_run import compile_to_zeros, run_dry
from ssdtrain_fx.passes.pipeline import OffloadedStep
from ssdtrain_fx.passes.plan import Keep, Offload, Peak, Plan, Recompute, SavedStorage
from ssdtrain_fx.passes.transfer_problem import TransferProblem
from ssdtrain_fx.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class GraphReport:
    """One training graph: its plan, and its scheduled joint graph before and after as text."""

    plan: Plan
    problem: TransferProblem
    """What the plan is an answer to: seconds and bytes of the graph, and the hardware."""
    joint_before: str
    joint_after: str

    def summary(self) -> str:
        """One line: did it help?"""
        plan = self.plan
        peaks = f"{format_bytes(plan.peak_before_bytes)} -> {format_bytes(plan.peak_after_bytes)}"
        return (
            f"predicted activation peak {peaks}, step time {100 * plan.slowdown:+.1f} %; "
            f"{format_bytes(plan.offloaded_bytes)} out and back per step; "
            f"{len(plan.offloaded)} of {len(plan.storages)} saved storages offloaded"
            + (f", {len(plan.recomputed)} made again in backward" if plan.recomputed else "")
        )

    def optimality(self, config: OffloadConfig, *, time_limit_s: float = 60) -> str:
        """One line: how far the plan is from the lowest peak that any placement can reach in the same time.

        Solves the problem exactly, which takes minutes from some fifty storages on; then the bound counts.
        """
        from ssdtrain_fx.passes.solve_exactly import solve_exactly  # scipy takes a second to import

        allowed = max(config.max_slowdown, self.plan.slowdown)
        exact = solve_exactly(self.problem, max_slowdown=allowed, time_limit_s=time_limit_s)
        found = self.plan.peak_after_bytes
        above = found / exact.lower_bound_bytes - 1 if exact.lower_bound_bytes else 0.0
        return (
            f"exact planner, {100 * allowed:.1f} % of the step time allowed: no placement has a peak below "
            f"{format_bytes(exact.lower_bound_bytes)}; this plan is at most {100 * above:.1f} % above the optimum"
        )

    def where(self) -> str:
        """Where the peak stands before and after, and how far down it could go."""
        plan = self.plan
        lines = [
            f"{name:7}{_describe_peak(peak)}"
            for name, peak in (("before", plan.peak_before), ("after", plan.peak_after))
        ]
        if plan.peak_after_bytes == plan.floor_bytes:
            lines.append("that is the floor: what is live there is being worked on, or cannot move")
        else:
            lines.append(f"floor  {format_bytes(plan.floor_bytes)}, with everything moved at any cost in time")
        return "\n".join(lines)

    def table(self) -> str:
        """One row per saved storage that the graph makes, in the order of forward; inputs are counted below."""
        made = [storage for storage in self.plan.storages if not storage.is_input]
        inputs = [storage for storage in self.plan.storages if storage.is_input]
        rows = [_HEADER, *(_row(storage) for storage in made)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        inputs_bytes = sum(storage.size_bytes for storage in inputs)
        return "\n".join(
            [
                lines[0],
                "-" * max(map(len, lines)),
                *lines[1:],
                f"and {len(inputs)} inputs, {format_bytes(inputs_bytes)}: parameters, buffers and data stay in memory",
            ]
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What :func:`explain` returns. ``print(report)`` shows everything but the graphs."""

    graphs: tuple[GraphReport, ...]
    """One per compiled graph: several when Dynamo breaks the graph, none for code without gradients."""

    def __str__(self) -> str:
        if not self.graphs:
            return "No graph of this call saves anything for backward (no gradient is needed, or nothing was captured)."
        parts: list[str] = []
        for idx, graph in enumerate(self.graphs):
            title = f"graph {idx} of {len(self.graphs)}: " if len(self.graphs) > 1 else ""
            parts.append(f"{title}{graph.summary()}\n{graph.where()}\n\n{graph.table()}")
        return "\n\n".join(parts)


_NAMES = {Keep: "keep", Offload: "offload", Recompute: "recompute"}
_HEADER = ("storage", "shape", "dtype", "size", "op", "source", "decision", "reason")


def _describe_peak(peak: Peak) -> str:
    largest = ", ".join(f"{name} {format_bytes(size_bytes)}" for name, size_bytes in peak.largest)
    source = f" ({peak.source})" if peak.source else ""
    return f"{format_bytes(peak.size_bytes)} in {peak.phase} at {peak.node}{source}: {largest}, ..."


def _row(storage: SavedStorage) -> tuple[str, ...]:
    decision = storage.decision
    return (
        storage.name,
        "[" + ", ".join(storage.shape) + "]",
        storage.dtype,
        format_bytes(storage.size_bytes),
        storage.op,
        storage.source,
        _NAMES[type(decision)],
        decision.reason,
    )


def explain(model: Callable[..., Any], *inputs: Any, config: OffloadConfig | None = None, **kwargs: Any) -> Report:
    """What the backend would do with ``model(*inputs, **kwargs)``.

    Traces the call as ``torch.compile(model, backend=ssdtrain_fx.backend(config))`` would and stops before code is
    generated. Nothing is computed: the traced call returns zeros, and buffers get their values back.

    Args:
        model: a module or a function; a compiled module is explained by the module in it.
        inputs: as for the model. They should require gradients where they do in training.

    Raises:
        BudgetError: ``config.memory_budget_bytes`` is out of reach.
    """
    from ssdtrain_fx.inductor import trace_with_inductor

    config = OffloadConfig() if config is None else config
    steps: list[OffloadedStep] = []

    def trace(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        if config.inner == "aot_eager":
            return compile_with_aot_eager(gm, example_inputs, config, observe=steps.append, compiler=compile_to_zeros)
        return trace_with_inductor(gm, example_inputs, config, observe=steps.append)

    run_dry(model, trace, *inputs, **kwargs)
    return Report(tuple(GraphReport(step.plan, step.problem, step.joint_before, step.joint_after) for step in steps))
