"""The recompute-offload-keep curve: activation peak against throughput, for every way to hold activations.

    keep        everything stays in memory
    recompute   backward recomputes every layer (each is wrapped in ``torch.utils.checkpoint``)
    offload     the plan of this package with ``recompute=False``, with the lowest peak that each limit allows
    mixed       the same, but single storages are recomputed where that is cheaper: the default of the backend

Every strategy is predicted from a graph that AOTAutograd traced, with the same liveness analysis and the same node
costs. Nothing is compiled to code and nothing is computed. Each batch size is traced once without checkpoints and once
with them, and all plans are made for these graphs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

from torch import fx

from ssdtrain_fx.compiler.dry_run import run_dry
from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.default_options import given_or_default
from ssdtrain_fx.errors import BudgetError, ConfigError
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.analysis.node_calls import Times
from ssdtrain_fx.passes.pipeline import offload_saved_tensors
from ssdtrain_fx.passes.planning.plan import Plan

Strategy = Literal["keep", "recompute", "offload", "mixed"]

MakeModel = Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]
"""Returns a model and the inputs of one call for a batch size."""

OnProgress = Callable[[str, int, int], None]
"""Called with a description of the next step, the number of steps done and the total number of steps."""

PLANNED: tuple[Strategy, ...] = ("offload", "mixed")
"""The strategies that use a plan of this package."""

MAX_SLOWDOWNS = (0.02, 0.1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RokOutcome:
    """Peak memory and time of one training step."""

    peak_bytes: int
    """Predicted: storages that the graphs allocate, with gradients. Measured: growth of the process in a step,
    over what it holds when no step runs."""
    step_s: float
    """Predicted: forward and backward. Measured: also the optimizer."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RokPoint:
    """One strategy at one batch size, under one limit."""

    strategy: Strategy
    batch: int
    max_slowdown: float | None = None
    """The time limit of the plan; None if it has none."""
    memory_budget_bytes: int | None = None
    predicted: RokOutcome
    measured: RokOutcome | None = None

    @property
    def outcome(self) -> RokOutcome:
        """The measured outcome if there is one, else the predicted one."""
        return self.measured or self.predicted

    @property
    def samples_per_s(self) -> float:
        return self.batch / self.outcome.step_s if self.outcome.step_s else 0.0

    @property
    def limit(self) -> str:
        """The limit as text: ``+2 %`` of the step time, or a peak in MiB; empty without a limit."""
        if self.memory_budget_bytes is not None:
            return f"{self.memory_budget_bytes / (1 << 20):.0f} MiB"
        return "" if self.max_slowdown is None else f"+{100 * self.max_slowdown:g} %"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RokCurve:
    """What ``rok`` returns."""

    points: tuple[RokPoint, ...]
    """Ordered by batch size, then strategy, then limit, each in the order given."""
    skipped: tuple[str, ...] = ()
    """Points that were skipped, and why."""

    def pareto_front(self) -> tuple[RokPoint, ...]:
        """The points that no other point dominates in peak and samples per second. Lowest peak first."""
        front: list[RokPoint] = []
        for point in sorted(self.points, key=lambda point: (point.outcome.peak_bytes, -point.samples_per_s)):
            if not front or point.samples_per_s > front[-1].samples_per_s:
                front.append(point)
        return tuple(front)

    def to_json(self) -> str:
        """Serialise to stable JSON: equal curves give equal bytes."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> RokCurve:
        """Inverse of ``to_json``."""
        raw: dict[str, Any] = json.loads(text)
        return cls(points=tuple(map(_point_from, raw["points"])), skipped=tuple(raw["skipped"]))


def rok(
    make_model: MakeModel,
    *,
    batch_sizes: Sequence[int],
    max_slowdowns: Sequence[float] = MAX_SLOWDOWNS,
    memory_budgets_bytes: Sequence[int] = (),
    make_recomputing_model: MakeModel | None = None,
    config: OffloadConfig | None = None,
    on_progress: OnProgress | None = None,
) -> RokCurve:
    """Predict peak and time of a training step for every strategy, batch size and limit.

    Args:
        make_model: called once per batch size. The model must compile to one graph, with a loss that needs gradients.
        max_slowdowns: makes one plan each: the lowest peak that costs at most this share of the step time.
        memory_budgets_bytes: makes one plan each: the least added time if a step adds at most this to the memory of the
            process. Budgets that cannot be met are listed in ``RokCurve.skipped``.
        make_recomputing_model: the same model with every layer checkpointed; None skips ``recompute``.
        config: all other options; None: as for ``explain``. Plans are made for ``inner="inductor"`` and
            ``policy="auto"``.

    Raises:
        ConfigError: an option has an invalid value, or the model does not compile to exactly one training graph.
    """
    config = dataclasses.replace(given_or_default(config), inner="inductor", policy="auto")
    configs = [dataclasses.replace(config, max_slowdown=share, memory_budget_bytes=None) for share in max_slowdowns]
    configs += [dataclasses.replace(config, memory_budget_bytes=size_bytes) for size_bytes in memory_budgets_bytes]
    makers: list[tuple[Strategy, MakeModel]] = [("keep", make_model)]
    if make_recomputing_model is not None:
        makers.append(("recompute", make_recomputing_model))
    points: list[RokPoint] = []
    skipped: list[str] = []
    done, total = 0, len(batch_sizes) * len(makers)
    for batch in batch_sizes:
        for strategy, make in makers:
            if on_progress is not None:
                on_progress(f"batch {batch}: {strategy}", done, total)
            done += 1
            planner = _trace(make, batch, config)
            points.append(RokPoint(strategy=strategy, batch=batch, predicted=planner.keep()))
            if strategy != "keep":
                continue
            for planned, limited in itertools.product(PLANNED, configs):
                try:
                    points.append(planner.plan(planned, limited))
                except BudgetError as error:
                    skipped.append(f"{planned}, batch {batch}: {error}")
    if on_progress is not None:
        on_progress("done", done, total)
    if make_recomputing_model is None:
        skipped.append("recompute: make_recomputing_model was not given (--recomputing on the command line)")
    return RokCurve(points=tuple(points), skipped=tuple(skipped))


@dataclasses.dataclass(frozen=True, slots=True)
class _Planner:
    """A traced step for which plans with several configurations can be made."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_forward_outputs: int
    batch: int
    config: OffloadConfig
    hardware: Hardware
    times: Times | None

    def keep(self) -> RokOutcome:
        # No storage is this large, so the plan moves nothing and predicts the unchanged step.
        config = dataclasses.replace(self.config, min_tensor_bytes=1 << 62, memory_budget_bytes=None, recompute=False)
        plan = self._plan(config)
        return RokOutcome(peak_bytes=plan.peak_before_bytes, step_s=plan.step_s)

    def plan(self, strategy: Strategy, config: OffloadConfig) -> RokPoint:
        plan = self._plan(dataclasses.replace(config, recompute=strategy == "mixed"))
        budget = config.find_budget()
        return RokPoint(
            strategy=strategy,
            batch=self.batch,
            max_slowdown=config.max_slowdown if budget is None else None,
            memory_budget_bytes=None if budget is None else budget.size_bytes,
            predicted=RokOutcome(peak_bytes=plan.peak_after_bytes, step_s=plan.step_s + plan.exposed_s),
        )

    def _plan(self, config: OffloadConfig) -> Plan:
        return offload_saved_tensors(
            self.forward,
            self.backward,
            num_forward_outputs=self.num_forward_outputs,
            config=config,
            hardware=self.hardware,
            budget=config.budget_of_plan(config.find_budget(), self.hardware),
            times=self.times,
        ).plan


