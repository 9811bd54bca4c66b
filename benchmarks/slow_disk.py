"""Test whether predicted slowdowns come true, and what a step costs on a disk that is slower than planned.

    python benchmarks/slow_disk.py --model gpt2 --layers 12 --hidden 384 --batch 8 --sequence 512 --slower 10

A slow disk is simulated by delaying every read and write of the spill file. The variants run one step each in turns, so
that other load on the machine cancels out:

    inductor            keeps everything
    as planned          the real disk, with a plan for it
    slow as planned     the slow disk, with a plan for it
    slower              the slow disk, with the plan for the real one; storages that would delay the step stay in memory
    slower, all moved   the same, but everything that was planned is offloaded, whatever it costs

In the two "as planned" variants, everything is offloaded as planned, so that the prediction can be tested.

There are two columns "predicted". The first is the predicted step time relative to plain Inductor, to compare with
"ratio". The second is the predicted stall time, to compare with the stalls that the engine counted in the median step.
Stalls depend on the time that a step leaves the disk, and a roofline model ignores cold caches and page faults.
Therefore the plans are made for a machine whose step takes as long as plain Inductor took in five steps before the
first round. Later load on the machine changes that again. So "off by" compares the stalls of each step with the stalls
that the simulation predicts for the compute time of the same step: the median difference as a share of the step.

A ratio is the median of the ratios within the rounds. The first rounds do not count: they compile, and the engine
learns the rates of the disk. The exit code is 1 if losses or gradients are not bit-identical to those of plain
Inductor.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ssdtrain_fx import OffloadConfig, Statistics, backend, explain
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.machine.probe import load_hardware
from ssdtrain_fx.passes.planning.plan import Offload
from ssdtrain_fx.passes.planning.simulate import simulate
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Placement
from ssdtrain_fx.report.graph_report import GraphReport
from ssdtrain_fx.runtime import ops
from ssdtrain_fx.runtime.book.traffic import Direction
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.engines import Engines
from ssdtrain_fx.runtime.lanes.aio.kernel import WRITE, KernelAio
from ssdtrain_fx.runtime.lanes.open_lanes import Parts
from ssdtrain_fx.runtime.storage.directory import check_directories
from ssdtrain_fx.runtime.storage.spill_file import SpillFile
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.units import format_bytes
from ssdtrain_fx.vector_math import settle_vector_math

WARM_UP_ROUNDS = 3
CALIBRATION_STEPS = 5


class SlowDisk:
    """Simulates the rates of ``hardware`` divided by ``slower``. Transfers take turns in both directions."""

    def __init__(self, hardware: Hardware, slower: float) -> None:
        self._s_per_byte = {
            Direction.WRITE: slower / hardware.write.bytes_per_s,
            Direction.READ: slower / hardware.read.bytes_per_s,
        }
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def end_s(self, direction: Direction, byte_count: int) -> float:
        """Time at which a transfer that starts now ends, by ``time.perf_counter``."""
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.perf_counter()) + byte_count * self._s_per_byte[direction]
            return self._free_at_s


class SlowFile(SpillFile):
    """A spill file on a slow disk, for I/O threads."""

    def __init__(self, directory: str, disk: SlowDisk) -> None:
        super().__init__(directory)
        self._disk = disk

    def write(self, data: memoryview, offset_bytes: int) -> None:
        end_s = self._disk.end_s(Direction.WRITE, len(data))
        super().write(data, offset_bytes)
        time.sleep(max(0.0, end_s - time.perf_counter()))

    def read(self, data: memoryview, offset_bytes: int) -> None:
        end_s = self._disk.end_s(Direction.READ, len(data))
        super().read(data, offset_bytes)
        time.sleep(max(0.0, end_s - time.perf_counter()))


class SlowAio(KernelAio):
    """Native AIO on a slow disk: delays answers."""

    def __init__(self, disk: SlowDisk) -> None:
        super().__init__()
        self._disk = disk
        self._end_s: dict[int, float] = {}
        """End times of the requests in flight, by cookie."""
        self._held: dict[int, int] = {}
        """Results of the kernel that are not returned yet, by cookie."""
        self._told: list[tuple[int, int]] = []

    def submit(self, opcode: int, descriptor: int, address: int, length: int, offset: int, cookie: int) -> bool:
        self._end_s[cookie] = self._disk.end_s(Direction.WRITE if opcode == WRITE else Direction.READ, length)
        return super().submit(opcode, descriptor, address, length, offset, cookie)

    def reap(self, timeout_s: float) -> None:
        give_up_s = time.perf_counter() + timeout_s
        while True:
            super().reap(0.0)
            self._held.update(super().answers())
            now_s = time.perf_counter()
            for cookie in [cookie for cookie in self._held if self._end_s[cookie] <= now_s]:
                self._told.append((cookie, self._held.pop(cookie)))
                del self._end_s[cookie]
            if self._told or now_s >= give_up_s:
                return
            time.sleep(
                max(0.0, min([give_up_s, now_s + 0.001, *(self._end_s[cookie] for cookie in self._held)]) - now_s)
            )

    def answers(self) -> list[tuple[int, int]]:
        told, self._told = self._told, []
        return told


class StepClock:
    """A clock that runs only while its variant computes. The stall time allowed to an engine grows with time, and the
    time of other variants must not count."""

    def __init__(self) -> None:
        self._passed_s = 0.0
        self._since_s: float | None = None

    def __call__(self) -> float:
        return self._passed_s + (0.0 if self._since_s is None else time.perf_counter() - self._since_s)

    def run(self) -> None:
        self._since_s = time.perf_counter()

    def stop(self) -> None:
        self._passed_s, self._since_s = self(), None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    name: str
    config: OffloadConfig | None = None
    """None means plain Inductor."""
    planned: bool = False
    """Whether the plan was made for the disk that the variant runs on."""
    slow: bool = False
    admission: bool = True
    clock: StepClock = dataclasses.field(default_factory=StepClock)


@dataclasses.dataclass(slots=True)
class Runner:
    """One variant with its own copy of the model."""

    variant: Variant
    model: nn.Module
    compiled: Callable[..., Tensor]
    graphs: Sequence[GraphReport]
    """Reports with the plans; empty if the plans were made for another disk."""
    step_s: list[float] = dataclasses.field(default_factory=list[float])
    stall_s: list[float] = dataclasses.field(default_factory=list[float])
    """Stall seconds of every step."""
    done: Statistics = dataclasses.field(default_factory=Statistics)
    """Statistics of the last step."""

    @property
    def predicted(self) -> str:
        """Predicted step time relative to plain Inductor."""
        if not self.graphs:
            return "-"
        plans = [graph.plan for graph in self.graphs]
        return f"{1 + sum(plan.exposed_s for plan in plans) / sum(plan.step_s for plan in plans):.3f}"

    @property
    def predicted_stall(self) -> str:
        return f"{1e3 * sum(graph.plan.stall_s for graph in self.graphs):,.0f} ms" if self.graphs else "-"

    @property
    def off_by(self) -> str:
        """Median difference between measured stalls and the stalls simulated for the compute time of the same step."""
        if not self.graphs:
            return "-"
        planned_s = sum(graph.plan.step_s + graph.plan.exposed_s - graph.plan.stall_s for graph in self.graphs)
        shares = [
            abs(stall_s - sum(stall_at(graph, (step_s - stall_s) / planned_s) for graph in self.graphs)) / step_s
            for step_s, stall_s in zip(self.step_s[WARM_UP_ROUNDS:], self.stall_s[WARM_UP_ROUNDS:], strict=True)
        ]
        return f"{statistics.median(shares):.1%}"

    def step(self, batch: Sequence[Tensor], seed: int) -> list[Tensor]:
        """Run one step and return loss and gradients."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        before = ops.statistics()
        self.variant.clock.run()
        start_s = time.perf_counter()
        loss = self.compiled(*batch)
        loss.backward()
        self.step_s.append(time.perf_counter() - start_s)
        self.variant.clock.stop()
        self.done = ops.statistics().since(before)
        self.stall_s.append(self.done.stall_s)
        return [loss.detach(), *(p.grad for p in self.model.parameters() if p.grad is not None)]


