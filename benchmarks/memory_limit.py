"""Train under a memory limit that the kernel enforces: how large a batch, how long a sequence, and how fast?

    python benchmarks/memory_limit.py --model gpt2 --limit-mib 700 --grow batch --json limits.json
    python benchmarks/memory_limit.py --model gpt2 --limit-mib 700 --grow sequence --batch 1 --json limits.json

Every contender trains with AdamW in a cgroup of its own, with a heap of its choice: the C library's, the same with huge
pages and without its adaptive threshold, or jemalloc. The largest size is the largest one that twice makes all steps
without being killed. At that size, the fastest of the heaps that survive is timed, in turns with plain Inductor at its
own largest size. Both are under the limit. The contenders are

    eager ...       nothing is compiled
    inductor ...    plain torch.compile
    ssdtrain ...    this backend, at several max_slowdown
    ... checkpoints            torch.utils.checkpoint around every layer
    ... selective checkpoints  the same, with matrix products, attention and convolutions saved
    ... budget                 torch's activation_memory_budget
    ... hooks to a file        saved-tensor hooks that write in the background (ssdtrain_fx/studies/rivals.py)
    ... swap                   the operating system moves pages to a swap file in the directory on the SSD
    ... zram                   the same, to compressed memory, which gets a part of the limit

For all others, swap is off. Code is compiled before, without a limit, because what a compilation needs says nothing
about training. A size whose steps take five times as long as without a limit does not count: it does little but wait
for swap. On a CPU, ``save_on_cpu``, transformers' ``{"offload": True}`` and the ``OffloadActivations`` of TRL and
torchtune move host memory to host memory, so they cannot lower anything and are left out. Swap needs root, and no other
swap.

Results are added to the JSON file as they are found. What it already has is not searched again: ``--rounds 0`` only
searches, and a later call times. Results of other settings are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from result_tables import markdown, rich_table
from rich.console import Console

from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.runtime.storage.directory import check_directories
from ssdtrain_fx.studies.bench import describe_machine, format_interval
from ssdtrain_fx.studies.comparison import CONFIDENCE, time_ratio
from ssdtrain_fx.studies.limited_process import EnforcedLimit, NotEnforced, find_kind, limit, swap_is_on
from ssdtrain_fx.studies.measure import Run, Step, Variant, Worker, WorkerError, counted, median_ms
from ssdtrain_fx.studies.zoo import MODELS
from ssdtrain_fx.units import format_bytes
from ssdtrain_fx.whole_file import write_whole

Grow = Literal["batch", "sequence"]
Swap = Literal["off", "file", "zram"]
STEPS = 10
BUDGETS = (0.0, 0.5)
MAX_SLOWDOWNS = (0.05, 0.3)
PATIENCE = 5
"""A step may take so many times as long as without a limit."""
STARTUP_S = 300.0
"""How long a trial may take beside that."""
PRECISION = 16
"""The largest size is found to this share of it, or to one unit."""
UNITS: Mapping[Grow, int] = {"batch": 1, "sequence": 32}
MOST: Mapping[Grow, int] = {"batch": 256, "sequence": 32768}
LEAST_ROUNDS = 9
"""Fewer give no confidence interval."""
ZRAM_SHARES = (0.25, 0.5)
"""Of the limit."""
SWAP_BYTES = 16 << 30
JEMALLOC = ctypes.util.find_library("jemalloc")
HEAPS: dict[str, tuple[str, ...]] = {
    "glibc": (),
    "glibc, tuned": ("GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1048576",),
    **({"jemalloc": (f"LD_PRELOAD={JEMALLOC}",)} if JEMALLOC else {}),
}
"""Environment of each heap. With a fixed threshold, every larger tensor is returned to the system when it is freed."""
OUR_EXTRAS: tuple[tuple[str, Variant, dict[str, Any]], ...] = (
    ("checkpoints", "ssdtrain_checkpoint", {}),
    ("chunked loss", "ssdtrain", {"chunk_loss": "auto"}),
)
"""What can be added to ours, as it is to rivals."""
OUT_OF_MEMORY = ("killed by signal 9", "MemoryError", "bad_alloc", "an't allocate memory", "annot allocate memory")
"""How a worker ends that got no memory. Whatever else ends it is an error."""
BASE = "inductor"

console = Console()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A way to train, at any size."""

    name: str
    variant: Variant
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    swap: Swap = "off"
    zram_share: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The largest size of one contender. A size is a batch, or a number of tokens."""

    size: int
    """0: not even the smallest one trains."""
    is_most: bool
    """Nothing larger was tried."""
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
    """Sizes that do not train, and how it ended there with each heap."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Steps under the limit with one heap."""

    heap: str
    steps: list[Step]
    cgroup_peak_bytes: int | None
    error: str
    """Why it does not count; "" if it does."""


