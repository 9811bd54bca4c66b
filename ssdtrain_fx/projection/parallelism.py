"""How GPUs share the work of a step."""

from __future__ import annotations

import dataclasses

from ssdtrain_fx.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """How GPUs share the work: ``data * pipeline * tensor * context`` of them.

    Raises:
        ConfigError: a number is below 1, or the experts cannot be spread.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    """GPUs that share the tokens of each sample. Each gathers the keys and values of all tokens."""
    expert: int = 1
    """GPUs over which the experts of a layer are spread, of the ``data * context`` ones that hold the same layers."""
    sequence_parallel: bool = False
    """The tensor-parallel GPUs also share the tokens between products: norms, dropouts, residual sums."""
    fsdp: bool = True
    """The data-parallel GPUs share parameters, gradients and states; in a pipeline, only states. Otherwise each has all
    of them."""
    micro_batches: int = 1
    """Per optimizer step and data-parallel GPU."""
    chunks: int = 1
    """Parts of the model on one stage of the pipeline ("virtual stages")."""

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "context", "expert", "micro_batches", "chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Parallelism has {name}={getattr(self, name)}; expected at least 1.")
        if self.replicas % self.expert:
            raise ConfigError(
                f"Experts cannot be spread over {self.expert} GPUs: {self.replicas} (data * context) hold the same "
                "layers, and must be a multiple of it."
            )

    @property
    def gpus(self) -> int:
        return self.replicas * self.tensor * self.pipeline

    @property
    def replicas(self) -> int:
        """GPUs that hold the same layers."""
        return self.data * self.context

    @property
    def in_flight(self) -> float:
        """Micro-batches that the first stage holds between their forward and backward."""
        most = self.pipeline + (self.pipeline - 1) / self.chunks if self.chunks > 1 else self.pipeline
        return min(most, self.micro_batches)

    @property
    def slots(self) -> float:
        """Times of a micro-batch on one stage, of which a step consists."""
        return self.micro_batches + (self.pipeline - 1) / self.chunks

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage waits for others."""
        return 1.0 - self.micro_batches / self.slots
