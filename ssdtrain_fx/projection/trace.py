"""The planning problem of one forward and backward on one GPU of a machine, without that machine: shapes are enough."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.planning.transfer_problem import TransferProblem
from ssdtrain_fx.projection.parallelism import Parallelism
from ssdtrain_fx.projection.stretch import stretch
from ssdtrain_fx.projection.transformer import Shape, Transformer
from ssdtrain_fx.report.explain import explain
from ssdtrain_fx.report.graph_report import GraphReport

TRACED_LAYERS = (5, 9)
"""Tried in this order. Inductor may treat every second layer differently, and then five are too few."""


def trace(
    shape: Shape,
    *,
    micro_batch: int,
    hardware: Hardware,
    parallelism: Parallelism | None = None,
    with_head: bool = True,
    recompute: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> TransferProblem:
    """Trace a step of a transformer. A deep one is traced with a few layers, and the others are added.

    Args:
        micro_batch: samples.
        parallelism: how GPUs share each layer. None: there is one.
        with_head: False: the first stage of a pipeline.
        recompute: backward computes each layer again.

    Raises:
        ConfigError: a size is impossible, or the layers of a deep one do not repeat.
    """
    if micro_batch < 1:
        raise ConfigError(f"The micro-batch is {micro_batch}; expected at least 1.")
    parallelism = parallelism or Parallelism()
    visits = micro_batch * shape.sequence // parallelism.context * shape.experts_per_token
    if visits * parallelism.expert < shape.experts:
        raise ConfigError(f"A micro-batch visits {visits * parallelism.expert} of {shape.experts} experts: too few.")
    error: ConfigError | None = None
    for few in TRACED_LAYERS:
        for traced in (few, few + 1):
            is_deep = shape.layers > traced and shape.family != "t5"  # whose two halves are different
            problem = trace_whole(
                dataclasses.replace(shape, layers=traced) if is_deep else shape,
                micro_batch=micro_batch,
                hardware=hardware,
                parallelism=parallelism,
                with_head=with_head,
                recompute=recompute,
                dtype=dtype,
            )
            if not is_deep:
                return problem
            try:
                return stretch(problem, traced, shape.layers)
            except ConfigError as failure:
                error = failure
    assert error is not None
    raise error


def trace_whole(
    shape: Shape,
    *,
    micro_batch: int,
    hardware: Hardware,
    parallelism: Parallelism | None = None,
    with_head: bool = True,
    recompute: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> TransferProblem:
    """Trace all layers, which takes about a second for five of them. Gradients of parameters do not count as memory:
    they are part of the states of a GPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode():
            module = Transformer(shape, parallelism, with_head=with_head, recompute=recompute)
            size = (micro_batch, shape.sequence // module.parallelism.context)
            tokens, labels = (torch.empty(size, dtype=torch.int64) for _ in range(2))
            config = OffloadConfig(hardware=hardware, recompute=False, max_slowdown=0.0)
            report = explain(module, tokens, labels, config=config)
    finally:
        torch.set_default_dtype(before)
    (graph,) = report.graphs
    return _without_gradients(graph)


def _without_gradients(graph: GraphReport) -> TransferProblem:
    """The problem if each gradient is added to a buffer of its parameter as soon as it is complete, as with several
    micro-batches. The buffers count as states, not as activations."""
    problem, schedule = graph.problem, graph.timeline.before
    end = len(problem.node_s)
    assert len(schedule.nodes) == end  # nothing was rewritten before planning
    change = np.zeros(end + 1, dtype=np.int64)
    for span in schedule.live:
        if span.end == end and span.start > problem.marker:
            change[span.start + 1] -= span.size_bytes
    fixed = np.array(problem.fixed_live_bytes, dtype=np.int64) + np.cumsum(change)[:end]
    return dataclasses.replace(problem, fixed_live_bytes=tuple(fixed.tolist()))
