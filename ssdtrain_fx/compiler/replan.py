"""Plans a step again when the disk has become faster or slower than planned.

::

    forward    compiled with the profile  -->  the disk drifts  -->  compiled again, with the observed rates

The graph that Dynamo captured is compiled again. Its guards still hold, and no other compiled code is dropped. This
happens when a forward is about to run, never between a forward and its backward: a pending backward belongs to the code
that ran its forward, which lives as long as it is needed.

Only graphs whose inputs all have static shapes are compiled again. With symbolic shapes, a second compilation could
need new guards, which would not be checked: Dynamo's guards are already complete.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ssdtrain_fx.fork_safe_lock import ForkSafeLock
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.units import format_bytes

log = logging.getLogger(__name__)

DRIFT_FACTOR = 1.5
"""A rate that changes by this factor has drifted. The planner keeps a quarter of each transfer time in reserve."""
DRIFT_STEPS = 5
"""Steps in a row that must drift, so that a passing disturbance does not count."""
REPLAN_INTERVAL_S = 600.0
"""Minimum time between two plans, because each one takes a compilation."""

CompileFor = Callable[[fx.GraphModule, Sequence[Any], Hardware], Callable[..., Any]]


class Drift:
    """Detects that the rates of the disk have left the profile for good."""

    def __init__(self, hardware: Hardware, clock: Callable[[], float] = time.monotonic) -> None:
        self.hardware = hardware
        """The profile of the current plan."""
        self._clock = clock
        self._steps = 0
        self._replanned_s: float | None = None

    def observe(self, seen: Statistics) -> Hardware | None:
        """Compare observed rates with the profile, once per step. Returns the profile for a new plan if one is due."""
        measured = dataclasses.replace(
            self.hardware,
            write=_with_rate(self.hardware.write, seen.write_bytes_per_s),
            read=_with_rate(self.hardware.read, seen.read_bytes_per_s),
        )
        self._steps = self._steps + 1 if _differs(self.hardware, measured) else 0
        now_s = self._clock()
        too_soon = self._replanned_s is not None and now_s - self._replanned_s < REPLAN_INTERVAL_S
        if self._steps < DRIFT_STEPS or too_soon:
            return None
        self._steps, self._replanned_s, self.hardware = 0, now_s, measured
        return measured


class ReplanningStep:
    """The compiled function of one graph. It is compiled again when the disk has drifted."""

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        compile_for: CompileFor,
        drift: Drift,
        statistics: Callable[[], Statistics],
    ) -> None:
        self._gm = _copy_graph(gm)
        self._compile_for = compile_for
        self._drift = drift
        self._statistics = statistics
        self._lock = ForkSafeLock()
        self._compiled = compile_for(gm, example_inputs, drift.hardware)

    def run(self, *inputs: Any) -> Any:
        """Call the compiled function, after compiling it again if the disk has drifted."""
        if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
            with self._lock.current:
                self._replan_after_drift(inputs)
        return self._compiled(*inputs)

    def _replan_after_drift(self, inputs: Sequence[Any]) -> None:
        planned = self._drift.hardware
        measured = self._drift.observe(self._statistics())
        if measured is None:
            return
        log.warning(
            "the disk writes %s/s and reads %s/s; the plan assumed %s/s and %s/s. "
            "The step is planned and compiled again.",
            format_bytes(measured.write.bytes_per_s),
            format_bytes(measured.read.bytes_per_s),
            format_bytes(planned.write.bytes_per_s),
            format_bytes(planned.read.bytes_per_s),
        )
        self._compiled = self._compile_for(_copy_graph(self._gm), inputs, measured)


def has_static_shapes(example_inputs: Sequence[Any]) -> bool:
    """Whether no input is symbolic or has a symbolic shape."""
    sizes = [size for value in example_inputs if isinstance(value, torch.Tensor) for size in value.size()]
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return not any(isinstance(value, symbolic) for value in (*example_inputs, *sizes))


def _copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """The same code over the same tensors. A compiler changes the graph that it gets."""
    return fx.GraphModule(gm, copy.deepcopy(gm.graph))


def _with_rate(channel: Channel, bytes_per_s: float | None) -> Channel:
    return channel if bytes_per_s is None else dataclasses.replace(channel, bytes_per_s=bytes_per_s)


def _differs(one: Hardware, other: Hardware) -> bool:
    pairs = ((one.write, other.write), (one.read, other.read))
    return any(max(a.bytes_per_s, b.bytes_per_s) >= DRIFT_FACTOR * min(a.bytes_per_s, b.bytes_per_s) for a, b in pairs)
