"""One model of each family, traced once as Inductor would compile it, and planned in several settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from planning import HARDWARE

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.passes.analysis.analyse import Analysis, analyse
from ssdtrain_fx.passes.graph.joint_graph import join
from ssdtrain_fx.passes.pipeline import OffloadedStep, offload_saved_tensors, passes_before_planning
from ssdtrain_fx.passes.planning.step_budget import StepBudget
from ssdtrain_fx.studies import zoo

MODELS = ("gpt2", "bert", "t5", "llama", "mixtral", "vit", "resnet", "mamba")
SIZES: Mapping[str, int] = {"layers": 12, "hidden": 384, "batch": 8, "sequence": 512, "vocab": 2048}


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """Options and hardware to plan with."""

    name: str
    options: Mapping[str, Any]
    hardware: Hardware
    budget_share: float | None = None
    """The budget, as a share of the peak that the model has without offloading."""


SLOW = dataclasses.replace(
    HARDWARE, write=Channel(bytes_per_s=1e8, latency_s=4e-4), read=Channel(bytes_per_s=2e8, latency_s=4e-4)
)
GPU = dataclasses.replace(
    HARDWARE,
    device="cuda",
    flops_per_s={"float32": 2e12},
    memory_bytes_per_s=4e11,
    elements_per_s={"float32": 4e11},
    copies_block_compute=False,
    staging_bytes=1 << 28,
)
SETTINGS = (
    Setting("fast disk, +2 %", {"max_slowdown": 0.02}, HARDWARE),
    Setting("fast disk, +10 %", {"max_slowdown": 0.1}, HARDWARE),
    Setting("slow disk, +10 %", {"max_slowdown": 0.1}, SLOW),
    Setting("slow disk, +30 %", {"max_slowdown": 0.3}, SLOW),
    Setting("half the peak", {}, HARDWARE, 0.5),
    Setting("GPU, +5 %", {"max_slowdown": 0.05}, GPU),
)


class TracedModel:
    """A training step, partitioned by Inductor. Nothing is computed."""

    def __init__(self, model: str, sizes: Mapping[str, int]) -> None:
        found: list[tuple[Sequence[Any], dict[str, Any]]] = []

        def keep(*halves: Any, **kwargs: Any) -> OffloadedStep:
            found.append((halves, kwargs))
            return offload_saved_tensors(*halves, **kwargs)

        torch.manual_seed(0)
        module, make_batch = zoo.build(model, **sizes)
        with mock.patch("ssdtrain_fx.compiler.inductor.offload_saved_tensors", keep):
            report = ssdtrain_fx.explain(module, *make_batch(torch.Generator().manual_seed(0)))
        [(self._halves, self._kwargs)] = found
        self._peak_bytes = report.graphs[0].plan.peak_before_bytes

    def plan(self, setting: Setting) -> OffloadedStep:
        """What the pipeline makes of the step."""
        budget = None
        if setting.budget_share is not None:
            budget = StepBudget(size_bytes=int(setting.budget_share * self._peak_bytes))
        fixed = {"hardware": setting.hardware, "config": OffloadConfig(**setting.options), "budget": budget}
        return offload_saved_tensors(*self._halves, **{**self._kwargs, **fixed, "describe": False, "times": None})

    def analyse(self, setting: Setting) -> Analysis:
        """The step before anything is decided."""
        config = OffloadConfig(**setting.options)
        joint = join(*self._halves, num_forward_outputs=self._kwargs["num_forward_outputs"])
        for run_pass in passes_before_planning(config, joint):
            joint = run_pass(joint)
        return analyse(joint, min_tensor_bytes=config.min_tensor_bytes, hardware=setting.hardware, fused=True)
