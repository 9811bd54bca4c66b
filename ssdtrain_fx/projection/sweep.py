"""Projections of one workload on clusters that differ in drives and in size, and with several slowdowns allowed.

    drives per GPU x allowed slowdowns x data-parallel GPUs -> one Projection each

The number of data-parallel GPUs changes no plan, so a grid takes about as long as its plans.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.projection.models import MODELS
from ssdtrain_fx.projection.parallelism import Parallelism
from ssdtrain_fx.projection.project import (
    CONTEXT_BYTES,
    STATE_BYTES,
    WEIGHT_BYTES,
    Cluster,
    Outcome,
    Projection,
    Workload,
)
from ssdtrain_fx.projection.transformer import Shape

SCHEMA = "ssdtrain_fx.sweep/1"
"""Incremented when an existing field changes; new fields do not count."""
DRIVES_PER_GPU = (0.5, 1, 2, 4, 8)
MAX_SLOWDOWNS = (0.0, 0.01, 0.02, 0.05, 0.1)
MOST_GPUS = 16_384
"""Of the largest cluster, unless the workload itself has more."""

_LLAMA_3 = "The Llama 3 Herd of Models (Llama team, 2024), table 3, https://arxiv.org/abs/2407.21783"
MODEL_SOURCES: Mapping[str, str] = {
    "gpt2-xl": "Language Models are Unsupervised Multitask Learners (Radford et al., 2019)",
    "gpt3-175b": "Language Models are Few-Shot Learners (Brown et al., 2020), https://arxiv.org/abs/2005.14165",
    "llama-3-8b": _LLAMA_3,
    "llama-3-70b": _LLAMA_3,
    "llama-3-405b": _LLAMA_3,
    "mixtral-8x7b": "Mixtral of Experts (Jiang et al., 2024), table 1, https://arxiv.org/abs/2401.04088",
    "deepseek-moe-16b": "DeepSeekMoE (Dai et al., 2024), table 1, https://arxiv.org/abs/2401.06066",
}
"""Where the sizes of the published models are from."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A grid of projections. What ``sweep`` returns."""

    model: str
    cluster: Cluster
    """With the number of drives that was asked for first, which need not be one of the grid."""
    parallelism: Parallelism
    """Of the workload, whose ``data`` is one of the grid."""
    drives_per_gpu: tuple[float, ...]
    max_slowdowns: tuple[float, ...]
    data: tuple[int, ...]
    """Numbers of data-parallel GPUs. Each axis rises."""
    projections: tuple[Projection, ...]
    """Of the three axes, in the order of the fields above, the last one changes fastest."""

    def at(self, drives: int, slowdown: int, data: int) -> Projection:
        """The projection at three positions on the axes, each from 0."""
        return self.projections[(drives * len(self.max_slowdowns) + slowdown) * len(self.data) + data]

    def to_json(self) -> str:
        """Serialise to stable JSON: equal sweeps give equal bytes. Numbers are in the units that their keys name; a
        lifetime without end and an unknown price are null."""
        return json.dumps(self._plain(), indent=1, allow_nan=False) + "\n"

    def _plain(self) -> dict[str, Any]:
        shape, cluster = self.projections[0].shape, self.cluster
        return {
            "schema": SCHEMA,
            "model": {
                "name": self.model,
                "source": MODEL_SOURCES.get(self.model) if MODELS.get(self.model) == shape else None,
                "parameters": shape.parameters,
                **dataclasses.asdict(shape),
            },
            "micro_batch": self.projections[0].micro_batch,
            "parallelism": dataclasses.asdict(self.parallelism),
            "gpu": dataclasses.asdict(cluster.gpu),
            "drive": dataclasses.asdict(cluster.drive),
            "drives_per_gpu": cluster.drives_per_gpu,
            "assumptions": {
                "efficiency_shares": dataclasses.asdict(cluster.efficiency),
                "network_bytes_per_s": cluster.network_bytes_per_s,
                "host_bytes_per_gpu": cluster.host_bytes_per_gpu,
                "context_bytes": CONTEXT_BYTES,
                "weight_bytes_per_parameter": WEIGHT_BYTES,
                "gradient_bytes_per_parameter": WEIGHT_BYTES,
                "state_bytes_per_parameter": STATE_BYTES,
            },
            "axes": {
                "drives_per_gpu": self.drives_per_gpu,
                "max_slowdown_shares": self.max_slowdowns,
                "data_parallel_gpus": self.data,
            },
            "points": [_plain_projection(projection) for projection in self.projections],
        }