class Course:
    """One model with one dimension that grows, and everything that all contenders share."""

    def __init__(
        self, base: Run, grow: Grow, kind: str, limit_bytes: int, directory: str, cache_directory: str | None = None
    ) -> None:
        self.base, self.kind, self.limit_bytes, self.directory = base, kind, limit_bytes, directory
        self.grow: Grow = grow
        self._cache_directory = cache_directory
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
            with Worker(run, cache_directory=self._cache_directory) as worker:
                worker.step()
                self._unlimited[key] = worker.step()
        return self._unlimited[key]

    @contextlib.contextmanager
    def worker(self, contender: Contender, size: int, heap: str) -> Generator[tuple[Worker, EnforcedLimit]]:
        """A worker under the limit."""
        own_bytes = self.limit_bytes - int(contender.zram_share * self.limit_bytes)
        swap_bytes = 0 if contender.swap == "off" else SWAP_BYTES
        with limit(self.kind, own_bytes, swap_bytes=swap_bytes) as limited:
            prefix = [*limited.prefix, "env", *HEAPS[heap]]
            run = self.run(contender, size)
            with Worker(run, prefix=prefix, cache_directory=self._cache_directory) as worker:
                yield worker, limited

    def try_heap(self, contender: Contender, size: int, heap: str) -> Trial:
        """Raises WorkerError if the worker ends for another reason than memory."""
        longest_ms = PATIENCE * self.compiled(contender, size).duration_ms
        made: list[Step] = []
        error = ""
        expired = threading.Event()
        with self.worker(contender, size, heap) as (worker, limited):

            def give_up() -> None:
                expired.set()
                worker.kill()

            timer = threading.Timer(STARTUP_S + STEPS * longest_ms / 1e3, give_up)
            timer.daemon = True
            timer.start()
            try:
                while len(made) < STEPS:
                    made.append(worker.step())
            except WorkerError as reason:
                if not any(text in str(reason) for text in OUT_OF_MEMORY):
                    raise
                error = "too slow" if expired.is_set() else "killed"
            finally:
                timer.cancel()
                timer.join()
            cgroup_peak_bytes = limited.peak_bytes()
        if not error and median_ms(made) > longest_ms:
            error = "too slow"
        return Trial(heap=heap, steps=made, cgroup_peak_bytes=cgroup_peak_bytes, error=error)

    def learn(self, found: Found) -> None:
        """Guess the next contender's size better."""
        if found.size and not found.is_most:
            self._correction = found.size / found.guess

    def search(self, contender: Contender, *, most: int) -> Found:
        """The largest size that trains. The first guess comes from two sizes without a limit."""
        unit = UNITS[self.grow]
        failures: dict[str, str] = {}
        order = list(HEAPS)

        def trains(size: int) -> bool:
            errors: list[str] = []
            for heap in list(order):
                error = self.try_heap(contender, size, heap).error
                if not error:
                    order.remove(heap)
                    order.insert(0, heap)  # probably the best one at the next size, too
                    console.print(f"{contender.name}, {self.grow} {size}: trains with {heap}")
                    return True
                errors.append(f"{heap}: {error}")
            failures[str(size)] = "; ".join(errors)
            console.print(f"{contender.name}, {self.grow} {size}: {failures[str(size)]}")
            return False

        small, large = 4 * unit, 16 * unit  # of smaller ones, tensors are too small to be offloaded
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
            is_most=size + unit > most,
            guess=guess,
            heap=alive[0].heap if alive else "",
            surviving_heaps=[trial.heap for trial in alive],
            peak_bytes=max(step.process_peak_bytes for step in counted(alive[0].steps)) if alive else 0,
            cgroup_peak_bytes=alive[0].cgroup_peak_bytes if alive else None,
            written_bytes=alive[0].steps[-1].statistics.bytes_written if alive else 0,
            failures=failures,
        )

    def time(self, group: Sequence[Contender], found: Mapping[str, Found], *, rounds: int) -> dict[str, Any]:
        """Steps of all contenders of ``group`` in turns, each at its size: the throughput of each relative to that of
        the first one. Who began a round comes last in the next one."""
        steps: dict[str, list[Step]] = {contender.name: [] for contender in group}
        errors: dict[str, str] = {}
        with ExitStack() as stack:
            workers = {
                one.name: stack.enter_context(self.worker(one, found[one.name].size, found[one.name].heap))[0]
                for one in group
            }
            for index in range(rounds):
                names = list(steps)
                for name in (*names[index % len(names) :], *names[: index % len(names)]):
                    if name in errors:
                        continue
                    try:
                        steps[name].append(workers[name].step())
                    except WorkerError as error:
                        errors[name] = str(error).partition(". It wrote:")[0]
        base = group[0].name
        timed: dict[str, Any] = {}
        for name, its_steps in steps.items():
            if name in errors or base in errors:
                timed[name] = {"error": errors.get(name) or f"{base} failed: {errors[base]}"}
            else:
                timed[name] = self._throughput(found[name].size, its_steps, found[base].size, steps[base])
        return timed

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


