"""Change each constant of the planner, and show what becomes of the plans.

    python benchmarks/constants.py                                  # all models and constants: half an hour
    python benchmarks/constants.py --model gpt2 --constant MAX_OPS  # some of them

Each model is traced once as Inductor would compile it, and planned in several settings: two limits of the slowdown on a
fast and on a slow disk, a memory budget, and a GPU with a host tier. Then everything is planned again with one
constant halved, and with it doubled. A constant that is a list is shortened instead.

All columns compare with the plans of the values in the code, over all models and settings. *peak* and *time* are the
predicted ones, and *slow disk* is the time of the same plan if the disk has half its rate: the worst case, and the mean
over the cases that change. *plans* counts the cases whose plan differs, and *planning* is the ratio of processor time.
A constant that changes no plan in any case should not exist.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from traced_models import MODELS, SETTINGS, SIZES, Setting, TracedModel

from ssdtrain_fx.cli.common import progress_columns
from ssdtrain_fx.errors import BudgetError
from ssdtrain_fx.passes.graph.joint_graph import JointPass
from ssdtrain_fx.passes.pipeline import PlannedStep, passes_of_plan
from ssdtrain_fx.passes.planning.plan import Offload
from ssdtrain_fx.passes.planning.simulate import simulate
from ssdtrain_fx.passes.planning.transfer_problem import Placement
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.whole_file import write_whole

EQUAL = 1e-9


class Constant(NamedTuple):
    """A constant, and the values to try in its place."""

    module: str
    name: str
    others: Sequence[Any]

    @property
    def value(self) -> Any:
        return getattr(importlib.import_module(f"ssdtrain_fx.{self.module}"), self.name)


def _halved_and_doubled(module: str, name: str) -> Constant:
    value = Constant(module, name, ()).value
    return Constant(module, name, (type(value)(value / 2), value * 2))


def _share(module: str, name: str) -> Constant:
    """A share: halved, and half of what is missing to 1 added."""
    value = Constant(module, name, ()).value
    return Constant(module, name, (value / 2, (1 + value) / 2))


def _shortened(module: str, name: str) -> Constant:
    """A list of what is tried: without each of its members."""
    value = Constant(module, name, ()).value
    return Constant(module, name, tuple(itertools.combinations(value, len(value) - 1))[::-1])


PLANNING, REWRITES, DECISIONS = "passes.planning", "passes.rewrites", "passes.decisions"
CONSTANTS = (
    _shortened(f"{PLANNING}.place_transfers", "SSD_SPEEDUPS"),
    _halved_and_doubled(f"{PLANNING}.place_transfers", "MAX_REFUSALS"),
    _halved_and_doubled(f"{PLANNING}.place_transfers", "MAX_TRIED_POSITIONS"),
    _halved_and_doubled(f"{PLANNING}.place_transfers", "SMALL_PROBLEM"),
    _halved_and_doubled(f"{PLANNING}.relieve_peak", "MAX_WORK"),
    _halved_and_doubled(f"{PLANNING}.relieve_peak", "SHARPNESS"),
    _shortened(f"{PLANNING}.reserve_time", "RESERVES"),
    _share(f"{PLANNING}.reserve_time", "ROOM_SHARE"),
    _share(f"{PLANNING}.gather_ops", "ROOM_SHARE"),
    _shortened(f"{PLANNING}.gather_ops", "MOST_IN_ROW"),
    _halved_and_doubled(f"{PLANNING}.use_room", "WORTH_ASKING"),
    _shortened(f"{PLANNING}.use_host_tier", "SHARES"),
    _halved_and_doubled(f"{PLANNING}.step_budget", "FRAGMENTATION"),
    _halved_and_doubled(f"{PLANNING}.step_budget", "MAX_STAGING_SHARE"),
    _shortened(f"{DECISIONS}.propose_recomputations", "TIME_SHARES"),
    _halved_and_doubled("passes.analysis.find_recomputations", "MAX_OPS"),
    _halved_and_doubled("passes.analysis.find_recomputations", "SMALL_PARAMETER"),
    _halved_and_doubled(f"{REWRITES}.copy_out_views", "MIN_PARTS"),
    _halved_and_doubled(f"{REWRITES}.copy_out_views", "MIN_SAVED_BYTES"),
    _halved_and_doubled(f"{REWRITES}.store_sums", "WAITS_FOR_KERNELS"),
)


class Outcome(NamedTuple):
    """What a plan is."""

    peak_bytes: int
    step_s: float
    slow_disk_s: float
    placements: Mapping[int, Placement]
    planning_s: float


def outcome(traced: TracedModel, setting: Setting) -> Outcome | None:
    """The plan, or None if none meets the budget."""
    planned: list[PlannedStep] = []

    def keep(step: PlannedStep, options: Any) -> tuple[JointPass, ...]:
        planned.append(step)
        return passes_of_plan(step, options)

    began_s = time.thread_time()
    with mock.patch("ssdtrain_fx.passes.pipeline.passes_of_plan", keep):
        try:
            step = traced.plan(setting)
        except BudgetError:
            return None
    planning_s = time.thread_time() - began_s
    problem, step_s = step.problem, step.problem.step_s
    hardware = problem.hardware
    slower = dataclasses.replace(
        hardware,
        write=dataclasses.replace(hardware.write, bytes_per_s=hardware.write.bytes_per_s / 2),
        read=dataclasses.replace(hardware.read, bytes_per_s=hardware.read.bytes_per_s / 2),
    )
    placements: dict[int, Placement] = {}
    for one in planned:  # none, if nothing is offloaded
        decisions = {saved.name: saved.decision for saved in step.plan.storages}
        for candidate in one.analysis.candidates:
            decision = None if candidate.representative is None else decisions.get(candidate.representative.name)
            if isinstance(decision, Offload):
                placements[candidate.storage.idx] = decision.placement
    late = simulate(dataclasses.replace(problem, hardware=slower), placements)
    return Outcome(
        step.plan.peak_after_bytes, step_s + step.plan.exposed_s, step_s + late.exposed_s, placements, planning_s
    )


@contextlib.contextmanager
def changed(constant: Constant, value: Any) -> Generator[None]:
    """Within the block, ``constant`` has ``value``, also in modules that have imported it and as a default argument."""
    before, argument = constant.value, constant.name.lower()
    with contextlib.ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith("ssdtrain_fx.")]:
            for one in vars(module).values():
                defaults: dict[str, Any] | None = getattr(one, "__kwdefaults__", None)
                if defaults and defaults.get(argument) is before:
                    stack.enter_context(mock.patch.dict(defaults, {argument: value}))
            if vars(module).get(constant.name) is before:
                stack.enter_context(mock.patch.object(module, constant.name, value))
        yield


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A constant with another value, over all cases."""

    constant: str
    value: str
    other: str
    cases: int
    changed_plans: int
    lost_plans: int
    """Cases in which no plan meets the budget any more."""
    peak: tuple[float, float]
    """Ratio to the value in the code: the worst, and the mean over the cases whose plan changes."""
    time: tuple[float, float]
    slow_disk: tuple[float, float]
    planning: float

    @property
    def cells(self) -> list[str]:
        pairs = [f"{worst:.3f}, {mean:.3f}" for worst, mean in (self.peak, self.time, self.slow_disk)]
        return [
            self.constant,
            self.value,
            self.other,
            f"{self.changed_plans} of {self.cases}" + (f", {self.lost_plans} impossible" if self.lost_plans else ""),
            *(pairs if self.changed_plans else ["-"] * 3),
            f"{self.planning:.2f}",
        ]


