"""Train under a memory limit that the kernel enforces: how large a batch, how long a sequence, and how fast?

    python benchmarks/memory_limit.py --model gpt2 --limit-mib 700 --grow batch --json limits.json
    python benchmarks/memory_limit.py --model gpt2 --limit-mib 700 --grow sequence --batch 1 --json limits.json

Every contender trains with AdamW in a cgroup of its own, with a heap of its choice: the C library's, the same with huge
pages and without its adaptive threshold, or jemalloc. The largest size is the largest one that makes all steps without
being killed. At that size, the fastest of the heaps that survive is timed, in turns with plain Inductor at its own
largest size. Both are under the limit. The contenders are

    eager                 nothing is compiled
    eager, checkpoints    torch.utils.checkpoint around every layer
    inductor              plain torch.compile
    inductor, ...         under Inductor: checkpoints around every layer, the same with expensive ops saved, torch's
                          activation_memory_budget, hooks that write to a file (ssdtrain_fx/studies/rivals.py)
    inductor, swap        the operating system moves pages to a swap file in the directory on the SSD
    inductor, zram        the same, to compressed memory: a quarter of the limit is given to it
    ssdtrain              this backend, at several max_slowdown

For all others, swap is off. Code is compiled before, without a limit, because what a compilation needs says nothing
about training. A trial also ends when it takes ten times as long as without a limit: then it does nothing but wait for
swap. On a CPU, ``save_on_cpu``, transformers' ``{"offload": True}`` and the ``OffloadActivations`` of TRL and torchtune
move host memory to host memory, so they cannot lower anything and are left out. Swap files need root.

Results are added to the JSON file as they are found. What it already has is not searched again: ``--rounds 0`` only
searches, and a later call times.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Literal

from result_tables import markdown, rich_table
from rich.console import Console

from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.runtime.storage.directory import check_directories
from ssdtrain_fx.studies.bench import describe_machine, format_interval
from ssdtrain_fx.studies.comparison import CONFIDENCE, time_ratio
from ssdtrain_fx.studies.limited_process import EnforcedLimit, NotEnforced, find_kind, limit
from ssdtrain_fx.studies.measure import Run, Step, Variant, Worker, WorkerError, counted, median_ms
from ssdtrain_fx.studies.zoo import MODELS
from ssdtrain_fx.units import format_bytes

Grow = Literal["batch", "sequence"]
Swap = Literal["off", "file", "zram"]
STEPS = 10
BUDGETS = (0.0, 0.5)
MAX_SLOWDOWNS = (0.05, 0.3)
PATIENCE = 10
"""A trial ends when it takes so many times as long as without a limit."""
PRECISION = 16
"""The largest size is found to this share of it, or to one unit."""
UNITS: Mapping[Grow, int] = {"batch": 1, "sequence": 32}
ZRAM_SHARE = 0.25
SWAP_BYTES = 16 << 30
JEMALLOC = ctypes.util.find_library("jemalloc")
HEAPS: dict[str, tuple[str, ...]] = {
    "glibc": (),
    "glibc, tuned": ("GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1048576",),
    **({"jemalloc": (f"LD_PRELOAD={JEMALLOC}",)} if JEMALLOC else {}),
}
"""Environment of each heap. With a fixed threshold, every larger tensor is returned to the system when it is freed."""

console = Console()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A way to train, at any size."""

    name: str
    variant: Variant
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    swap: Swap = "off"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The largest size of one contender. A size is a batch, or a number of tokens."""

    size: int
    """0: not even the smallest one trains."""
    guess: int
    """Where a line through two peaks without a limit reaches the limit."""
    heap: str
    """The fastest of those that train at this size."""
    surviving_heaps: list[str]
    peak_bytes: int
    """The most that the process held in a counted step (VmHWM)."""
    cgroup_peak_bytes: int | None
    """The most that the cgroup counted, with page cache."""
    written_bytes: int
    """What this backend wrote in the last step; 0 for all others."""
    failures: dict[str, str]
    """Sizes that do not train, and how the last heap ended there."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Steps under the limit with one heap."""

    heap: str
    steps: list[Step]
    cgroup_peak_bytes: int | None
    error: str
    """Why it ended early; "" if it made all steps."""


