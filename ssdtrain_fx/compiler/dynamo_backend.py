"""The Dynamo backend: compiles a captured graph with a configuration."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ssdtrain_fx.compiler.aot_eager import compile_with_aot_eager
from ssdtrain_fx.compiler.replan import Drift, ReplanningStep, has_static_shapes
from ssdtrain_fx.config import OffloadConfig, device_of
from ssdtrain_fx.default_options import config_with_defaults, given_or_default
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.planning.step_budget import StepBudget
from ssdtrain_fx.runtime.ops import statistics
from ssdtrain_fx.runtime.storage.directory import check_directories
from ssdtrain_fx.vector_math import settle_vector_math

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadBackend:
    """A backend for ``torch.compile``. Backends with equal configurations are equal, so Dynamo does not recompile."""

    config: OffloadConfig

    @property
    def __name__(self) -> str:
        return "ssdtrain"

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compile one graph. Called by Dynamo."""
        if options:
            raise ConfigError(
                f"options={options!r} were given to torch.compile together with ssdtrain_fx.backend(...). "
                'Put them into its OffloadConfig, or use backend="ssdtrain" with options=.'
            )
        return _compile(gm, example_inputs, self.config, mode)


def backend(config: OffloadConfig | None = None) -> OffloadBackend:
    """A backend for ``torch.compile(model, backend=...)``. Without ``config``, it has the options of
    ``ssdtrain_fx.enable`` and of ``$SSDTRAIN_OPTIONS``; with it, these do not count.

    Raises:
        ConfigError: ``config`` is not an OffloadConfig, its ``ssd_dir`` cannot be used, or ``$SSDTRAIN_OPTIONS`` is
            needed and wrong. Checked here, before anything is traced.
    """
    config = given_or_default(config)
    check_directories(config.engine_config().ssd_dir)
    return OffloadBackend(config)


def ssdtrain(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The backend named ``"ssdtrain"``. ``options`` are the fields of ``OffloadConfig``. What they leave
    out comes from ``ssdtrain_fx.enable`` and from ``$SSDTRAIN_OPTIONS``.

    Raises:
        ConfigError: an option is unknown or has a wrong value, or ``ssd_dir`` cannot be used.
    """
    config = config_with_defaults(options)
    check_directories(config.engine_config().ssd_dir)
    return _compile(gm, example_inputs, config, mode)


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], config: OffloadConfig, mode: str | None) -> Any:
    if config.inner == "aot_eager" and mode is not None:
        raise ConfigError(
            f"mode={mode!r} is a setting of Inductor, and inner='aot_eager' does not use it. "
            "Leave mode out, or use inner='inductor'."
        )
    # Dynamo calls the backend in every process, also if the code comes from a cache: before the first step runs.
    settle_vector_math()
    if not torch.is_grad_enabled() or not any(_needs_gradient(value) for value in example_inputs):
        log.info("nothing is offloaded: the graph computes no gradients. Nothing is saved for backward.")
    if config.replan == "off" or not has_static_shapes(example_inputs):
        return _compile_once(gm, example_inputs, config, mode)

    device = device_of(example_inputs)
    # Found once: later, the process holds the memory of the steps that it has run, and too little seems to be left.
    budget = config.find_budget(example_inputs)

    def compile_for(gm: fx.GraphModule, inputs: Sequence[Any], hardware: Hardware) -> Any:
        # ``hardware`` has what is this rank's share of the drives already.
        own = dataclasses.replace(config, hardware=hardware, drive_ranks=1)
        return _compile_once(gm, inputs, own, mode, budget)

    drift = Drift(config.load_hardware(device))
    return ReplanningStep(gm, example_inputs, compile_for, drift, statistics).run


def _needs_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _compile_once(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: OffloadConfig,
    mode: str | None,
    budget: StepBudget | None = None,
) -> Any:
    if config.inner == "aot_eager":
        if config.chunk_loss != "off":
            log.info("the loss is not computed in chunks: inner='aot_eager' has no auto-chunker")
        return compile_with_aot_eager(gm, example_inputs, config, budget=budget)
    # Importing Inductor takes a second or more, so it is imported only where it is used.
    from ssdtrain_fx.compiler.inductor import compile_with_inductor

    return compile_with_inductor(gm, example_inputs, config, mode=mode, budget=budget)
