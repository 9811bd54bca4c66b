"""Train models in separate processes that take turns, one step at a time, and measure every step.

    plain, offloaded = take_turns([Run(variant="inductor"), Run(variant="ssdtrain")], steps=8)
    plain.process_peak_bytes, offloaded.process_peak_bytes      # of the same steps as the times
    plain.steps[3].duration_ms, offloaded.steps[3].duration_ms

Guarantees:

* Each run has one process. Its time and its peak memory come from the same steps.
* Every process has the environment of the caller, with the same three additions: nothing is loaded from the network,
  cuBLAS is deterministic, and Inductor has an empty cache. Settings of the C library's heap are neither added nor
  removed.
* So every process that `take_turns` starts compiles its code. A compilation leaves objects behind: 55 MiB for a GPT-2
  of 12 layers. A process that compiles must not be compared with one that loads its code from a cache.
* Runs that differ only in `variant` and `regional` see the same weights, the same batch and the same random numbers at
  step n, and every step has another batch. Their losses and gradients may therefore be compared to the bit.
  `torch.use_deterministic_algorithms` is on: without it plain Inductor adds up an embedding's gradient with atomics,
  and two runs of the same program differ.
* What a library prints cannot disturb the replies; when a worker fails, `WorkerError` carries what it wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor

from ssdtrain_fx.accelerators import available_type, reason_to_refuse
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.units import format_bytes

Variant = Literal[
    "inductor",
    "ssdtrain",
    "rewrites",
    "checkpoint",
    "selective",
    "budget",
    "hooks_host",
    "hooks_disk",
    "ssdtrain_checkpoint",
    "chunked",
    "chunked_checkpoint",
    "eager",
    "eager_checkpoint",
    "eager_hooks_disk",
    "eager_checkpoint_hooks_disk",
]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What every worker gets beside the caller's environment. cuBLAS is deterministic only with a fixed workspace."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Where Inductor keeps compiled code."""


