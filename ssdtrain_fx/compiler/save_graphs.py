"""Save the scheduled joint graphs of a model, for a bug report when the model itself cannot be shared.

No pass runs, because a graph on which a pass fails is exactly what the report needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from ssdtrain_fx.compiler.dry_run import run_dry
from ssdtrain_fx.passes.graph.graph_json import to_json
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, join


def trace_joint_graphs(model: Callable[..., Any], *inputs: Any, **kwargs: Any) -> tuple[ScheduledJointGraph, ...]:
    """The graphs of ``model(*inputs, **kwargs)`` as Inductor's partitioner cuts them, one per graph break.

    Nothing is computed, and the model is unchanged.
    """
    from ssdtrain_fx.compiler.inductor import PartitionedStep, capture_with_inductor

    steps: list[PartitionedStep] = []

    def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return capture_with_inductor(gm, example_inputs, observe=steps.append)

    run_dry(model, capture, *inputs, **kwargs)
    return tuple(join(step.forward, step.backward, num_forward_outputs=step.num_forward_outputs) for step in steps)


def save_joint_graphs(path: Path, model: Callable[..., Any], *inputs: Any, **kwargs: Any) -> list[Path]:
    """Write each graph of :func:`trace_joint_graphs` to a separate file, and return the paths.

    A single graph goes to ``path``. Several graphs go to ``path`` with ``-0``, ``-1`` and so on before its suffix.

    Raises:
        ConfigError: a graph has symbolic sizes, or a value that cannot be written.
    """
    texts = [to_json(joint) for joint in trace_joint_graphs(model, *inputs, **kwargs)]
    numbered = [path.with_stem(f"{path.stem}-{idx}") for idx in range(len(texts))]
    paths = [path] if len(texts) == 1 else numbered
    for target, text in zip(paths, texts, strict=True):
        target.write_text(text + "\n", encoding="utf-8")
    return paths
