"""What training would take on machines that one does not have: memory, time, and wear of the drives.

::

    shapes --trace--> one micro-batch on one GPU --plan--> peak and exposed time --schedule--> step --> tokens/s, TB/day

The micro-batch is traced and planned as the backend would, with a hardware profile made from data sheets. The rest is
arithmetic, with the usual formulas:

* Pipelines run 1F1B: of m micro-batches and p stages with v chunks of layers each, the bubble is
  (p - 1) / (v m + p - 1), and the first stage holds min(p, m) micro-batches, or p + (p - 1) / v if v > 1
  (Narayanan et al., 2021).
* Tensor parallelism adds four all-reduces per layer, and two more if it is computed again; nothing hides them (Shoeybi
  et al., 2019). One of n bytes moves 2 n (t - 1) / t bytes. With sequence parallelism, each is a reduce-scatter and a
  gather, which move as much (Korthikanti et al., 2022).
* Context parallelism gathers the keys and values of each layer in forward and in backward, and reduces their gradients
  (The Llama 3 Herd of Models, section 3.3.2). Nothing hides that here.
* Spread experts send each token to the GPUs of its experts and back, in forward and in backward: four all-to-alls per
  layer, and two more if it is computed again (Lepikhin et al., 2020). Nothing hides them here, and all experts get
  equally many tokens.
* FSDP gathers the parameters twice per micro-batch and reduces the gradients once (Zhao et al., 2023). In a pipeline,
  only states are shared (ZeRO-1), and both happens once per step. What does not fit beside computation is exposed.
* Adam with float32 states: 12 bytes per parameter, besides 2 each for the parameter and its gradient.
* A drive lasts for its rated bytes divided by the rate of writes.

Not in the model: stragglers, data loading, checkpoints, evaluation, and memory that the allocator cannot use.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.passes.planning.chains import choose_most
from ssdtrain_fx.passes.planning.place_transfers import Choice, floor_bytes
from ssdtrain_fx.passes.planning.simulate import simulate
from ssdtrain_fx.passes.planning.transfer_problem import HostTier, TransferProblem
from ssdtrain_fx.passes.planning.use_room import choose_within_time
from ssdtrain_fx.projection.catalog import Drive, Gpu
from ssdtrain_fx.projection.machine import Efficiency, machine
from ssdtrain_fx.projection.parallelism import Parallelism
from ssdtrain_fx.projection.trace import trace
from ssdtrain_fx.projection.transformer import Shape, flops_per_token

WEIGHT_BYTES = 2
STATE_BYTES = 12
"""Per parameter: a float32 copy and two moments."""
CONTEXT_BYTES = 2 << 30
"""What the driver, the libraries and the collectives take of a GPU. A guess."""
NETWORK_BYTES_PER_S = 50e9
"""Per GPU and direction, between nodes: 400 Gb/s."""
DAY_S, YEAR_S = 86400.0, 365.25 * 86400.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """GPUs of one kind, and the drives of each."""

    gpu: Gpu
    drive: Drive
    drives_per_gpu: float = 1
    host_bytes_per_gpu: int = 0
    """Pinned memory in which tensors may stay instead of going to a drive."""
    network_bytes_per_s: float = NETWORK_BYTES_PER_S
    efficiency: Efficiency = dataclasses.field(default_factory=Efficiency)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One way to hold the saved activations."""

    activation_bytes: int
    """Peak of what a GPU of the first stage holds for its micro-batches."""
    memory_bytes: int
    """With parameters, gradients, optimizer states and the context."""
    fits: bool
    step_s: float
    """One optimizer step."""
    exposed_s: float
    """The part of it in which GPUs wait for drives, or for ops of the host."""
    tokens_per_s: float
    """Of the whole cluster."""
    model_flops_share: float
    """Of the nominal rate, by 6 FLOPs per parameter and token, and those of attention."""
    written_bytes: int
    """To the drives of one GPU, per optimizer step."""
    host_bytes: int
    """The most that is in the host tier."""

    @property
    def written_bytes_per_day(self) -> float:
        return self.written_bytes / self.step_s * DAY_S


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """A model on a cluster, with its saved activations in memory and moved."""

    shape: Shape
    micro_batch: int
    parallelism: Parallelism
    cluster: Cluster
    max_slowdown: float
    state_bytes: int
    """Parameters, gradients and optimizer states of one GPU."""
    communication_s: float
    """Exposed collectives of one optimizer step."""
    update_s: float
    keep: Outcome
    offload: Outcome
    recompute: Outcome | None = None
    """With each layer computed again in backward, and all that is saved in memory. None: not asked for."""

    @property
    def lifetime_s(self) -> float:
        """Until the drives of a GPU have taken the bytes that they are rated for."""
        rated = self.cluster.drive.endurance_bytes * self.cluster.drives_per_gpu
        written = self.offload.written_bytes
        return rated / written * self.offload.step_s if written else float("inf")

    @property
    def drive_cost_usd(self) -> float | None:
        price = self.cluster.drive.price_usd
        return None if price is None else price * self.cluster.drives_per_gpu * self.parallelism.gpus