class WorkerError(RuntimeError):
    """A worker process ended before it replied; the message ends with what it wrote to stderr."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a worker trains, and how it is compiled."""

    model: str = "gpt2"
    layers: int = 4
    hidden: int = 256
    batch: int = 4
    sequence: int = 256
    vocab: int = 256
    dropout: float = 0.0
    variant: Variant = "ssdtrain"
    """`inductor` and `ssdtrain` differ in the backend; `checkpoint` is Inductor with one checkpoint per layer, and in
    `selective` each saves matrix products, attention and convolutions. `rewrites` is `ssdtrain` with everything kept in
    memory: what its other changes of the graph do.

    `budget` is Inductor under torch's `activation_memory_budget`. `hooks_host` and `hooks_disk` are Inductor under
    saved-tensor hooks: torch's `save_on_cpu`, and `SavedTensorsOnDisk`.

    `chunked` is Inductor with its auto-chunker, which computes the loss in chunks. `chunked_checkpoint` and
    `ssdtrain_checkpoint` have one checkpoint per layer. What begins with `eager` compiles nothing.
    """
    regional: bool = False
    """Each layer is compiled on its own, and what lies between them runs as plain PyTorch."""
    text: bool = False
    """Batches are source code of Python's standard library, one byte per token, instead of random numbers."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    seed: int = 0
    hashed_steps: int | None = None
    """Gradients are hashed in so many first steps and in the sampled one; None: in every step. Hashing takes a second
    per GB. A loss, and the gradients of the sampled step, depend on all gradients before."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Options of the ``ssdtrain`` backend. `hooks_disk` takes `ssd_dir`, `budget` takes `activation_memory_budget`."""

    @property
    def title(self) -> str:
        """What sets this run apart in a table."""
        return f"{self.variant}, by layer" if self.regional else self.variant


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One training step: forward, backward, optimizer."""

    index: int
    loss_hex: str
    """`float.hex` of the loss: equal text, equal bits."""
    gradients: dict[str, str]
    """SHA-256 of the gradient of each parameter, in the order of the parameters. Empty in a step that is not hashed."""
    duration_ms: float
    process_peak_bytes: int
    """The most that the whole process held in this step: resident memory on a CPU, torch's allocator on CUDA."""
    peak_was_reset: bool
    """False: the system does not permit it, and `process_peak_bytes` is the peak since the process began."""
    samples: list[tuple[float, int]]
    """(ms since the step began, bytes that the process holds); empty unless the step is sampled."""
    page_faults: int
    """Pages that the process touched for the first time: of 4 KiB, unless they are huge."""
    statistics: Statistics
    """What the engine did in this step; all zero for a variant that does not offload."""

    @property
    def loss(self) -> float:
        return float.fromhex(self.loss_hex)

    @property
    def gradients_digest(self) -> str:
        """One SHA-256 for all gradients."""
        return digest_of(self.gradients.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """What a process holds after its last step: gradients are dropped, and unused memory is given back."""

    process_bytes: int
    """Parameters, optimizer state, torch, compiled code: everything that no step allocates."""
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    """Size of the gradients that were dropped: a part of the growth in a step."""

    @property
    def other_bytes(self) -> int:
        """Torch, compiled code and the rest."""
        return self.process_bytes - self.parameter_bytes - self.optimizer_bytes


def uncounted(steps: int) -> int:
    """How many of the first steps do not count: one compiles, and where there are more than four, one warms up."""
    return 2 if steps > 4 else 1


def counted(steps: Sequence[Step]) -> Sequence[Step]:
    """The steps whose time, memory and page faults count."""
    return steps[uncounted(len(steps)) :]


def median_ms(steps: Sequence[Step]) -> float:
    """Median time of the counted steps."""
    return statistics.median(step.duration_ms for step in counted(steps))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What one worker did. Time and memory are those of the counted `steps`."""

    run: Run
    steps: list[Step]
    sampled: Step
    """One more step, for the course of memory. It begins with unused memory given back, and sampling slows it down. So
    it counts for no time and no peak."""
    rest: Rest

    @property
    def median_ms(self) -> float:
        return median_ms(self.steps)

    @property
    def process_peak_bytes(self) -> int:
        return max(step.process_peak_bytes for step in counted(self.steps))

    @property
    def growth_bytes(self) -> int:
        """What a step adds to the process: activations, gradients, and memory that the engine and the heap keep."""
        return self.process_peak_bytes - self.rest.process_bytes

    @property
    def kept_for_time_bytes(self) -> int:
        """What stayed in memory beyond the plan in the step that kept most, because the disk was slow."""
        return max(step.statistics.kept_for_time_bytes for step in counted(self.steps))

    @property
    def page_faults(self) -> float:
        """Median of the counted steps."""
        return statistics.median(step.page_faults for step in counted(self.steps))

    @property
    def gradients_digest(self) -> str:
        """One SHA-256 for all gradients of all steps."""
        return digest_of(step.gradients_digest for step in (*self.steps, self.sampled))

    def equals(self, base: Measurement) -> bool:
        """Same loss in every step and same gradients in every hashed step, to the bit."""
        pairs = zip((*self.steps, self.sampled), (*base.steps, base.sampled), strict=True)
        return all(a.loss_hex == b.loss_hex and a.gradients == b.gradients for a, b in pairs)

    def to_plain(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "first_counted_step": uncounted(len(self.steps)) + 1,
            "median_step_ms": self.median_ms,
            "process_peak_bytes": self.process_peak_bytes,
            "growth_bytes": self.growth_bytes,
            "rest_bytes": self.rest.process_bytes,
            "rest_parameter_bytes": self.rest.parameter_bytes,
            "rest_optimizer_bytes": self.rest.optimizer_bytes,
            "rest_other_bytes": self.rest.other_bytes,
            "gradient_bytes": self.rest.gradient_bytes,
            "median_page_faults": self.page_faults,
            "step_ms": [step.duration_ms for step in self.steps],
            "step_process_peak_bytes": [step.process_peak_bytes for step in self.steps],
            "step_kept_for_time_bytes": [step.statistics.kept_for_time_bytes for step in self.steps],
            "peaks_were_reset": all(step.peak_was_reset for step in self.steps),
            "page_faults": [step.page_faults for step in self.steps],
            "losses_hex": [step.loss_hex for step in self.steps],
            "gradients_sha256": [step.gradients_digest for step in self.steps],
            "memory_course_ms_bytes": self.sampled.samples,
        }


MEMORY_ROWS: tuple[tuple[str, Callable[[Measurement], int]], ...] = (
    ("process at its peak", lambda one: one.process_peak_bytes),
    ("growth in a step", lambda one: one.growth_bytes),
    ("  gradients at its end", lambda one: one.rest.gradient_bytes),
    ("rest of the process", lambda one: one.rest.process_bytes),
    ("  parameters", lambda one: one.rest.parameter_bytes),
    ("  optimizer state", lambda one: one.rest.optimizer_bytes),
    ("  torch, compiled code and the rest", lambda one: one.rest.other_bytes),
)
"""What tables say about memory: the first row is the sum of the second and the fourth."""


def notes(measurements: Sequence[Measurement]) -> list[str]:
    """What a reader of a table has to know, one sentence each."""
    all_steps = [step for one in measurements for step in one.steps]
    steps = len(measurements[0].steps)
    which = "first step does" if uncounted(steps) == 1 else f"first {uncounted(steps)} of {steps} steps do"
    found = [
        f"Time, memory and page faults are of the same steps. The {which} not count.",
        "Growth is the peak of the process minus its rest: what it holds at the end, when no step runs.",
    ]
    for one in measurements:
        if one.kept_for_time_bytes:
            kept = ", ".join(str(step.index + 1) for step in counted(one.steps) if step.statistics.kept_for_time_bytes)
            found.append(
                f"{one.run.title}: the disk seemed slower than planned, so up to "
                f"{format_bytes(one.kept_for_time_bytes)} stayed in memory (steps: {kept}). The growth includes it."
            )
    if not all(step.peak_was_reset for step in all_steps):
        found.append(
            "This system does not let a process reset its peak (/proc/self/clear_refs): peaks are since the process "
            "began, so they include compilation."
        )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A step that a worker is going to make."""

    run: Run
    index: int
    steps: int
    """Steps of this worker that are measured. The step with this index is the sampled one."""

    @property
    def sampled(self) -> bool:
        return self.index == self.steps


class Worker:
    """A process that holds one `Run` and does one step per call of `step`."""

    program: ClassVar[tuple[str, ...]] = ("-m", "ssdtrain_fx.studies.trainer")
    """Arguments of Python that start a process. Tests put a faulty one here."""

    def __init__(self, run: Run, *, prefix: Sequence[str] = (), cache_directory: str | None = None) -> None:
        """``prefix`` goes before the command of the process, such as that of a memory limit. Compiled code is kept in
        ``cache_directory``; None: where Inductor keeps it."""
        self.run = run
        self.steps_done = 0
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed in close()
        self._process = subprocess.Popen(
            [*prefix, sys.executable, *self.program, json.dumps(dataclasses.asdict(run))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **ENVIRONMENT, **({} if cache_directory is None else {CACHE: cache_directory})},
        )

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the model is built. Optional: the first `step` waits as well."""
        return self._request({"describe": True})

    def step(self, *, sampled: bool = False) -> Step:
        return self._step({"sampled": sampled})

    def first_step(self, gate: str) -> Step:
        """The first step, while other workers make theirs. Compiling needs no permission. What is compiled runs while
        no other process locks the file ``gate``, and device memory that it used is given back before the next one runs.
        """
        return self._step({"sampled": False, "gate": gate})

    def _step(self, request: dict[str, Any]) -> Step:
        reply = self._request({"step": self.steps_done, **request})
        self.steps_done += 1
        samples = [(float(ms), int(size)) for ms, size in reply.pop("samples")]
        return Step(samples=samples, statistics=Statistics(**reply.pop("statistics")), **reply)

    def gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The gradients of the last step, for the parameters of these names."""
        with tempfile.NamedTemporaryFile() as file:
            self._request({"gradients": list(names), "path": file.name})
            return torch.load(file.name, weights_only=True)

    def rest(self) -> Rest:
        """What the process holds when no step is in progress. The gradients of the last step are gone afterwards."""
        return Rest(**self._request({"rest": True}))

    def kill(self) -> None:
        """End the process at once. Whoever waits for a reply gets a WorkerError."""
        self._process.kill()

    def close(self) -> None:
        """End the process; it leaves by itself when its input ends."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(self._failure())
        return json.loads(line)

    def _failure(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        written = self._stderr.read().decode(errors="replace").strip() or "(nothing)"
        how = (
            f"was killed by signal {-code} (9 is what the kernel sends when memory runs out)"
            if code < 0
            else f"exited with {code}"
        )
        return f"The worker for {self.run.title!r} {how}. It wrote:\n{written}"


def plan_turns(runs: Sequence[Run], steps: int) -> list[Turn]:
    """The order of the steps that `take_turns` makes: A B A B, and a sampled step of each at the end."""
    return [Turn(run=run, index=index, steps=steps) for index in range(steps + 1) for run in runs]


def take_turns(
    runs: Sequence[Run],
    *,
    steps: int,
    on_step: Callable[[Run, Step], None] = lambda run, step: None,
    on_round: Callable[[Sequence[Worker], Sequence[Step]], None] = lambda workers, steps: None,
) -> list[Measurement]:
    """One step of every run after the other, `steps` times: other load on the machine slows all of them alike.

    Args:
        on_round: called when each worker has made one step, while the workers still hold the gradients.

    Raises:
        WorkerError: a worker failed.
    """
    (measured,) = measure_groups([runs], steps=steps, on_step=on_step, on_round=on_round)
    return measured


def _raise(run: Run, error: WorkerError) -> None:
    raise error


def measure_groups(
    groups: Sequence[Sequence[Run]],
    *,
    steps: int,
    jobs: int = 1,
    gates: int = 1,
    on_step: Callable[[Run, Step], None] = lambda run, step: None,
    on_round: Callable[[Sequence[Worker], Sequence[Step]], None] = lambda workers, steps: None,
    on_failure: Callable[[Run, WorkerError], None] = _raise,
    goes_on: Callable[[], bool] = lambda: True,
) -> Generator[list[Measurement]]:
    """`take_turns` for each of ``groups``. The workers of all of them have compiled before the first is measured, and
    those of a group end when it is measured.

    Args:
        jobs: Workers that compile at the same time. One: two would disturb each other, except on a machine with a core
            for each.
        gates: With several jobs, how many processes may run what they have compiled at the same time.
        on_failure: Called for a worker that failed, which then takes no more turns. Default: its error is raised.
        goes_on: Asked before each round after the second step. If not, the next one is the sampled step, which is last.
    """
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(jobs)) if jobs > 1 else None
        files = [stack.enter_context(tempfile.NamedTemporaryFile(prefix="ssdtrain-gate-")) for _ in range(gates)]
        names = itertools.cycle(file.name for file in files)
        stacks = [stack.enter_context(contextlib.ExitStack()) for _ in groups]

        def begin(run: Run, gate: str, own: contextlib.ExitStack) -> tuple[Worker, Step] | WorkerError:
            # A compiler that was started by a worker that has failed may still write there.
            cache = tempfile.TemporaryDirectory(prefix="ssdtrain-compiled-", ignore_cleanup_errors=True)
            worker = own.enter_context(Worker(run, cache_directory=own.enter_context(cache)))
            try:
                worker.wait_ready()
                return worker, worker.first_step(gate) if pool else worker.step(sampled=False)
            except WorkerError as error:
                return error

        def begin_all(runs: Sequence[Run], own: contextlib.ExitStack) -> Iterable[tuple[Worker, Step] | WorkerError]:
            """With a pool, all at once; else each when it is asked for."""
            each = pool.map if pool else map
            return cast(Any, each)(begin, runs, names, itertools.repeat(own))

        begun = list(map(begin_all, groups, stacks))
        if pool:  # after an error, nothing else begins; then the workers are closed, which ends the threads
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        teams: list[dict[Worker, list[Step]]] = []
        for runs, outcomes in zip(groups, begun, strict=True):
            team: dict[Worker, list[Step]] = {}
            for run, outcome in zip(runs, outcomes, strict=False):
                if isinstance(outcome, WorkerError):
                    on_failure(run, outcome)
                    continue
                worker, step = outcome
                team[worker] = [step]
                on_step(run, step)
            on_round(list(team), [its_steps[-1] for its_steps in team.values()])
            teams.append(team)
        for team, own in zip(teams, stacks, strict=True):
            for index in itertools.count(1):
                sampled = index >= steps or (index > 1 and not goes_on())
                for worker, its_steps in list(team.items()):
                    with _leaving(team, worker, on_failure):
                        its_steps.append(worker.step(sampled=sampled))
                        on_step(worker.run, its_steps[-1])
                on_round(list(team), [its_steps[-1] for its_steps in team.values()])
                if sampled:
                    break
            measured: list[Measurement] = []
            for worker, (*its_steps, last) in list(team.items()):
                with _leaving(team, worker, on_failure):
                    measured.append(Measurement(run=worker.run, steps=its_steps, sampled=last, rest=worker.rest()))
            own.close()
            yield measured


@contextlib.contextmanager
def _leaving(
    team: dict[Worker, list[Step]], worker: Worker, on_failure: Callable[[Run, WorkerError], None]
) -> Generator[None]:
    """A worker that fails within the block leaves its team."""
    try:
        yield
    except WorkerError as error:
        del team[worker]
        worker.close()
        on_failure(worker.run, error)


def digest_of(digests: Iterable[str]) -> str:
    """One SHA-256 for several."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def choose_device(name: str) -> str:
    """The device that `auto`, `cpu`, `cuda` or another accelerator means here.

    Raises:
        ValueError: an accelerator is asked for and there is none, or it is not supported.
    """
    if name == "cpu":
        return name
    here = available_type()
    if name in ("auto", here):
        return here or "cpu"
    refused = reason_to_refuse(name)
    if refused:
        raise ValueError(f"Device {name!r} cannot be used: {refused}. Use 'cpu' or 'auto'.")
    raise ValueError(f"Device {name!r} is asked for, but torch sees no such device. Use 'cpu' or 'auto'.")
