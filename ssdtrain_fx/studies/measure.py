"""Train one model in a separate process, one step per request, and measure every step.

    with Worker(Run(model="gpt2", variant="ssdtrain", measure="memory")) as worker:
        step = worker.step()            # blocks; the worker idles between steps, so two can take turns
        step.loss, step.gradients_digest, step.peak_bytes, step.duration_ms

Guarantees:

* Runs that differ only in `variant`, `regional` and `measure` see the same weights, the same batch and the same random
  numbers at step n, and every step has another batch. Their losses and gradients may therefore be compared to the bit.
  `torch.use_deterministic_algorithms` is on: without it plain Inductor adds up an embedding's gradient with atomics,
  and two runs of the same program differ.
* Memory and time are measured in different processes. To see on a CPU what a step really holds, glibc must give freed
  memory back at once (`MALLOC_MMAP_THRESHOLD_`), and that makes steps slower.
* What a library prints cannot disturb the replies; when a worker fails, `WorkerError` carries what it wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from ssdtrain_fx.compiler.dynamo_backend import backend as make_backend
from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.runtime import ops
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.studies import rivals, zoo

Variant = Literal["inductor", "ssdtrain", "checkpoint", "budget", "hooks_host", "hooks_disk"]
Measure = Literal["time", "memory"]

LAYER_CLASSES = frozenset(
    {
        "GPT2Block",
        "LlamaDecoderLayer",
        "BertLayer",
        "T5Block",
        "ViTLayer",
        "TransformerEncoderLayer",
        "ResidualBlock",
    }
)
"""What counts as one layer in the models of `ssdtrain_fx.studies.zoo`."""
CONFIDENCE = 0.95
CLEAR_WIDTH = 0.1
"""Largest span of what the pairs and the medians say about a ratio of step times that still allows a conclusion. A
guess."""
SAMPLE_INTERVAL_S = 0.002
RETURN_FREED_MEMORY_AT_BYTES = 64 << 10
STATUS = Path("/proc/self/status")
STATM = Path("/proc/self/statm")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK_RSS = "5"
SHOWN_PARAMETERS = 5
"""How many parameters the text of a `Difference` names."""


class WorkerError(RuntimeError):
    """A worker process ended before it replied; the message ends with what it wrote to stderr."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a worker trains, how it is compiled, and what is measured."""

    model: str = "gpt2"
    layers: int = 4
    hidden: int = 256
    batch: int = 4
    sequence: int = 256
    vocab: int = 256
    dropout: float = 0.0
    variant: Variant = "ssdtrain"
    """`inductor` and `ssdtrain` differ in the backend; `checkpoint` is Inductor with one checkpoint per layer.

    `budget` is Inductor under torch's `activation_memory_budget`. `hooks_host` and `hooks_disk` are Inductor under
    saved-tensor hooks: torch's `save_on_cpu`, and `SavedTensorsOnDisk`.
    """
    regional: bool = False
    """Each layer is compiled on its own, and what lies between them runs as plain PyTorch."""
    measure: Measure = "time"
    text: bool = False
    """Batches are source code of Python's standard library, one byte per token, instead of random numbers."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    seed: int = 0
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
    """SHA-256 of the gradient of each parameter, in the order of the parameters."""
    duration_ms: float
    start_bytes: int
    """Memory in use before forward: parameters, optimizer state, what the process keeps. 0 when time is measured.

    On a CPU without what the engine keeps between steps, staging and idle memory: that is a price of offloading, so it
    counts in `peak_bytes`.
    """
    peak_bytes: int
    """Highest memory during the step, minus `start_bytes`."""
    samples: list[tuple[float, int]]
    """(ms since the step began, bytes over `start_bytes`)."""
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
class Turn:
    """A step that a worker is going to make."""

    run: Run
    index: int
    steps: int
    """Steps that this worker makes altogether."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimeRatio:
    """Step time relative to that of a base run. They took turns: each pair of steps met the same conditions."""

    median: float
    """Median over the pairs."""
    interval: tuple[float, float] | None
    """Where the true median lies, at CONFIDENCE; None where the pairs are too few to say."""
    of_medians: float
    """Ratio of the two median step times. Other programs that run for a part of the time can distort it."""

    @property
    def doubt(self) -> str:
        """Why these figures are not a result, as a sentence; empty where they are one."""
        if self.interval is None:
            return (
                f"Too few pairs of steps for a {CONFIDENCE:.0%} interval of the change in step time: take more steps."
            )
        said = (*self.interval, self.of_medians)
        if max(said) - min(said) <= CLEAR_WIDTH:
            return ""
        return (
            "The machine was too noisy to tell the change in step time: pair by pair it is "
            f"{format_change(self.interval)} ({CONFIDENCE:.0%} interval), by the medians {self.of_medians - 1:+.1%}. "
            "Run it again on an idle machine, or take more steps."
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """How far two tensors are apart."""

    absolute: float
    """Largest difference of two elements."""
    relative: float
    """Largest difference of two elements, relative to the larger of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first step in which a run does not agree with its base run to the bit."""

    run: Run
    step: int
    loss: float
    base_loss: float
    parameters: int
    """How many parameters the model has."""
    gradients: dict[str, Distance]
    """Every parameter whose gradient differs, the largest absolute difference first."""

    def __str__(self) -> str:
        where = "timed run" if self.run.measure == "time" else "run sampled for memory"
        losses = (
            f"The losses are both {self.loss!r}."
            if self.loss == self.base_loss
            else f"The losses are {self.base_loss!r} and {self.loss!r}."
        )
        lines = [
            f"First difference of {self.run.title} in the {where}: step {self.step + 1}. {losses}",
            f"The gradients of {len(self.gradients)} of {self.parameters} parameters differ"
            + (". Largest differences, absolute and relative:" if self.gradients else "."),
        ]
        shown = list(self.gradients.items())[:SHOWN_PARAMETERS]
        lines += [f"  {name}: {apart.absolute:.3g}, {apart.relative:.3g}" for name, apart in shown]
        if len(self.gradients) > len(shown):
            lines.append(f"  and {len(self.gradients) - len(shown)} more")
        return "\n".join(lines)


class Worker:
    """A process that holds one `Run` and does one step per call of `step`."""

    program: ClassVar[tuple[str, ...]] = ("-m", "ssdtrain_fx.studies.measure")
    """Arguments of Python that start a process. Tests put a faulty one here."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.steps_done = 0
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed in close()
        self._process = subprocess.Popen(
            [sys.executable, *self.program, json.dumps(dataclasses.asdict(run))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=_worker_environment(run),
        )

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the model is built. Optional: the first `step` waits as well."""
        return self._request({"describe": True})

    def step(self) -> Step:
        reply = self._request({"step": self.steps_done})
        self.steps_done += 1
        samples = [(float(ms), int(size)) for ms, size in reply.pop("samples")]
        return Step(samples=samples, statistics=Statistics(**reply.pop("statistics")), **reply)

    def gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The gradients of the last step, for the parameters of these names."""
        with tempfile.NamedTemporaryFile() as file:
            self._request({"gradients": list(names), "path": file.name})
            return torch.load(file.name, weights_only=True)

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
        return f"The worker for {self.run.title!r} ({self.run.measure}) {how}. It wrote:\n{written}"


def plan_turns(runs: Sequence[Run], steps: int) -> list[Turn]:
    """The order of the steps that `take_turns` and `rounds` make: A B A B."""
    return [Turn(run=run, index=index, steps=steps) for index in range(steps) for run in runs]


def rounds(
    workers: Sequence[Worker], on_step: Callable[[Worker, Step], None], *, steps: int
) -> Generator[tuple[Step, ...]]:
    """One step of every worker after the other, `steps` times: other load on the machine slows all of them alike."""
    for _ in range(steps):
        done: list[Step] = []
        for worker in workers:
            done.append(worker.step())
            on_step(worker, done[-1])
        yield tuple(done)


def take_turns(workers: Sequence[Worker], on_step: Callable[[Worker, Step], None], *, steps: int) -> list[list[Step]]:
    """The steps of every worker, made in `rounds`."""
    return [list(its_steps) for its_steps in zip(*rounds(workers, on_step, steps=steps), strict=True)]


def find_difference(worker: Worker, base: Worker, step: Step, base_step: Step) -> Difference | None:
    """Where the last steps of two workers differ; None where loss and gradients are equal to the bit."""
    names = [name for name, digest in step.gradients.items() if digest != base_step.gradients[name]]
    if not names and step.loss_hex == base_step.loss_hex:
        return None
    ours, theirs = worker.gradients(names), base.gradients(names)
    apart = {name: _distance(ours[name], theirs[name]) for name in names}
    return Difference(
        run=worker.run,
        step=step.index,
        loss=step.loss,
        base_loss=base_step.loss,
        parameters=len(step.gradients),
        gradients=dict(sorted(apart.items(), key=lambda item: _nan_first(item[1].absolute))),
    )


def _distance(found: Tensor, base: Tensor) -> Distance:
    ours, theirs = found.double(), base.double()
    apart = (ours - theirs).abs()
    relative = torch.where(apart == 0, apart, apart / torch.maximum(ours.abs(), theirs.abs()))
    return Distance(absolute=float(apart.max()), relative=float(relative.max()))


def _nan_first(value: float) -> float:
    return -math.inf if math.isnan(value) else -value


def digest_of(digests: Iterable[str]) -> str:
    """One SHA-256 for several."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def time_ratio(steps: Sequence[Step], base: Sequence[Step]) -> TimeRatio:
    """How step times relate; the first pair compiles and does not count."""
    return TimeRatio(
        median=median_ratio(steps, base),
        interval=median_ratio_interval(steps, base),
        of_medians=median_ms(steps) / median_ms(base),
    )


def format_change(interval: tuple[float, float]) -> str:
    """An interval of a ratio as changes: ``-1.0% to +2.0%``."""
    return " to ".join(f"{ratio - 1:+.1%}" for ratio in interval)


def median_ratio(steps: Sequence[Step], base: Sequence[Step]) -> float:
    """Median over the pairs of the step time relative to `base`; the first pair compiles and does not count."""
    return statistics.median(_ratios(steps, base))


def median_ratio_interval(steps: Sequence[Step], base: Sequence[Step]) -> tuple[float, float] | None:
    """Where the true median of those ratios lies, at CONFIDENCE; None where the pairs are too few to say.

    It follows from the order of the pairs alone, whatever the noise is like (W. J. Conover, Practical Nonparametric
    Statistics, 3rd edition, 3.2).
    """
    from scipy import stats

    untyped = cast(Any, stats)
    low, high = untyped.quantile_test(_ratios(steps, base), p=0.5).confidence_interval(CONFIDENCE)
    return (float(low), float(high)) if math.isfinite(low) and math.isfinite(high) else None


def _ratios(steps: Sequence[Step], base: Sequence[Step]) -> list[float]:
    pairs = list(zip(steps, base, strict=True))
    return [a.duration_ms / b.duration_ms for a, b in pairs[1:] or pairs]


def median_ms(steps: Sequence[Step]) -> float:
    """Median step time; the first step compiles and does not count."""
    return statistics.median(step.duration_ms for step in steps[1:] or steps)


def choose_device(name: str) -> str:
    """The device that `auto`, `cpu` or `cuda` means here.

    Raises:
        ValueError: `cuda` is asked for and there is none, or the name is unknown.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"Unknown device {name!r}. Valid devices: auto, cpu, cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("Device 'cuda' is asked for, but torch sees no CUDA device. Use 'cpu' or 'auto'.")
    return name


def _worker_environment(run: Run) -> dict[str, str]:
    environment = dict(os.environ)
    environment["HF_HUB_OFFLINE"] = "1"
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with a fixed workspace
    environment.pop("MALLOC_MMAP_THRESHOLD_", None)
    if run.measure == "memory":
        environment["MALLOC_MMAP_THRESHOLD_"] = str(RETURN_FREED_MEMORY_AT_BYTES)
    return environment


# Below: inside the worker.


class _Trainer:
    def __init__(self, run: Run) -> None:
        torch.use_deterministic_algorithms(True)
        # Filling every fresh tensor would cost time and touch memory that the step itself never touches.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        torch.manual_seed(run.seed)
        self._run = run
        self._dtype = getattr(torch, run.dtype)
        module, make_batch = zoo.build(
            run.model,
            layers=run.layers,
            hidden=run.hidden,
            batch=run.batch,
            sequence=run.sequence,
            vocab=run.vocab,
            dropout=run.dropout,
        )
        self._make_batch = zoo.text_batches(batch=run.batch, sequence=run.sequence) if run.text else make_batch
        self._module = module.to(run.device, self._dtype)
        if run.variant == "checkpoint":
            checkpoint_every_layer(self._module)
        self._compiled = cast(Callable[..., Tensor], _compile(self._module, run))
        parameters = list(self._module.parameters())
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, lr=1e-2) if run.optimizer == "sgd" else torch.optim.AdamW(parameters, lr=3e-4)
        )

    def describe(self) -> dict[str, Any]:
        return {"parameters": sum(parameter.numel() for parameter in self._module.parameters())}

    def step(self, index: int) -> Step:
        run = self._run
        self._optimizer.zero_grad(set_to_none=True)
        batch = self._batch(index)
        before = self._statistics()
        torch.manual_seed(run.seed + index)
        probe = _MemoryProbe(run.device, before.staging_bytes + before.idle_bytes) if run.measure == "memory" else None
        _synchronize(run.device)
        with probe or contextlib.nullcontext():
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            began_s = time.perf_counter()
            loss = self._compiled(*batch)
            loss.backward()
            self._optimizer.step()
            _synchronize(run.device)
            duration_s = time.perf_counter() - began_s
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        moved = self._statistics().since(before)
        return Step(
            index=index,
            loss_hex=float(loss.item()).hex(),
            gradients=self._digests(),
            duration_ms=1e3 * duration_s,
            start_bytes=probe.start_bytes if probe else 0,
            peak_bytes=probe.peak_bytes if probe else 0,
            samples=probe.samples if probe else [],
            page_faults=faults,
            statistics=moved,
        )

    def _batch(self, index: int) -> zoo.Batch:
        generator = torch.Generator().manual_seed(1_000_003 * (self._run.seed + 1) + index)
        return tuple(
            tensor.to(self._run.device, self._dtype if tensor.is_floating_point() else tensor.dtype)
            for tensor in self._make_batch(generator)
        )

    def _statistics(self) -> Statistics:
        return ops.statistics() if self._run.variant == "ssdtrain" else Statistics()

    def save_gradients(self, names: Sequence[str], path: str) -> dict[str, Any]:
        torch.save({name: self._gradients()[name].cpu() for name in names}, path)
        return {}

    def _gradients(self) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            if parameter.grad is None:
                raise RuntimeError(f"Parameter {name} has no gradient.")
            gradients[name] = parameter.grad.detach()
        return gradients

    def _digests(self) -> dict[str, str]:
        digests: dict[str, str] = {}
        for name, gradient in self._gradients().items():
            raw = gradient.cpu().contiguous().flatten().view(torch.uint8)
            digests[name] = hashlib.sha256(cast(Any, raw.numpy())).hexdigest()
        return digests


class _MemoryProbe:
    """Memory of this process (CPU) or of torch's allocator (CUDA) while the `with` block runs.

    A thread samples the course. The peak is not left to it: Linux and torch's CUDA allocator both record the highest
    value themselves, so a peak inside one long kernel is not missed.
    """

    def __init__(self, device: str, engine_bytes: int) -> None:
        self._cuda = device != "cpu"
        self._engine_bytes = 0 if self._cuda else engine_bytes
        self._peak_was_reset = True
        self._samples: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.start_bytes = 0
        self.peak_bytes = 0

    @property
    def samples(self) -> list[tuple[float, int]]:
        if not self._samples:
            return []
        began_s = self._samples[0][0]
        return [(round(1e3 * (now_s - began_s), 3), size - self.start_bytes) for now_s, size in self._samples]

    def __enter__(self) -> Self:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            try:
                CLEAR_REFS.write_text(RESET_PEAK_RSS)
            except OSError:  # not permitted in some containers: then only the samples tell
                self._peak_was_reset = False
        used_bytes = self._used_bytes()
        self.start_bytes = used_bytes - self._engine_bytes
        self._samples.append((time.perf_counter(), used_bytes))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._samples.append((time.perf_counter(), self._used_bytes()))
        self._ended.set()
        self._thread.join()
        self._samples.sort()
        highest_bytes = max(size for _, size in self._samples)
        if self._peak_was_reset:
            recorded_bytes = torch.cuda.max_memory_allocated() if self._cuda else _recorded_peak_rss_bytes()
            highest_bytes = max(highest_bytes, recorded_bytes)
        self.peak_bytes = highest_bytes - self.start_bytes

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_INTERVAL_S):
            self._samples.append((time.perf_counter(), self._used_bytes()))

    def _used_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self._cuda else _rss_bytes()


def _rss_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _recorded_peak_rss_bytes() -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _compile(module: nn.Module, run: Run) -> Callable[..., object]:
    backend: Any = "inductor"
    if run.variant == "ssdtrain":
        backend = make_backend(OffloadConfig.from_options(run.options))
    compiled: Any = module
    if run.regional:
        for layer in find_layers(module):
            layer.compile(backend=backend, dynamic=False, fullgraph=True)
    else:
        compiled = torch.compile(module, backend=backend, dynamic=False, fullgraph=True)
    if run.variant == "budget":
        return rivals.with_activation_budget(compiled, run.options["activation_memory_budget"])
    if run.variant == "hooks_host":
        return rivals.with_hooks(compiled, torch.autograd.graph.save_on_cpu(pin_memory=run.device != "cpu"))
    if run.variant == "hooks_disk":
        return rivals.with_hooks(compiled, rivals.SavedTensorsOnDisk(run.options.get("ssd_dir")))
    return compiled


def find_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of a model of `ssdtrain_fx.studies.zoo`. Raises ValueError where there are none."""
    layers = [layer for layer in module.modules() if type(layer).__name__ in LAYER_CLASSES]
    if not layers:
        raise ValueError(f"Found no layer; expected one of {', '.join(sorted(LAYER_CLASSES))}.")
    return layers


def checkpoint_every_layer(module: nn.Module) -> int:
    """Let backward compute each layer again; returns how many there are.

    The switch that transformers has for this does not compile as one graph for T5.
    """
    layers = find_layers(module)
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return len(layers)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


@contextlib.contextmanager
def _replies_to_stdout() -> Generator[IO[str]]:
    """Keep the pipe for replies; whatever else is printed goes to stderr."""
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        yield replies


def serve(run: Run) -> None:
    """Answer requests on stdin, one JSON value per line, until it ends."""
    with _replies_to_stdout() as replies:
        trainer = _Trainer(run)
        for line in sys.stdin:
            replies.write(json.dumps(_reply(trainer, json.loads(line))) + "\n")
            replies.flush()


def _reply(trainer: _Trainer, request: dict[str, Any]) -> dict[str, Any]:
    match request:
        case {"step": index}:
            return dataclasses.asdict(trainer.step(index))
        case {"gradients": names, "path": path}:
            return trainer.save_gradients(names, path)
        case _:
            return trainer.describe()


if __name__ == "__main__":
    serve(Run(**json.loads(sys.argv[1])))