def sweep(
    workload: Workload,
    cluster: Cluster,
    *,
    model: str | None = None,
    drives_per_gpu: Iterable[float] = DRIVES_PER_GPU,
    max_slowdowns: Iterable[float] = MAX_SLOWDOWNS,
    data: Iterable[int] | None = None,
) -> Sweep:
    """Project ``workload`` on every cluster of a grid.

    Args:
        cluster: has the GPU and the efficiency that the workload was traced for.
        model: a name to show. None: that of the published model with this shape, or its sizes.
        data: numbers of data-parallel GPUs. None: powers of two, up to a cluster of 16,384 GPUs. That of the workload
            is always among them.

    Raises:
        ConfigError: an axis has no value, or an impossible one.
    """
    own = workload.parallelism
    axes = {
        "drives_per_gpu": sorted(set(map(float, drives_per_gpu))),
        "max_slowdowns": sorted(set(map(float, max_slowdowns))),
        "data": sorted({own.data, *(_powers(own) if data is None else data)}),
    }
    for name, values in axes.items():
        if not values:
            raise ConfigError(f"The sweep has no value of {name}; expected at least one.")
    clusters = [dataclasses.replace(cluster, drives_per_gpu=drives) for drives in axes["drives_per_gpu"]]
    workloads = [workload.with_parallelism(data=number) for number in axes["data"]]
    return Sweep(
        model=_name(workload.shape) if model is None else model,
        cluster=cluster,
        parallelism=own,
        drives_per_gpu=tuple(axes["drives_per_gpu"]),
        max_slowdowns=tuple(axes["max_slowdowns"]),
        data=tuple(int(number) for number in axes["data"]),
        projections=tuple(
            one.project(there, max_slowdown=slowdown)
            for there in clusters
            for slowdown in axes["max_slowdowns"]
            for one in workloads
        ),
    )


def _powers(parallelism: Parallelism) -> list[int]:
    """1, 2, 4 and so on, as long as the cluster has at most ``MOST_GPUS``, and the experts can be spread."""
    most = MOST_GPUS // (parallelism.gpus // parallelism.data)
    powers = [2**power for power in range(most.bit_length())]
    return [data for data in powers if data * parallelism.context % parallelism.expert == 0]


def _name(shape: Shape) -> str:
    for name, known in MODELS.items():
        if known == shape:
            return name
    return f"{shape.family}, {shape.layers} layers of {shape.hidden}"


def _plain_projection(projection: Projection) -> dict[str, Any]:
    parallelism, lifetime_s = projection.parallelism, projection.lifetime_s
    samples = projection.micro_batch * parallelism.micro_batches * parallelism.data
    return {
        "drives_per_gpu": projection.cluster.drives_per_gpu,
        "max_slowdown_share": projection.max_slowdown,
        "data_parallel_gpus": parallelism.data,
        "gpus": parallelism.gpus,
        "tokens_per_step": samples * projection.shape.sequence,
        "state_bytes": projection.state_bytes,
        "communication_s": projection.communication_s,
        "update_s": projection.update_s,
        "bubble_share": parallelism.bubble,
        "lifetime_s": lifetime_s if math.isfinite(lifetime_s) else None,
        "drive_cost_usd": projection.drive_cost_usd,
        "keep": _plain_outcome(projection.keep),
        "offload": _plain_outcome(projection.offload),
    }


def _plain_outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "activation_bytes": outcome.activation_bytes,
        "memory_bytes": outcome.memory_bytes,
        "fits": outcome.fits,
        "step_s": outcome.step_s,
        "exposed_s": outcome.exposed_s,
        "tokens_per_s": outcome.tokens_per_s,
        "nominal_flops_share": outcome.model_flops_share,
        "written_bytes_per_gpu_and_step": outcome.written_bytes,
        "written_bytes_per_gpu_and_day": outcome.written_bytes_per_day,
        "host_bytes": outcome.host_bytes,
    }