class Workload:
    """One micro-batch of a model on one GPU of a cluster. Tracing it takes seconds; projections take less."""

    def __init__(
        self,
        shape: Shape,
        *,
        micro_batch: int,
        parallelism: Parallelism,
        cluster: Cluster,
        compare_recomputation: bool = False,
    ) -> None:
        """
        Args:
            compare_recomputation: also trace with a checkpoint around each layer, which takes as long again.

        Raises:
            ConfigError: the sizes do not fit together.
        """
        if shape.layers % parallelism.pipeline:
            raise ConfigError(f"{parallelism.pipeline} stages cannot share {shape.layers} layers equally.")
        stage = shape.layers // parallelism.pipeline
        if stage % parallelism.chunks:
            raise ConfigError(f"A stage with {stage} layers cannot have {parallelism.chunks} equal chunks.")
        self.shape, self.micro_batch, self.parallelism = shape, micro_batch, parallelism
        self._choices: dict[tuple[str, HostTier | None, float, bool], tuple[Choice, int]] = {}

        hardware = machine(cluster.gpu, cluster.drive, efficiency=cluster.efficiency)

        def traced(layers: int, *, with_head: bool, recompute: bool = False) -> TransferProblem:
            return trace(
                dataclasses.replace(shape, layers=layers),
                micro_batch=micro_batch,
                hardware=hardware,
                parallelism=parallelism,
                with_head=with_head,
                recompute=recompute,
            )

        is_whole = parallelism.pipeline == 1
        self._problem = traced(stage, with_head=is_whole)
        self._recomputing = traced(stage, with_head=is_whole, recompute=True) if compare_recomputation else None
        self._head_s = 0.0
        """How much longer the last stage of a pipeline computes than the first one. All stages wait for it."""
        if not is_whole:
            self._head_s = max(0.0, traced(1, with_head=True).step_s - traced(1, with_head=False).step_s)

    def with_parallelism(self, **changes: Any) -> Workload:
        """The same micro-batch in another schedule or on other numbers of data-parallel GPUs; it is not traced again.

        Raises:
            ConfigError: what differs changes what one GPU computes.
        """
        changed = set(changes) - {"data", "micro_batches", "chunks", "fsdp"}
        if any(changes[name] != getattr(self.parallelism, name) for name in changed):
            raise ConfigError(f"With another {', '.join(sorted(changed))}, a micro-batch has to be traced again.")
        parallelism = dataclasses.replace(self.parallelism, **changes)
        other = copy.copy(self)
        other.parallelism = parallelism
        return other

    def project(self, cluster: Cluster, *, max_slowdown: float = 0.02) -> Projection:
        """What this takes on ``cluster``, which has the GPU and the efficiency that it was traced for."""
        parallelism = self.parallelism
        hardware = machine(cluster.gpu, cluster.drive, cluster.drives_per_gpu, efficiency=cluster.efficiency)
        host = HostTier(budget_bytes=cluster.host_bytes_per_gpu) if cluster.host_bytes_per_gpu else None
        problem = dataclasses.replace(self._problem, hardware=hardware, host=host)
        choice, written_bytes = self._choose(problem, max_slowdown)
        state_bytes, communication_s, update_s = self._states(), self._communication_s(cluster), self._update_s(cluster)
        other_s = communication_s + update_s
        recompute = None
        if self._recomputing is not None:
            again_s = update_s + self._communication_s(cluster, recompute=True)
            recompute = self._outcome(self._recomputing, None, 0, cluster, state_bytes, again_s)
        return Projection(
            shape=self.shape,
            micro_batch=self.micro_batch,
            parallelism=parallelism,
            cluster=cluster,
            max_slowdown=max_slowdown,
            state_bytes=state_bytes,
            communication_s=communication_s,
            update_s=update_s,
            keep=self._outcome(problem, None, 0, cluster, state_bytes, other_s),
            offload=self._outcome(problem, choice, written_bytes, cluster, state_bytes, other_s),
            recompute=recompute,
        )

    def _choose(self, problem: TransferProblem, max_slowdown: float) -> tuple[Choice, int]:
        """The best plan, and what it writes per micro-batch. Neither depends on how many GPUs share the data, so sweeps
        over them make one."""
        key = problem.hardware.to_json(), problem.host, max_slowdown, self.parallelism.in_flight > 1
        if key not in self._choices:
            if self.parallelism.in_flight > 1:
                choice = choose_most(problem, max_slowdown=max_slowdown)
                self._choices[key] = choice, _moved_bytes(problem, choice)
            else:
                floor = floor_bytes(problem)
                choice = choose_within_time(problem, max_slowdown=max_slowdown, floor_bytes=floor)
                self._choices[key] = choice, _written_bytes(problem, choice)
        return self._choices[key]

    def _outcome(
        self,
        problem: TransferProblem,
        choice: Choice | None,
        written_bytes: int,
        cluster: Cluster,
        state_bytes: int,
        other_s: float,
    ) -> Outcome:
        parallelism = self.parallelism
        moved_bytes = 0 if choice is None else _moved_bytes(problem, choice)
        exposed_s = 0.0 if choice is None else choice.simulation.exposed_s
        peak_bytes = int(problem.kept_live_bytes.max()) if choice is None else choice.peak_bytes
        # Every other micro-batch in flight leaves what it has saved and not moved.
        waiting_bytes = int(problem.kept_live_bytes[problem.marker]) - moved_bytes
        activation_bytes = peak_bytes + int((parallelism.in_flight - 1) * waiting_bytes)
        memory_bytes = activation_bytes + state_bytes + CONTEXT_BYTES
        slot_s = problem.step_s + max(exposed_s, self._head_s)
        step_s = parallelism.slots * slot_s + other_s
        tokens = self.micro_batch * self.shape.sequence * parallelism.micro_batches * parallelism.data
        flops = tokens * flops_per_token(self.shape)
        peak_flops = parallelism.gpus * cluster.gpu.flops_per_s["bfloat16"]
        return Outcome(
            activation_bytes=activation_bytes,
            memory_bytes=memory_bytes,
            fits=memory_bytes <= cluster.gpu.memory_bytes,
            step_s=step_s,
            exposed_s=parallelism.slots * max(0.0, exposed_s - self._head_s),
            tokens_per_s=tokens / step_s,
            model_flops_share=flops / step_s / peak_flops,
            written_bytes=written_bytes * parallelism.micro_batches,
            host_bytes=0 if choice is None else choice.simulation.host_peak_bytes,
        )

    def _parameters(self, expert: int) -> int:
        """Of one stage and one tensor-parallel GPU, if the experts are spread over ``expert`` GPUs."""
        shape, parallelism = self.shape, self.parallelism
        layers = shape.parameters - shape.embedding_parameters - shape.expert_parameters
        stage = (layers + shape.expert_parameters // expert) // parallelism.pipeline
        return (stage + shape.embedding_parameters) // parallelism.tensor

    @property
    def _gpu_parameters(self) -> int:
        """What one GPU computes with."""
        return self._parameters(self.parallelism.expert)

    @property
    def _owned_parameters(self) -> float:
        """What one GPU updates."""
        return self._parameters(1) / self.parallelism.replicas if self.parallelism.fsdp else self._gpu_parameters

    def _states(self) -> int:
        held, owned, parallelism = self._gpu_parameters, self._owned_parameters, self.parallelism
        states = int(STATE_BYTES * owned)
        if not parallelism.fsdp or parallelism.replicas == 1 or parallelism.pipeline > 1:
            return states + 2 * WEIGHT_BYTES * held  # gradients are summed over micro-batches, and reduced once
        # Two layers are gathered at a time, of which one computes; embedding and head stay. The largest gradient is
        # complete before it is reduced.
        shape = self.shape
        away = shape.expert_parameters // shape.layers * (parallelism.expert - 1) // parallelism.expert
        layer, embedding = shape.layer_parameters - away, shape.embedding_parameters
        whole = (2 * layer + embedding + max(layer, shape.vocab * shape.hidden)) // parallelism.tensor
        return int(states + WEIGHT_BYTES * (2 * owned + whole))

    def _communication_s(self, cluster: Cluster, *, recompute: bool = False) -> float:
        shape, parallelism, efficiency = self.shape, self.parallelism, cluster.efficiency.network
        tokens = self.micro_batch * shape.sequence // parallelism.context
        activation = tokens * shape.hidden * WEIGHT_BYTES
        key_values = 2 * tokens * shape.kv_heads * shape.head_size * WEIGHT_BYTES // parallelism.tensor
        # GPUs of a group, neighbours that it spans, collectives per layer, and bytes that one GPU sends in each
        tensor, context, expert = parallelism.tensor, parallelism.context, parallelism.expert
        again = 1.5 if recompute else 1.0
        groups = (
            (tensor, tensor, 4 * again, 2 * activation / tensor),
            (context, context * tensor, 3 + recompute, key_values),
            (expert, expert * tensor, 4 * again, activation * shape.experts_per_token / expert),
        )
        exposed_s = 0.0
        for size, span, count, sent in groups:
            seconds = sent * (size - 1) / (efficiency * self._bandwidth(cluster, span))
            exposed_s += parallelism.slots * count * shape.layers / parallelism.pipeline * seconds
        if parallelism.replicas > 1:
            bandwidth = self._bandwidth(cluster, parallelism.gpus)
            others = (parallelism.replicas - 1) / parallelism.replicas
            once = self._gpu_parameters * WEIGHT_BYTES * others / (efficiency * bandwidth)
            if parallelism.fsdp and parallelism.pipeline == 1:
                exposed_s += parallelism.micro_batches * max(0.0, 3 * once - self._problem.step_s)
            else:
                exposed_s += max(0.0, 2 * once - self._problem.step_s)
        return exposed_s

    def _bandwidth(self, cluster: Cluster, gpus: int) -> float:
        """Of the slowest link between so many neighbouring GPUs."""
        link = cluster.gpu.link_bytes_per_s
        return link if gpus <= cluster.gpu.gpus_per_node else min(cluster.network_bytes_per_s, link)

    def _update_s(self, cluster: Cluster) -> float:
        """Adam reads and writes its states, and reads gradients and writes parameters."""
        moved = self._owned_parameters * 2 * (STATE_BYTES + WEIGHT_BYTES)
        return moved / (cluster.efficiency.memory * cluster.gpu.memory_bytes_per_s)


def _moved_bytes(problem: TransferProblem, choice: Choice) -> int:
    """Of all storages that leave memory."""
    return sum(movable.size_bytes for movable in problem.movables if movable.idx in choice.placements)


def _written_bytes(problem: TransferProblem, choice: Choice) -> int:
    """To drives, by one micro-batch alone: what is not yet written when its storage is needed again never is."""
    sizes = {movable.idx: movable.size_bytes for movable in problem.movables}
    transfers = simulate(problem, choice.placements, record=True).transfers
    needed_s = {transfer.idx: transfer.begin_s for transfer in transfers if transfer.channel == "staging"}
    written = 0.0
    for write in transfers:
        if write.channel == "write":
            until_s = min(write.end_s, needed_s.get(write.idx, write.end_s))
            share = (until_s - write.begin_s) / (write.end_s - write.begin_s)
            written += sizes[write.idx] * max(0.0, share)
    return int(written)