def stall_at(graph: GraphReport, times: float) -> float:
    """Return the stalls of the plan of ``graph`` if computing takes ``times`` as long as planned."""
    problem = dataclasses.replace(graph.problem, node_s=tuple(times * node_s for node_s in graph.problem.node_s))
    waiting = collections.defaultdict[tuple[int, int, int], list[Movable]](list)
    for movable in problem.movables:
        waiting[movable.offload, movable.wait, movable.size_bytes].append(movable)
    placements: dict[int, Placement] = {}
    for storage in graph.plan.offloaded:
        decision = storage.decision
        assert isinstance(decision, Offload)
        # Movables with equal positions and sizes are interchangeable.
        movable = waiting[decision.offload, decision.wait, storage.size_bytes].pop(0)
        placements[movable.idx] = decision.placement
    return simulate(problem, placements).stall_s


def on_slow_disk(hardware: Hardware, slower: float) -> Hardware:
    """Return ``hardware`` with a disk that is ``slower`` times slower."""

    def slow(channel: Channel) -> Channel:
        return dataclasses.replace(channel, bytes_per_s=channel.bytes_per_s / slower)

    return dataclasses.replace(hardware, write=slow(hardware.write), read=slow(hardware.read), share_when_both=0.5)


def variants_of(config: OffloadConfig, hardware: Hardware, slower: float) -> list[Variant]:
    """Return the variants. Engines are identified by their configuration, so max_slowdown differs slightly."""
    names = ("as planned", "slow as planned", "slower", "slower, all moved")
    configs = [
        dataclasses.replace(config, max_slowdown=config.max_slowdown + 1e-9 * number, hardware=planned_for)
        for number, planned_for in enumerate((hardware, on_slow_disk(hardware, slower), hardware, hardware))
    ]
    return [
        Variant(name=names[0], config=configs[0], planned=True, admission=False),
        Variant(name=names[1], config=configs[1], planned=True, slow=True, admission=False),
        Variant(name=names[2], config=configs[2], slow=True),
        Variant(name=names[3], config=configs[3], slow=True, admission=False),
    ]


