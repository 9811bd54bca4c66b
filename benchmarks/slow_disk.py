"""Do predicted slowdowns come true, and what does a step cost on a disk that is slower than the plan thinks?

    python benchmarks/slow_disk.py --model gpt2 --layers 12 --hidden 384 --batch 8 --sequence 512 --slower 10

A slow disk is made by holding up every read and write of the spill file. Variants, one step each in turns, so that what
else the machine does cancels out:

    inductor            keeps everything
    as planned          the disk as it is, and a plan for it
    slow as planned     the slow disk, and a plan for it
    slower              the slow disk with the plan for the fast one; what would hold up the step stays in memory
    slower, all moved   the same, but what was planned is moved, whatever it costs

Where the disk is the one of the plan, everything is moved as planned: a prediction can come true or not.

"predicted" is what the plan promises: of the step, to be compared with the ratio, both relative to plain Inductor; and
of the stalls, to be compared with what the engine counted, in the median step. How long a step gives the disk decides
what has to be waited for, and a roofline knows nothing of cold caches or page faults: so the plans are made for a
machine that takes as long for the step as plain Inductor took in five steps in front of the first round. What the
machine does later changes that again: "off by" is the median difference between the stalls of a step and those that
the simulation predicts for what this very step computed, as a share of the step.

All variants share one heap, so what an engine brings on huge pages does not stay there, and small pages make transfers
slower than the profile says. Therefore the whole heap is put on huge pages, by a tunable of glibc, unless others are
set.

A ratio is the median of the ratios within the rounds, the first ones not counted: they compile, and show the engine
what the disk does. Exit code 1 if losses or gradients are not those of plain Inductor, to the bit.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import os
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
from ssdtrain_fx.runtime.lanes.aio import WRITE, KernelAio
from ssdtrain_fx.runtime.memory.heap import prepare_heap
from ssdtrain_fx.runtime.storage.directory import check_directories
from ssdtrain_fx.runtime.storage.spill_file import SpillFile
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.units import format_bytes

WARM_UP_ROUNDS = 3
CALIBRATION_STEPS = 5


class SlowDisk:
    """The rates of ``hardware`` divided by ``slower``. Transfers take turns, whatever their direction."""

    def __init__(self, hardware: Hardware, slower: float) -> None:
        self._s_per_byte = {
            Direction.WRITE: slower / hardware.write.bytes_per_s,
            Direction.READ: slower / hardware.read.bytes_per_s,
        }
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def end_s(self, direction: Direction, byte_count: int) -> float:
        """When a transfer that begins now is over, by ``time.perf_counter``."""
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.perf_counter()) + byte_count * self._s_per_byte[direction]
            return self._free_at_s


class SlowFile(SpillFile):
    """What threads see of a slow disk."""

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
    """What native AIO sees of it: answers come late."""

    def __init__(self, disk: SlowDisk) -> None:
        super().__init__()
        self._disk = disk
        self._end_s: dict[int, float] = {}
        """Of the requests under way, by cookie."""
        self._held: dict[int, int] = {}
        """Results of the kernel that are not told yet."""
        self._told: list[tuple[int, int]] = []

    def submit(self, opcode: int, descriptor: int, address: int, length: int, offset: int, cookie: int) -> bool:
        self._end_s[cookie] = self._disk.end_s(Direction.WRITE if opcode == WRITE else Direction.READ, length)
        return super().submit(opcode, descriptor, address, length, offset, cookie)

    def reap(self, timeout_s: float) -> None:
        give_up_s = time.perf_counter() + timeout_s
        self._told = []
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
        return self._told


class StepClock:
    """Runs while its variant computes. What an engine may spend on stalls grows with time, and other variants' is not
    its own."""

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
    """None: plain Inductor."""
    planned: bool = False
    """The plan is for the disk that it runs on."""
    slow: bool = False
    admission: bool = True
    clock: StepClock = dataclasses.field(default_factory=StepClock)


@dataclasses.dataclass(slots=True)
class Runner:
    """One variant with a model of its own."""

    variant: Variant
    model: nn.Module
    compiled: Callable[..., Tensor]
    graphs: Sequence[GraphReport]
    """Their plans; empty where they were made for another disk."""
    step_s: list[float] = dataclasses.field(default_factory=list[float])
    stall_s: list[float] = dataclasses.field(default_factory=list[float])
    """Of every step."""
    done: Statistics = dataclasses.field(default_factory=Statistics)
    """Of the last step."""

    @property
    def predicted(self) -> str:
        """Step time relative to plain Inductor."""
        if not self.graphs:
            return "-"
        plans = [graph.plan for graph in self.graphs]
        return f"{1 + sum(plan.exposed_s for plan in plans) / sum(plan.step_s for plan in plans):.3f}"

    @property
    def predicted_stall(self) -> str:
        return f"{1e3 * sum(graph.plan.stall_s for graph in self.graphs):,.0f} ms" if self.graphs else "-"

    @property
    def off_by(self) -> str:
        """What the simulation predicts of the stalls of a step, given what the step computed."""
        if not self.graphs:
            return "-"
        planned_s = sum(graph.plan.step_s + graph.plan.exposed_s - graph.plan.stall_s for graph in self.graphs)
        shares = [
            abs(stall_s - sum(stall_at(graph, (step_s - stall_s) / planned_s) for graph in self.graphs)) / step_s
            for step_s, stall_s in zip(self.step_s[WARM_UP_ROUNDS:], self.stall_s[WARM_UP_ROUNDS:], strict=True)
        ]
        return f"{statistics.median(shares):.1%}"

    def step(self, batch: Sequence[Tensor], seed: int) -> list[Tensor]:
        """Loss and gradients."""
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
    """The stalls of the plan of ``graph`` where computing takes so many ``times`` as long as planned."""
    problem = dataclasses.replace(graph.problem, node_s=tuple(times * node_s for node_s in graph.problem.node_s))
    waiting = collections.defaultdict[tuple[int, int, int], list[Movable]](list)
    for movable in problem.movables:
        waiting[movable.complete, movable.wait, movable.size_bytes].append(movable)
    placements: dict[int, Placement] = {}
    for storage in graph.plan.offloaded:
        decision = storage.decision
        assert isinstance(decision, Offload)
        # Which one of several that stand at the same places and have the same size makes no difference.
        movable = waiting[decision.offload, decision.wait, storage.size_bytes].pop(0)
        placements[movable.idx] = decision.placement
    return simulate(problem, placements).stall_s


def on_slow_disk(hardware: Hardware, slower: float) -> Hardware:
    """``hardware`` with a disk that is as many times slower."""

    def slow(channel: Channel) -> Channel:
        return dataclasses.replace(channel, bytes_per_s=channel.bytes_per_s / slower)

    return dataclasses.replace(hardware, write=slow(hardware.write), read=slow(hardware.read), share_when_both=0.5)


def variants_of(config: OffloadConfig, hardware: Hardware, slower: float) -> list[Variant]:
    """Engines are told apart by their configuration, so the limits differ by a hair."""
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
    """How many times as long as by roofline a step of plain Inductor takes."""
    config = dataclasses.replace(config, hardware=hardware)
    roofline_s = sum(graph.plan.step_s for graph in explain(runner.model, *batches[0], config=config).graphs)
    for seed, batch in enumerate(batches):
        runner.step(batch, seed)
    counted = runner.step_s[1:]  # the first one compiles
    runner.step_s, runner.stall_s = [], []
    return statistics.median(counted) / roofline_s


def make_plans(variant: Variant, model: nn.Module, batch: Sequence[Tensor]) -> Sequence[GraphReport]:
    """Those that come true on the disk of ``variant``."""
    if variant.config is None or not variant.planned:
        return []
    return explain(model, *batch, config=variant.config).graphs


def slow_engines(variants: Sequence[Variant], hardware: Hardware, slower: float) -> Engines:
    """Engines that know by their configuration which disk they have."""
    by_engine_config = {variant.config.engine_config(): variant for variant in variants if variant.config is not None}

    def open_engine(config: EngineConfig, handles: Iterator[int]) -> Engine:
        variant = by_engine_config[config]
        if not variant.admission:
            config = dataclasses.replace(config, max_stall_share=None)
        if not variant.slow:
            return Engine(config, handles=handles, clock=variant.clock)
        disk = SlowDisk(hardware, slower)
        open_aio = None if config.io == "posix" else lambda: SlowAio(disk)
        return Engine(
            config,
            handles=handles,
            open_file=lambda directories: SlowFile(directories[0], disk),
            open_aio=open_aio,
            clock=variant.clock,
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
        parser.error(f"--rounds must be more than {WARM_UP_ROUNDS}: the first ones do not count.")
    if chosen.slower < 1:
        parser.error("--slower must be at least 1: no disk gets faster by being held up.")
    return chosen


def main(arguments: list[str]) -> int:
    chosen = parse_arguments(arguments)
    prepare_heap()  # as the first engine will: without it the steps in front of the first round take longer
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
    console.print(f"A step takes {times:.2f} times as long as by roofline.", highlight=False)
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
    if "GLIBC_TUNABLES" not in os.environ:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
    sys.exit(main(sys.argv[1:]))
