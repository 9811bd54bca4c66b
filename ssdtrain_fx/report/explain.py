"""Trace a call as the backend would, and stop before code generation. Nothing is written to the SSD."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ssdtrain_fx.compiler.aot_eager import compile_with_aot_eager
from ssdtrain_fx.compiler.dry_run import compile_to_zeros, run_dry
from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.default_options import given_or_default
from ssdtrain_fx.passes.pipeline import OffloadedStep
from ssdtrain_fx.report.endurance import ASSUMED_ENDURANCE_BYTES, Endurance
from ssdtrain_fx.report.graph_report import GraphReport
from ssdtrain_fx.report.report import MeasuredPeak, Report
from ssdtrain_fx.report.shared_activations import SharedActivations
from ssdtrain_fx.runtime.memory.step_memory import memory_stats


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    config: OffloadConfig | None = None,
    rated_endurance_bytes: int = ASSUMED_ENDURANCE_BYTES,
    **kwargs: Any,
) -> Report:
    """Report what the backend would do with ``model(*inputs, **kwargs)``.

    Traces the call as ``torch.compile(model, backend=ssdtrain_fx.backend(config))`` would, and stops before code
    generation. Nothing is computed: the traced call returns zeros, and buffers are restored to their values. With
    ``costs="measured"``, each op that has not been measured yet runs by itself, on synthetic data.

    Compile caches are neither read nor changed. Code from a warm cache follows the same plan as this report: a plan
    depends only on the graph, the configuration, the hardware profile, the file of measured times and the source of
    this package, and all of these are part of the key of Inductor's cache.

    Args:
        model: a module or a function. For a compiled module, the original module is explained.
        inputs: the arguments of ``model``. They should require gradients where they do in training.
        config: configuration of the backend; None means the options of ``ssdtrain_fx.enable`` and of
            ``$SSDTRAIN_OPTIONS``, and otherwise the defaults.
        rated_endurance_bytes: total bytes that may be written to the drive, used to predict its lifetime: the TBW of
            its data sheet times 10**12. The default is 600 TB, common for client drives of 1 TB.

    Raises:
        ConfigError: ``model`` cannot be called, ``config`` is not an OffloadConfig, or ``rated_endurance_bytes`` is not
            above 0.
        BudgetError: ``config.memory_budget_bytes`` cannot be met.
    """
    from ssdtrain_fx.compiler.inductor import trace_with_inductor

    config = given_or_default(config)
    Endurance(rated_endurance_bytes, 0, 0.0)  # validate before tracing
    steps: list[OffloadedStep] = []
    shared = SharedActivations()

    def trace(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        known = len(steps)
        if config.inner == "aot_eager":
            compiled = compile_with_aot_eager(
                gm, example_inputs, config, observe=steps.append, compiler=compile_to_zeros
            )
        else:
            compiled = trace_with_inductor(gm, example_inputs, config, observe=steps.append)
        return compiled if len(steps) == known else shared.watch(compiled, known)

    run_dry(model, trace, *inputs, **kwargs)
    plans = shared.count_once([step.plan for step in steps])
    graphs = tuple(
        GraphReport(plan, step.timeline, step.problem, step.costs, step.joint_before, step.joint_after)
        for plan, step in zip(plans, steps, strict=True)
        if step.timeline is not None  # never None here: observed steps have one
    )
    report = Report(graphs, rated_endurance_bytes)
    memory = memory_stats()
    if not memory.planned_peak_bytes:
        return report
    planned_bytes = memory.planned_peak_bytes
    if len(graphs) > 1:  # the runtime only knows the plan of each graph, and a step of several holds more
        planned_bytes = max(planned_bytes, report.step_peak_bytes[1])
    return dataclasses.replace(report, measured=MeasuredPeak(memory.allocated_peak_bytes, planned_bytes))