def calibrate(runner: Runner, hardware: Hardware, config: OffloadConfig, batches: Sequence[Sequence[Tensor]]) -> float:
    """Return the time of a step of plain Inductor divided by its roofline time."""
    config = dataclasses.replace(config, hardware=hardware)
    roofline_s = sum(graph.plan.step_s for graph in explain(runner.model, *batches[0], config=config).graphs)
    for seed, batch in enumerate(batches):
        runner.step(batch, seed)
    counted = runner.step_s[1:]  # the first one compiles
    runner.step_s, runner.stall_s = [], []
    return statistics.median(counted) / roofline_s


def make_plans(variant: Variant, model: nn.Module, batch: Sequence[Tensor]) -> Sequence[GraphReport]:
    """Return reports with the plans, if they are made for the disk of ``variant``."""
    if variant.config is None or not variant.planned:
        return []
    return explain(model, *batch, config=variant.config).graphs


def slow_engines(variants: Sequence[Variant], hardware: Hardware, slower: float) -> Engines:
    """Return engines that choose their disk by their configuration."""
    by_engine_config = {variant.config.engine_config(): variant for variant in variants if variant.config is not None}

    def open_engine(config: EngineConfig, handles: Iterator[int]) -> Engine:
        variant = by_engine_config[config]
        if not variant.admission:
            config = dataclasses.replace(config, max_stall_share=None)
        if not variant.slow:
            return Engine(config, Parts(clock=variant.clock), handles=handles)
        disk = SlowDisk(hardware, slower)
        open_aio = None if config.io == "posix" else lambda: SlowAio(disk)
        return Engine(
            config,
            Parts(open_file=lambda directories: SlowFile(directories[0], disk), open_aio=open_aio, clock=variant.clock),
            handles=handles,
        )

    return Engines(open_engine)