def make_contenders(max_slowdowns: Sequence[float], directory: str, hardware: str) -> list[Contender]:
    """All of them, plain Inductor first."""
    to_file = {"ssd_dir": directory}
    ours = {"ssd_dir": directory, "hardware": hardware}
    return [
        Contender(name=BASE, variant="inductor"),
        Contender(name="eager", variant="eager"),
        Contender(name="eager, checkpoints", variant="eager_checkpoint"),
        Contender(name="eager, hooks to a file", variant="eager_hooks_disk", options=to_file),
        Contender(name="eager, checkpoints, hooks to a file", variant="eager_checkpoint_hooks_disk", options=to_file),
        Contender(name="inductor, checkpoints", variant="checkpoint"),
        Contender(name="inductor, selective checkpoints", variant="selective"),
        Contender(name="inductor, chunked loss", variant="chunked"),
        Contender(name="inductor, checkpoints, chunked loss", variant="chunked_checkpoint"),
        *(
            Contender(name=f"inductor, budget {share:g}", variant="budget", options={"activation_memory_budget": share})
            for share in BUDGETS
        ),
        Contender(name="inductor, hooks to a file", variant="hooks_disk", options=to_file),
        Contender(name="inductor, swap", variant="inductor", swap="file"),
        *(
            Contender(name=f"inductor, zram {share:.0%}", variant="inductor", swap="zram", zram_share=share)
            for share in ZRAM_SHARES
        ),
        *(
            Contender(name=f"ssdtrain, +{100 * share:g} %", variant="ssdtrain", options={**ours, "max_slowdown": share})
            for share in max_slowdowns
        ),
        *(
            Contender(
                name=f"ssdtrain, {added}, +{100 * share:g} %",
                variant=variant,
                options={**ours, **options, "max_slowdown": share},
            )
            for share in max_slowdowns[-1:]
            for added, variant, options in OUR_EXTRAS
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
    device, node, made = Path(f"/sys/block/zram{number}"), Path(f"/dev/zram{number}"), False
    try:
        (device / "disksize").write_text(str(SWAP_BYTES))
        (device / "mem_limit").write_text(str(memory_bytes))
        if not node.exists():  # udev makes it, where it runs
            major, minor = map(int, (device / "dev").read_text().split(":"))
            os.mknod(node, 0o600 | stat.S_IFBLK, os.makedev(major, minor))
            made = True
        with _swapping(node):
            yield
    finally:
        (control / "hot_remove").write_text(number)
        if made:
            node.unlink()


@contextlib.contextmanager
def _swapping(path: Path) -> Generator[None]:
    if swap_is_on():
        raise OSError("other swap is on: the contender would use that")
    _call("mkswap", str(path))
    try:
        _call("swapon", str(path))
        yield
    finally:
        subprocess.run(["swapoff", str(path)], check=False, capture_output=True)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def swap_for(contender: Contender, course: Course) -> AbstractContextManager[None]:
    match contender.swap:
        case "off":
            return contextlib.nullcontext()
        case "file":
            return swap_file(course.directory)
        case "zram":
            return zram(int(contender.zram_share * course.limit_bytes))


def search_all(course: Course, contenders: Sequence[Contender], store: Store, *, most: int) -> None:
    """Raises WorkerError, OSError or CalledProcessError if plain Inductor or this backend fails."""
    for contender in contenders:
        found = store.found.get(contender.name)
        if found is None:
            try:
                with swap_for(contender, course):
                    found = course.search(contender, most=most)
            except (OSError, subprocess.CalledProcessError, WorkerError) as error:
                if contender.name == BASE or contender.variant.startswith("ssdtrain"):
                    raise
                reason = str(getattr(error, "stderr", None) or error)
                console.print(f"{contender.name} is left out: {reason}", highlight=False, markup=False)
                store.leave_out(contender.name, reason)
                continue
            store.add(contender.name, found)
        course.learn(found)


def time_all(course: Course, contenders: Sequence[Contender], store: Store, *, rounds: int, memory_bytes: int) -> None:
    """Those with swap each alone with plain Inductor, since a machine has one swap for all; of the others, as many at
    a time as fit into ``memory_bytes``."""
    alive = [one for one in contenders if one.name in store.found and store.found[one.name].size]
    if not alive or alive[0].name != BASE:
        console.print("Nothing is timed: plain Inductor does not train at any size.")
        return
    base, *others = alive
    calm, swapping = ([one for one in others if (one.swap == "off") is off] for off in (True, False))
    together = max(1, memory_bytes // course.limit_bytes - 1)
    groups = [calm[start : start + together] for start in range(0, len(calm), together)] + [[one] for one in swapping]
    for group in groups:
        for contender in (base, *group):
            course.compiled(contender, store.found[contender.name].size)
        with ExitStack() as stack:
            for contender in group:
                stack.enter_context(swap_for(contender, course))
            timed = course.time([base, *group], store.found, rounds=rounds)
        store.add_times(timed)


class Store:
    """The entry of one course in the JSON file: it is read at the start, and written after each contender."""

    def __init__(self, path: Path | None, key: str, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """
        Args:
            settings: results of others do not count.
            facts: what else describes the run.

        Raises:
            ValueError: the file has results of other settings.
        """
        self._path, self._key = path, key
        settings = json.loads(json.dumps(settings))
        entry: dict[str, Any] = self._read().get(key, {})
        for name, value in entry.get("settings", settings).items():
            if settings.get(name) != value:
                raise ValueError(
                    f"{path} has results of another run of this: {name} is {value!r} there, and {settings.get(name)!r} "
                    "now. Delete them, or write to another file."
                )
        self._facts = {**entry.get("facts", facts)}
        self._settings = settings
        self.found = {name: Found(**found) for name, found in entry.get("found", {}).items()}
        self.times: dict[str, Any] = entry.get("times", {})
        self._left_out: dict[str, str] = {}

    def add(self, name: str, found: Found) -> None:
        self.found[name] = found
        self._save()

    def leave_out(self, name: str, reason: str) -> None:
        self._left_out[name] = reason
        self._save()

    def add_times(self, times: Mapping[str, Any]) -> None:
        self.times |= times
        self._save()

    @property
    def entry(self) -> dict[str, Any]:
        found = {name: dataclasses.asdict(its) for name, its in self.found.items()}
        entry = {"settings": self._settings, "facts": self._facts, "found": found}
        return {**entry, "left_out": self._left_out, "times": self.times}

    def _save(self) -> None:
        if self._path is not None:
            write_whole(self._path, json.dumps({**self._read(), self._key: self.entry}, indent=1) + "\n")

    def _read(self) -> dict[str, Any]:
        return json.loads(self._path.read_text()) if self._path is not None and self._path.exists() else {}


def rows_of(entry: Mapping[str, Any]) -> list[list[str]]:
    """The table of one entry of the JSON file, the head first."""
    found = {name: Found(**its) for name, its in entry["found"].items()}
    base = found.get(BASE)
    grow = entry["settings"]["grow"]
    rows = [["", f"largest {grow}", "ratio", "process", "heap", "tokens/s", "throughput", f"{CONFIDENCE:.0%}"]]
    for name, its in found.items():
        time = entry["times"].get(name, {})
        timed = "throughput_ratio" in time
        rows.append(
            [
                name,
                f"at least {its.size}" if its.is_most else str(its.size),
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


def sentence(entry: Mapping[str, Any]) -> str:
    """What the README says about one entry: this backend, plain Inductor, and the rival with the largest size."""
    sizes = {name: its["size"] for name, its in entry["found"].items()}
    ours, best = (
        max((name for name in sizes if name.startswith("ssdtrain") is is_ours), key=sizes.__getitem__)
        for is_ours in (True, False)
    )
    limit = format_bytes(entry["settings"]["limit_bytes"])
    times = [entry["times"][name] for name in (ours, best)]
    speeds = [
        f"{time['throughput_ratio']:.2f} times ({format_interval(time['throughput_ratio_interval'])})" for time in times
    ]
    return (
        f"In a cgroup of {limit}, the largest {entry['settings']['grow']} is {sizes[ours]} with `{ours}`, "
        f"{sizes[BASE]} with plain Inductor, and {sizes[best]} with the best rival ({best}). There, tokens per second "
        f"are {speeds[0]} and {speeds[1]} those of plain Inductor (95 % confidence intervals)."
    )


SIZES = {"layers": 4, "hidden": 384, "batch": 2, "sequence": 256, "vocab": 2048}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="gpt2")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--limit-mib", type=int, help="the memory that each contender gets; required")
    parser.add_argument("--grow", choices=list(UNITS), default="batch", help="what is made as large as possible")
    parser.add_argument("--most", type=int, help=f"where the search ends; default: {MOST}")
    parser.add_argument("--contender", action="append", help="default: all; may be repeated; inductor always runs")
    parser.add_argument(
        "--max-slowdown", type=float, action="append", help=f"default: {MAX_SLOWDOWNS}; may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=12, help="steps that are timed; 0: only search")
    parser.add_argument("--ssd-dir", help="directory on the SSD")
    parser.add_argument("--cache-dir", help="where compiled code is kept; default: a temporary directory")
    parser.add_argument("--json", type=Path, help="add the results to this file, and take what it has from there")
    parser.add_argument("--markdown", type=Path, help="print the tables of such a file, and train nothing")
    return parser


def check(chosen: argparse.Namespace, names: Sequence[str]) -> str:
    """What is wrong with the arguments; "": nothing."""
    if chosen.limit_mib is None or chosen.limit_mib < 1:
        return "--limit-mib must be the memory that each contender gets, in MiB."
    for name in SIZES:
        if getattr(chosen, name) < 1:
            return f"--{name} is {getattr(chosen, name)}; expected at least 1."
    if chosen.most is not None and chosen.most < UNITS[chosen.grow]:
        return f"--most is {chosen.most}; expected at least {UNITS[chosen.grow]}."
    if chosen.rounds and chosen.rounds < LEAST_ROUNDS:
        return f"--rounds is {chosen.rounds}; expected 0, or at least {LEAST_ROUNDS} for a confidence interval."
    unknown = sorted({*(chosen.contender or ())} - {*names})
    if unknown:
        return f"unknown contenders: {'; '.join(unknown)}. There are: {'; '.join(names)}."
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    if chosen.markdown is not None:
        for title, rows in tables(json.loads(chosen.markdown.read_text())).items():
            print(f"{title}\n\n{markdown(rows)}\n")
        for entry in json.loads(chosen.markdown.read_text()).values():
            print(sentence(entry))
        return 0
    slowdowns = sorted({*(chosen.max_slowdown or MAX_SLOWDOWNS)})
    wrong = check(chosen, [contender.name for contender in make_contenders(slowdowns, "", "")])
    if wrong:
        parser.error(wrong)
    (directory, *_) = check_directories(chosen.ssd_dir)
    kind = find_kind()
    if isinstance(kind, NotEnforced):
        console.print(kind.reason)
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):  # leave no cgroup and no swap behind
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="ssdtrain-limit-") as temporary:
        base = Run(
            model=chosen.model, optimizer="adamw", hashed_steps=0, **{name: getattr(chosen, name) for name in SIZES}
        )
        most = chosen.most or MOST[chosen.grow]
        fixed = ", ".join(f"{name} {getattr(chosen, name)}" for name in SIZES if name != chosen.grow)
        title = f"{chosen.model}, largest {chosen.grow} in {chosen.limit_mib} MiB ({kind}; {fixed}; AdamW)"
        settings = {
            "limit_bytes": chosen.limit_mib << 20,
            "kind": kind,
            "grow": chosen.grow,
            "most": most,
            "base": dataclasses.asdict(base),
            "heaps": HEAPS,
            "steps": STEPS,
            "patience": PATIENCE,
            "torch": torch.__version__,
        }
        # All processes plan with one profile, so that they share compiled code. A busy machine stores none.
        measured = OffloadConfig().load_hardware("cpu").to_json()
        facts = {**describe_machine("cpu", [directory]), "hardware": measured}
        try:
            store = Store(chosen.json, title, settings, facts)
        except ValueError as error:
            parser.error(str(error))
        profile = Path(temporary) / "hardware.json"
        profile.write_text(store.entry["facts"]["hardware"])
        contenders = make_contenders(slowdowns, directory, str(profile))
        if chosen.contender:
            contenders = [one for one in contenders if one.name in (BASE, *chosen.contender)]
        cache = chosen.cache_dir or str(Path(temporary) / "compiled")
        course = Course(base, chosen.grow, kind, chosen.limit_mib << 20, directory, cache)
        try:
            search_all(course, contenders, store, most=most)
            if chosen.rounds:
                available = psutil.virtual_memory().available
                time_all(course, contenders, store, rounds=chosen.rounds, memory_bytes=int(0.9 * available))
        except (WorkerError, OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"{error}\nWhat was found before is in {chosen.json or 'no file: give one with --json'}.")
    wide = Console(width=max(console.width, 160))
    wide.print(rich_table(rows_of(store.entry), title, "throughput is relative to plain Inductor at its largest size"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