class Course:
    """One model with one dimension that grows, and everything that all contenders share."""

    def __init__(self, base: Run, grow: Grow, kind: str, limit_bytes: int, directory: str) -> None:
        self.base, self.kind, self.limit_bytes, self.directory = base, kind, limit_bytes, directory
        self.grow: Grow = grow
        self._unlimited: dict[str, Step] = {}
        self._correction = 1.0
        """The size that the last contender reached, relative to its guess."""

    def run(self, contender: Contender, size: int) -> Run:
        run = dataclasses.replace(self.base, variant=contender.variant, options=contender.options)
        return dataclasses.replace(run, batch=size) if self.grow == "batch" else dataclasses.replace(run, sequence=size)

    def compiled(self, contender: Contender, size: int) -> Step:
        """The second step without a limit. The first one fills the compile cache."""
        run = self.run(contender, size)
        key = json.dumps(dataclasses.asdict(run), sort_keys=True)
        if key not in self._unlimited:
            with Worker(run) as worker:
                worker.step()
                self._unlimited[key] = worker.step()
        return self._unlimited[key]

    @contextlib.contextmanager
    def worker(self, contender: Contender, size: int, heap: str) -> Generator[tuple[Worker, EnforcedLimit]]:
        """A worker under the limit."""
        to_zram = int(ZRAM_SHARE * self.limit_bytes) if contender.swap == "zram" else 0
        swap_bytes = 0 if contender.swap == "off" else SWAP_BYTES
        with limit(self.kind, self.limit_bytes - to_zram, swap_bytes=swap_bytes) as limited:
            prefix = [*limited.prefix, "env", *HEAPS[heap]]
            with Worker(self.run(contender, size), prefix=prefix) as worker:
                yield worker, limited

    def try_heap(self, contender: Contender, size: int, heap: str) -> Trial:
        expected_s = self.compiled(contender, size).duration_ms / 1e3
        made: list[Step] = []
        error = ""
        peak_bytes = None
        with self.worker(contender, size, heap) as (worker, limited):
            waited = threading.Event()

            def give_up() -> None:
                waited.set()
                limited.kill()

            timer = threading.Timer(60 + PATIENCE * STEPS * expected_s, give_up)
            timer.start()
            try:
                while len(made) < STEPS:
                    made.append(worker.step())
            except WorkerError as reason:
                error = "too slow" if waited.is_set() else str(reason).partition(". It wrote:")[0]
            timer.cancel()
            peak_bytes = limited.peak_bytes()
        return Trial(heap=heap, steps=made, cgroup_peak_bytes=peak_bytes, error=error)

    def learn(self, found: Found) -> None:
        """Guess the next contender's size better."""
        if found.size:
            self._correction = found.size / found.guess

    def search(self, contender: Contender, *, most: int) -> Found:
        """The largest size that trains. The first guess comes from two sizes without a limit."""
        unit = UNITS[self.grow]
        failures: dict[str, str] = {}
        order = list(HEAPS)

        def trains(size: int) -> bool:
            trial = None
            for heap in list(order):
                trial = self.try_heap(contender, size, heap)
                if not trial.error:
                    order.remove(heap)
                    order.insert(0, heap)  # probably the best one at the next size, too
                    break
                failures[str(size)] = trial.error
            assert trial is not None
            console.print(f"{contender.name}, {self.grow} {size}: {trial.error or f'trains with {trial.heap}'}")
            return not trial.error

        small, large = 2 * unit, 8 * unit
        low, high = (self.compiled(contender, size).process_peak_bytes for size in (small, large))
        # A limit counts no pages of libraries that others have loaded before. This process has about the same.
        guess = guess_size(small, low, large, high, self.limit_bytes + library_bytes())
        size = find_largest(trains, guess=int(self._correction * guess), unit=unit, most=most)
        alive: list[Trial] = []
        while size and not alive:  # what has trained once may fail the next time: memory differs by some pages
            trials = [self.try_heap(contender, size, heap) for heap in HEAPS]
            alive = sorted((trial for trial in trials if not trial.error), key=lambda trial: median_ms(trial.steps))
            size -= 0 if alive else step_at(size, unit)
        return Found(
            size=size,
            guess=guess,
            heap=alive[0].heap if alive else "",
            surviving_heaps=[trial.heap for trial in alive],
            peak_bytes=max((step.process_peak_bytes for step in counted(alive[0].steps)), default=0) if alive else 0,
            cgroup_peak_bytes=alive[0].cgroup_peak_bytes if alive else None,
            written_bytes=alive[0].steps[-1].statistics.bytes_written if alive else 0,
            failures=failures,
        )

    def time(self, found: Mapping[Contender, Found], base: Contender, *, rounds: int) -> dict[str, Any]:
        """Steps of all contenders in turns, each at its size: the throughput of each relative to that of ``base``."""
        steps: dict[str, list[Step]] = {contender.name: [] for contender in found}
        errors: dict[str, str] = {}
        with ExitStack() as stack:
            workers = {
                contender: stack.enter_context(self.worker(contender, its.size, its.heap))[0]
                for contender, its in found.items()
            }
            for _ in range(rounds):
                for contender, worker in list(workers.items()):
                    try:
                        steps[contender.name].append(worker.step())
                    except WorkerError as error:
                        errors[contender.name] = str(error).partition(". It wrote:")[0]
                        del workers[contender]
        return {
            contender.name: {"error": errors[contender.name]}
            if contender.name in errors
            else self._throughput(its.size, steps[contender.name], found[base].size, steps[base.name])
            for contender, its in found.items()
        }

    def _throughput(self, size: int, steps: Sequence[Step], base_size: int, base_steps: Sequence[Step]) -> Any:
        ratio = time_ratio(steps, base_steps)
        interval = None
        if ratio.interval is not None:
            low, high = (size / base_size / bound for bound in reversed(ratio.interval))
            interval = (low, high)
        other = self.base.sequence if self.grow == "batch" else self.base.batch
        return {
            "step_ms": [step.duration_ms for step in steps],
            "peak_bytes": max(step.process_peak_bytes for step in counted(steps)),
            "tokens_per_s": size * other / (median_ms(steps) / 1e3),
            "throughput_ratio": size / base_size / ratio.median,
            "throughput_ratio_interval": interval,
        }