def render_table(runners: Sequence[Runner], title: str) -> Table:
    base = runners[0].step_s[WARM_UP_ROUNDS:]
    table = Table(title=title)
    for column in ("", "step (median)", "ratio", "predicted", "moved", "stayed", "stalls", "predicted", "off by"):
        table.add_column(column, justify="left" if not column else "right", overflow="fold")
    for runner in runners:
        step_s = runner.step_s[WARM_UP_ROUNDS:]
        table.add_row(
            runner.variant.name,
            f"{1e3 * statistics.median(step_s):,.0f} ms",
            f"{statistics.median(one / other for one, other in zip(step_s, base, strict=True)):.3f}",
            runner.predicted,
            format_bytes(runner.done.bytes_written),
            format_bytes(runner.done.kept_for_time_bytes),
            f"{1e3 * statistics.median(runner.stall_s[WARM_UP_ROUNDS:]):,.0f} ms",
            runner.predicted_stall,
            runner.off_by,
        )
    return table


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=list(zoo.MODELS), default="gpt2")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=8, help=f"the first {WARM_UP_ROUNDS} do not count")
    parser.add_argument("--max-slowdown", type=float, default=0.1)
    parser.add_argument("--slower", type=float, default=10.0, help="how many times slower than planned the disk is")
    parser.add_argument("--ssd-dir", help="directory on the SSD")
    chosen = parser.parse_args(arguments)
    if chosen.rounds <= WARM_UP_ROUNDS:
        parser.error(f"--rounds must be more than {WARM_UP_ROUNDS}: the first rounds do not count.")
    if chosen.slower < 1:
        parser.error("--slower must be at least 1: delays cannot make the disk faster.")
    return chosen


def main(arguments: list[str]) -> int:
    chosen = parse_arguments(arguments)
    settle_vector_math()
    (directory, *_) = check_directories(chosen.ssd_dir)
    hardware = load_hardware("cpu", directory)
    sizes: dict[str, Any] = {name: getattr(chosen, name) for name in ("layers", "hidden", "batch", "sequence", "vocab")}
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model, make_batch = zoo.build(chosen.model, **sizes)
    config = OffloadConfig(max_slowdown=chosen.max_slowdown, ssd_dir=directory)
    generator = torch.Generator().manual_seed(1)
    plain = Runner(Variant(name="inductor"), model, torch.compile(model, backend="inductor"), [])
    times = calibrate(plain, hardware, config, [make_batch(generator) for _ in range(1 + CALIBRATION_STEPS)])
    hardware = hardware.computing_slower(times)
    variants = variants_of(config, hardware, chosen.slower)
    ops._engines = slow_engines(variants, hardware, chosen.slower)
    runners = [plain]
    for variant in variants:
        own = copy.deepcopy(model)
        plans = make_plans(variant, own, make_batch(generator))
        compiler: Any = backend(variant.config)
        runners.append(Runner(variant, own, torch.compile(own, backend=compiler), plans))
    console = Console()
    console.print(f"A step takes {times:.2f} times its roofline time.", highlight=False)
    same = True
    for round_number in range(chosen.rounds):
        batch = make_batch(generator)
        expected: list[Tensor] = []
        for runner in runners:
            found = runner.step(batch, round_number)
            expected = expected or found
            same = same and all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            line = f"round {round_number}  {runner.variant.name:18} {1e3 * runner.step_s[-1]:9,.0f} ms"
            console.print(line, style="dim", highlight=False)
    title = f"{chosen.model}, a disk {chosen.slower:g} times slower than planned"
    console.print(render_table(runners, title))
    console.print(f"losses, gradients: {'equal' if same else 'DIFFERENT'}")
    ops.close()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