def compare(constant: Constant, other: Any, before: Sequence[Outcome | None], after: Sequence[Outcome | None]) -> Row:
    both = [(old, new) for old, new in zip(before, after, strict=True) if old is not None and new is not None]
    differing = [(old, new) for old, new in both if _differ(old, new)]

    def ratios(part: Callable[[Outcome], float]) -> tuple[float, float]:
        found = [part(new) / part(old) for old, new in differing] or [1.0]
        return max(found), sum(found) / len(found)

    return Row(
        constant=f"{constant.module.rpartition('.')[2]}.{constant.name}",
        value=str(constant.value),
        other=str(other),
        cases=len(before),
        changed_plans=len(differing),
        lost_plans=len(before) - len(both),
        peak=ratios(lambda one: one.peak_bytes),
        time=ratios(lambda one: one.step_s),
        slow_disk=ratios(lambda one: one.slow_disk_s),
        planning=sum(new.planning_s for _, new in both) / sum(old.planning_s for old, _ in both),
    )


def _differ(old: Outcome, new: Outcome) -> bool:
    return (
        old.placements != new.placements
        or old.peak_bytes != new.peak_bytes
        or abs(old.step_s - new.step_s) > EQUAL * old.step_s
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(constant.name for constant in CONSTANTS))
    parser.add_argument("--model", nargs="+", choices=list(zoo.MODELS), default=MODELS)
    parser.add_argument("--constant", nargs="+", choices=names, default=names)
    parser.add_argument("--layers", type=int, default=SIZES["layers"])
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "constants.json")
    chosen = parser.parse_args(arguments)
    constants = [constant for constant in CONSTANTS if constant.name in chosen.constant]
    console = Console(width=max(Console().width, 150))
    trials: list[tuple[Constant, Any, list[Outcome | None]]] = [
        (one, other, []) for one in constants for other in one.others
    ]
    before: list[Outcome | None] = []
    rows: list[Row] = []
    with Progress(*progress_columns(), console=console) as progress:
        bar = progress.add_task("tracing", total=len(chosen.model) * len(SETTINGS) * (1 + len(trials)))
        for number, model in enumerate(chosen.model, 1):
            traced = TracedModel(model, {**SIZES, "layers": chosen.layers})
            for setting in SETTINGS:
                before.append(outcome(traced, setting))
                progress.update(bar, description=f"{model}, {setting.name}", advance=1)
                for constant, other, after in trials:
                    with changed(constant, other):
                        after.append(outcome(traced, setting))
                    progress.update(bar, advance=1)
            rows = [compare(constant, other, before, after) for constant, other, after in trials]
            write_results(chosen.json, chosen.model[:number], chosen.layers, rows)
    table = Table(title=f"{', '.join(chosen.model)}: {chosen.layers} layers, {len(SETTINGS)} settings")
    for name in ("constant", "value", "instead", "plans", "peak", "time", "slow disk", "planning"):
        table.add_column(name, justify="left" if name in ("constant", "value", "instead") else "right")
    for row in rows:
        table.add_row(*row.cells)
    console.print(table)
    return 0


def write_results(path: Path, models: Sequence[str], layers: int, rows: Sequence[Row]) -> None:
    """Called after every model, so that a run that is interrupted leaves the results for the models before."""
    path.parent.mkdir(exist_ok=True)
    written = {
        "date": datetime.date.today().isoformat(),
        "models": list(models),
        "layers": layers,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    write_whole(path, json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