def library_bytes() -> int:
    """Resident pages of files: libraries, for the most part."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile:"))
    return int(line.split()[1]) << 10


def guess_size(small: int, small_bytes: int, large: int, large_bytes: int, limit_bytes: int) -> int:
    """Where a line through two peaks reaches the limit; at least ``small``."""
    slope = (large_bytes - small_bytes) / (large - small)
    return max(small, int(small + (limit_bytes - small_bytes) / slope)) if slope > 0 else large


def step_at(size: int, unit: int) -> int:
    """How exactly a size near this one is found."""
    return max(unit, size // PRECISION // unit * unit)


def find_largest(trains: Callable[[int], bool], *, guess: int, unit: int, most: int) -> int:
    """The largest multiple of ``unit`` up to ``most`` that trains, to one unit or a share of 1 / PRECISION.

    If a size trains, so does every smaller one. 0: none does.
    """

    most = most // unit * unit
    low, high = 0, most + unit  # what trains, and what does not or is not wanted
    size = min(max(unit, guess // unit * unit), most)
    step = step_at(size, unit)
    while high - low > step_at(low, unit):
        if trains(size):
            low = size
        else:
            high = size
        if high > most:
            size = min(low + step, most)
        elif low == 0:
            size = max(high - step, unit)
        else:
            size = (low + high) // 2 // unit * unit
        step *= 2
    return low


def make_contenders(max_slowdowns: Sequence[float], options: Mapping[str, Any]) -> list[Contender]:
    """All of them. ``options`` are those of this backend."""
    return [
        Contender(name="inductor", variant="inductor"),
        Contender(name="eager", variant="eager"),
        Contender(name="eager, checkpoints", variant="eager_checkpoint"),
        Contender(name="inductor, checkpoints", variant="checkpoint"),
        Contender(name="inductor, selective checkpoints", variant="selective"),
        *(
            Contender(name=f"inductor, budget {share:g}", variant="budget", options={"activation_memory_budget": share})
            for share in BUDGETS
        ),
        Contender(name="inductor, hooks to a file", variant="hooks_disk", options={"ssd_dir": options["ssd_dir"]}),
        Contender(name="inductor, swap", variant="inductor", swap="file"),
        Contender(name="inductor, zram", variant="inductor", swap="zram"),
        *(
            Contender(name=f"ssdtrain, +{share:.0%}", variant="ssdtrain", options={**options, "max_slowdown": share})
            for share in max_slowdowns
        ),
    ]


@contextlib.contextmanager
def swap_file(directory: str) -> Generator[None]:
    """A swap file for as long as the block runs. Raises CalledProcessError or OSError where there may be none."""
    path = Path(directory) / f"ssdtrain-swap-{uuid.uuid4().hex[:12]}"
    try:
        path.touch(mode=0o600)
        _call("fallocate", "-l", str(SWAP_BYTES), str(path))
        with _swapping(path):
            yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def zram(memory_bytes: int) -> Generator[None]:
    """Swap to compressed memory of at most ``memory_bytes``. Raises as :func:`swap_file`."""
    control = Path("/sys/class/zram-control")
    number = (control / "hot_add").read_text().strip()
    device = Path(f"/sys/block/zram{number}")
    try:
        (device / "disksize").write_text(str(SWAP_BYTES))
        (device / "mem_limit").write_text(str(memory_bytes))
        node = Path(f"/dev/zram{number}")
        if not node.exists():  # udev makes it, where it runs
            major, minor = map(int, (device / "dev").read_text().split(":"))
            os.mknod(node, 0o600 | 0o060000, os.makedev(major, minor))
        with _swapping(node):
            yield
    finally:
        (control / "hot_remove").write_text(number)


@contextlib.contextmanager
def _swapping(path: Path) -> Generator[None]:
    _call("mkswap", str(path))
    _call("swapon", str(path))
    try:
        yield
    finally:
        _call("swapoff", str(path))


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def swap_for(contender: Contender, course: Course) -> AbstractContextManager[None]:
    match contender.swap:
        case "off":
            return contextlib.nullcontext()
        case "file":
            return swap_file(course.directory)
        case "zram":
            return zram(int(ZRAM_SHARE * course.limit_bytes))


def search_all(course: Course, contenders: Sequence[Contender], store: Store, *, most: int) -> None:
    for contender in contenders:
        try:
            if contender.name not in store.found:
                with swap_for(contender, course):
                    store.add(contender.name, course.search(contender, most=most))
            course.learn(store.found[contender.name])
        except (OSError, subprocess.CalledProcessError, WorkerError) as error:
            if contender.variant == "ssdtrain":
                raise
            reason = getattr(error, "stderr", None) or str(error)
            console.print(f"{contender.name} is left out: {reason}", highlight=False, markup=False)


def time_all(course: Course, contenders: Sequence[Contender], store: Store, *, rounds: int) -> None:
    """Those with swap each alone with plain Inductor, since a machine has one swap for all; the others together."""
    alive = {one: store.found[one.name] for one in contenders if one.name in store.found and store.found[one.name].size}
    base = contenders[0]
    if base not in alive:
        console.print("Nothing is timed: plain Inductor does not train at any size.")
        return
    together = {contender: its for contender, its in alive.items() if contender.swap == "off"}
    groups = [together, *({base: alive[base], one: its} for one, its in alive.items() if one.swap != "off")]
    for group in groups:
        with ExitStack() as stack:
            for contender in group:
                stack.enter_context(swap_for(contender, course))
            for contender, its in group.items():
                course.compiled(contender, its.size)
            timed = course.time(group, base, rounds=rounds)
        store.times.update({name: times for name, times in timed.items() if name not in store.times})
        store.save()


class Store:
    """The entry of one course in the JSON file: it is read at the start, and written after each contender."""

    def __init__(self, path: Path | None, key: str, facts: Mapping[str, Any]) -> None:
        self._path, self._key, self._facts = path, key, facts
        entry = self._read().get(key, {})
        self.found = {name: Found(**found) for name, found in entry.get("found", {}).items()}
        self.times: dict[str, Any] = {}

    def add(self, name: str, found: Found) -> None:
        self.found[name] = found
        self.save()

    @property
    def entry(self) -> dict[str, Any]:
        found = {name: dataclasses.asdict(its) for name, its in self.found.items()}
        return {**self._facts, "found": found, "times": self.times}

    def save(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps({**self._read(), self._key: self.entry}, indent=1) + "\n")

    def _read(self) -> dict[str, Any]:
        return json.loads(self._path.read_text()) if self._path is not None and self._path.exists() else {}


def rows_of(entry: Mapping[str, Any]) -> list[list[str]]:
    """The table of one entry of the JSON file, the head first."""
    found = {name: Found(**its) for name, its in entry["found"].items()}
    base = found.get("inductor")
    rows = [["", f"largest {entry['grow']}", "ratio", "process", "heap", "tokens/s", "throughput", f"{CONFIDENCE:.0%}"]]
    for name, its in found.items():
        time = entry["times"].get(name, {})
        timed = "throughput_ratio" in time
        rows.append(
            [
                name,
                str(its.size),
                f"{its.size / base.size:.1f}" if base and base.size else "-",
                format_bytes(its.peak_bytes) if its.size else "-",
                its.heap or "-",
                f"{time['tokens_per_s']:,.0f}" if timed else "-",
                f"{time['throughput_ratio']:.2f}" if timed else time.get("error", "-"),
                format_interval(time["throughput_ratio_interval"]) if timed else "-",
            ]
        )
    return rows


def tables(results: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """The tables of docs/benchmarks.md, by their titles."""
    return {title: rows_of(entry) for title, entry in results.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="gpt2")
    sizes = (("layers", 4), ("hidden", 384), ("batch", 2), ("sequence", 256), ("vocab", 2048))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--limit-mib", type=int)
    parser.add_argument("--grow", choices=list(UNITS), default="batch", help="what is made as large as possible")
    parser.add_argument("--most", type=int, help="where the search ends; default: 256, for sequences 32768")
    parser.add_argument("--contender", action="append", help="default: all; may be repeated; inductor always runs")
    parser.add_argument(
        "--max-slowdown", type=float, action="append", help=f"default: {MAX_SLOWDOWNS}; may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=12, help="steps that are timed; 0: only search")
    parser.add_argument("--ssd-dir", help="directory on the SSD")
    parser.add_argument("--json", type=Path, help="add the results to this file, and take what it has from there")
    parser.add_argument("--markdown", type=Path, help="print the tables of such a file, and train nothing")
    chosen = parser.parse_args(arguments)
    if chosen.markdown is not None:
        for title, rows in tables(json.loads(chosen.markdown.read_text())).items():
            print(f"{title}\n\n{markdown(rows)}\n")
        return 0
    if chosen.limit_mib is None:
        parser.error("--limit-mib is missing: the memory that each contender gets, in MiB.")
    kind = find_kind()
    if isinstance(kind, NotEnforced):
        console.print(kind.reason)
        return 1
    (directory, *_) = check_directories(chosen.ssd_dir)
    with tempfile.TemporaryDirectory(prefix="ssdtrain-limit-") as temporary:
        # All processes plan with one profile, so that they share compiled code. A busy machine stores none.
        profile = Path(temporary) / "hardware.json"
        profile.write_text(OffloadConfig().load_hardware("cpu").to_json())
        options = {"ssd_dir": directory, "hardware": str(profile)}
        contenders = make_contenders(chosen.max_slowdown or MAX_SLOWDOWNS, options)
        names = [contender.name for contender in contenders]
        unknown = sorted({*(chosen.contender or ())} - {*names})
        if unknown:
            parser.error(f"unknown contenders: {', '.join(unknown)}. There are: {'; '.join(names)}.")
        if chosen.contender:
            contenders = [one for one in contenders if one.name in ("inductor", *chosen.contender)]
        base = Run(
            model=chosen.model, optimizer="adamw", hashed_steps=0, **{name: getattr(chosen, name) for name, _ in sizes}
        )
        course = Course(base, chosen.grow, kind, chosen.limit_mib << 20, directory)
        fixed = ", ".join(f"{name} {getattr(chosen, name)}" for name, _ in sizes if name != chosen.grow)
        title = f"{chosen.model}, largest {chosen.grow} in {chosen.limit_mib} MiB ({kind}; {fixed}; AdamW)"
        facts = {
            **describe_machine("cpu", [directory]),
            "limit_bytes": course.limit_bytes,
            "kind": kind,
            "grow": chosen.grow,
            "base": dataclasses.asdict(base),
            "hardware": json.loads(profile.read_text()),
        }
        store = Store(chosen.json, title, facts)
        previous = os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(temporary) / "compiled"))
        console.print(f"compiled code: {previous}", highlight=False)
        search_all(course, contenders, store, most=chosen.most or (256 if chosen.grow == "batch" else 32768))
        if chosen.rounds:
            time_all(course, contenders, store, rounds=chosen.rounds)
    wide = Console(width=max(console.width, 160))
    wide.print(rich_table(rows_of(store.entry), title, "throughput is relative to plain Inductor at its largest size"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