def _trace(make_model: MakeModel, batch: int, config: OffloadConfig) -> _Planner:
    # Imported here because importing Inductor takes a second or more.
    from ssdtrain_fx.compiler.inductor import PartitionedStep, capture_with_inductor

    found: list[PartitionedStep] = []

    def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return capture_with_inductor(gm, example_inputs, observe=found.append)

    made = cast(object, make_model(batch))
    parts = cast("Sequence[Any]", made) if isinstance(made, (tuple, list)) else (made,)
    if len(parts) != 2 or not isinstance(parts[1], (tuple, list)):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ConfigError(
            f"make_model returned {kinds} at batch size {batch}; expected a model and a tuple of its inputs."
        )
    run_dry(parts[0], capture, *cast("Sequence[Any]", parts[1]))
    if len(found) != 1:
        raise ConfigError(
            f"The model compiles to {len(found)} training graphs at batch size {batch}; a curve needs exactly one. "
            "The model must have no graph breaks (torch.compile(model, fullgraph=True) names them) and return a loss "
            "that requires gradients."
        )
    (step,) = found
    return _Planner(
        forward=step.forward,
        backward=step.backward,
        num_forward_outputs=step.num_forward_outputs,
        batch=batch,
        config=config,
        hardware=config.load_hardware(step.device),
        times=config.load_call_times(step.device),
    )


def of_strategy(points: Iterable[RokPoint], strategy: Strategy) -> list[RokPoint]:
    return [point for point in points if point.strategy == strategy]


def _point_from(raw: dict[str, Any]) -> RokPoint:
    for name in ("predicted", "measured"):
        raw[name] = None if raw[name] is None else RokOutcome(**raw[name])
    return RokPoint(**raw)
