"""What earlier steps of a graph say about how long it computes: ``costs="steps"``."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ssdtrain_fx.compiler.replan import has_static_shapes
from ssdtrain_fx.config import OffloadConfig, device_of
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.pipeline import OffloadedStep
from ssdtrain_fx.passes.planning.plan import Plan
from ssdtrain_fx.runtime.step_clock import TimedHalf, step_clock

log = logging.getLogger(__name__)


class Calibration:
    """How much longer one captured graph computes than by roofline. Does nothing without ``costs="steps"``.

    Make it before the graph is compiled: a compiler changes the graph that it gets. It holds no tensors.
    """

    def __init__(self, config: OffloadConfig, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.config = config
        self.device = device_of(example_inputs)
        self._graph_digest = ""
        """Digest of what the graph computes. Empty: it is not measured."""
        if config.costs == "steps":
            if self.device != "cpu":
                log.warning(
                    "costs='steps' measures steps on a CPU only; on this device, costs='roofline' is used instead."
                )
            elif has_static_shapes(example_inputs):  # with others, a step may take any time
                self._graph_digest = _digest(gm, example_inputs)
        self.roofline_ratio: float | None = None
        """Measured seconds as a multiple of those by roofline. None: not measured, or not asked for."""
        self._key = ""

    @functools.cached_property
    def hardware(self) -> Hardware:
        """The profile, with kernels as slow as in earlier steps. Loaded when a graph is partitioned: a graph without
        gradients needs no profile."""
        hardware = self.config.load_hardware(self.device)
        if not self._graph_digest:
            return hardware
        from ssdtrain_fx.machine.step_times import GraphWatcher, load_step_times

        # A ratio is only right for the rates from which it was computed.
        rates = (hardware.flops_per_s, hardware.elements_per_s, hardware.memory_bytes_per_s, hardware.kernel_s)
        self._key = hashlib.sha256(f"{self._graph_digest} {json.dumps(rates, sort_keys=True)}".encode()).hexdigest()
        times = load_step_times(self.device)
        self.roofline_ratio = times.ratio(self._key)
        step_clock.watch(self._key, GraphWatcher(times, self._key))
        return hardware if self.roofline_ratio is None else hardware.computing_slower(self.roofline_ratio)

    def describe(self, step: OffloadedStep) -> OffloadedStep:
        """``step``, which says by how much its times were multiplied."""
        costs = dataclasses.replace(step.costs, roofline_ratio=self.roofline_ratio)
        return dataclasses.replace(step, costs=costs)

    def halves(self, plan: Plan) -> tuple[TimedHalf, TimedHalf] | tuple[None, None]:
        """What the clock needs of the forward and the backward of ``plan``. None: they are not timed."""
        if not self._key:
            return None, None
        roofline_s = (plan.step_s + plan.recompute_s) / (self.roofline_ratio or 1.0)
        ops_s = plan.exposed_s - plan.recompute_s - plan.stall_s
        return (
            TimedHalf(self._key, "forward", roofline_s, ops_s),
            TimedHalf(self._key, "backward", roofline_s, ops_s),
        )


def _digest(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """Of the code and the inputs: equal in every process that captures the same graph."""
    codes = [module.code for module in gm.modules() if isinstance(module, fx.GraphModule)]
    inputs = [
        (tuple(map(str, value.shape)), str(value.dtype), value.requires_grad)
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for value in example_inputs
    ]
    autocast = torch.is_autocast_enabled("cpu") and str(torch.get_autocast_dtype("cpu"))
    return hashlib.sha256(repr((codes, inputs, autocast)).encode()).hexdigest()
