"""Train in several ranks on this machine, and compare every bit with plain Inductor: DDP, FSDP, tensors, pipelines.

    python benchmarks/ranks.py --ranks 2 --ranks 4 --steps 50
    python benchmarks/ranks.py --ranks 4 --parallelism ddp --kills 20

torchrun starts the ranks, on CPUs with gloo. Each rank has its own data. After every step, the loss and the digests of
gradients and parameters of each rank are compared between both runs. The table shows the rank with the largest values:
how much its process grows in a step, and what compiled steps hold at most, measured and planned. The plans of several
graphs are added up in the order in which their halves run. Each stage of a pipeline is told how many micro-batches it
holds at once. Step times are only in the JSON, because both runs are separate.

With ``--kills``, random ranks are killed at random moments instead (SIGKILL). Every time, torchrun must end with an
error, and no process and no file may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.cli.common import parse_options
from ssdtrain_fx.passes.planning.chain_memory import ChainMemory, Half, in_a_row, peak_of_chain

VARIANTS = ("inductor", "ssdtrain")
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "1f1b-told": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}
"""In ``1f1b-told``, each stage says which backward comes next."""
PARALLELISMS = ("ddp", "fsdp", "tensor", *SCHEDULES)
INTERLEAVED = ("interleaved", "zero-bubble")
STAGES_PER_RANK = 2
"""Of the schedules that interleave."""
KEEP_WHAT_IS_SENT = ("gpipe", *INTERLEAVED)
"""These schedules wait for what they send at the end of the step (torch 2.13): until then, it stays in memory."""
MICRO_BATCHES = 8
WARM_UP_STEPS = 3
"""The first step compiles, and the memory of the next ones is not yet arranged."""
TIMEOUT_S = 900.0
KILLED_AFTER_S = 2.0
"""A rank is killed at a random moment of this time, after its first step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks do."""

    parallelism: str
    variant: str
    steps: int
    layers: int
    hidden: int
    batch: int
    sequence: int
    options: dict[str, Any]


# -- one rank ----------------------------------------------------------------------------------------------------------


def stack(job: Job, layers: int) -> nn.Sequential:
    """``layers`` layers of a transformer. Built the same on all ranks, so that they begin with the same weights."""
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                job.hidden, max(1, job.hidden // 64), 4 * job.hidden, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
    )


def square_error(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


class Whole(nn.Module):
    """A model that returns its loss."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return square_error(self.layers(x), target)


class Stage(nn.Module):
    """A part of a model. Dynamo skips the code of torch's own containers if they are compiled in place."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What one rank does."""

    step: Callable[[Tensor, Tensor], float]
    """Returns the loss of this rank."""
    modules: Sequence[nn.Module]
    """The modules whose parameters this rank trains."""
    planned_peak_bytes: Callable[[], int]
    """What compiled steps hold at most according to the plans, after a step was made."""


def in_parallel(job: Job, backend: Any, config: OffloadConfig) -> Training:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks, rank = dist.get_world_size(), dist.get_rank()
    layers = stack(job, job.layers)
    if job.parallelism in SCHEDULES:
        return in_pipeline(job, layers, backend, config)
    model: nn.Module = Whole(layers)
    compiled: Any = model
    mesh = init_device_mesh("cpu", (ranks,))
    x = torch.zeros(job.batch, job.sequence, job.hidden)
    if job.parallelism != "tensor":  # where all ranks compute on the same data
        x = x.chunk(ranks)[rank]
    if job.parallelism == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
        compiled = torch.compile(model, backend=backend)
        with model.no_sync():
            planned_bytes = ssdtrain_fx.explain(model, x, x, config=config).step_peak_bytes[1]
    elif job.parallelism == "tensor":
        for layer in layers:
            parallelize_module(layer, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
        compiled = torch.compile(model, backend=backend)
        planned_bytes = ssdtrain_fx.explain(model, x, x, config=config).step_peak_bytes[1]
    else:
        # Layers after the first one get the result of a computation.
        inputs = [x, *[x.requires_grad_() * 1] * (job.layers - 1)]
        graphs = [memory_of(layer, h, config) for layer, h in zip(layers, inputs, strict=True)]
        planned_bytes = peak_of_chain(graphs, in_a_row(len(graphs)), keep_gradients=False)
        for index, layer in enumerate(layers):
            layers[index] = compile_module(layer, backend)
            fully_shard(layers[index], mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)

    def step(x: Tensor, target: Tensor) -> float:
        if job.parallelism != "tensor":
            x, target = x.chunk(ranks)[rank], target.chunk(ranks)[rank]
        loss: Tensor = compiled(x, target)
        loss.backward()
        return loss.item()

    return Training(step=step, modules=[model], planned_peak_bytes=lambda: planned_bytes)


def memory_of(module: nn.Module, x: Tensor, config: OffloadConfig) -> ChainMemory:
    """What the graph of ``module`` adds to the memory of a step, as planned."""
    return ssdtrain_fx.explain(module, x, config=config).plan.chain_after


def compile_module(module: nn.Module, backend: Any) -> nn.Module:
    compiled: Any = torch.compile(module, backend=backend)
    return compiled


def compile_stage(job: Job, module: nn.Module, backend: Any) -> nn.Module:
    """Without bubbles, a backward runs twice: for the gradients of inputs, then for those of weights. torch refuses the
    result of ``torch.compile`` there."""
    if job.parallelism != "zero-bubble":
        return compile_module(module, backend)
    from torch._functorch import config

    cast(Any, config).donated_buffer = False  # so that it may run twice
    stage = Stage(module)
    stage.compile(backend=backend)
    return stage


def in_pipeline(job: Job, layers: nn.Sequential, backend: Any, config: OffloadConfig) -> Training:
    import torch.distributed as dist
    from torch.distributed import pipelining

    ranks, rank = dist.get_world_size(), dist.get_rank()
    per_rank = STAGES_PER_RANK if job.parallelism in INTERLEAVED else 1
    count = ranks * per_rank
    size = job.layers // count
    modules = [layers[index * size : (index + 1) * size] for index in range(rank, count, ranks)]
    x = torch.zeros(job.batch // MICRO_BATCHES, job.sequence, job.hidden)
    graphs = [
        memory_of(module, x.requires_grad_(index > 0), config)
        for module, index in zip(modules, range(rank, count, ranks), strict=True)
    ]
    order: list[Half] = []

    class RecordedStage(pipelining.PipelineStage):
        """Notes which halves run in which order."""

        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            order.append(Half(self.stage_index // ranks, "forward"))
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            # A result is as large as an input and its gradient. Until its backward, the plan has it anyway.
            sent = (not self.is_first) + (not self.is_last) if job.parallelism in KEEP_WHAT_IS_SENT else 0
            order.append(Half(self.stage_index // ranks, "backward", sent * x.nbytes))
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    class ToldStage(RecordedStage):
        """Says which micro-batch each forward belongs to, and which backward comes next. Backwards come in the order of
        forwards."""

        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            with ssdtrain_fx.micro_batch(fwd_chunk_id):
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            ssdtrain_fx.expect_backward(bwd_chunk_id + 1)
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    make_stage = ToldStage if job.parallelism == "1f1b-told" else RecordedStage
    stages = [
        make_stage(compile_stage(job, module, backend), index, count, torch.device("cpu"))
        for module, index in zip(modules, range(rank, count, ranks), strict=True)
    ]
    make = getattr(pipelining, SCHEDULES[job.parallelism])
    schedule = make(stages if per_rank > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=square_error)

    def step(x: Tensor, target: Tensor) -> float:
        order.clear()
        losses: list[Tensor] = []
        inputs = (x,) if rank == 0 else ()
        expected = {"target": target, "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*inputs, return_outputs=False, **expected)
        return float(sum(loss.item() for loss in losses))

    def planned_peak_bytes() -> int:
        return peak_of_chain(graphs, order, keep_results=True)

    return Training(step=step, modules=modules, planned_peak_bytes=planned_peak_bytes)


def forwards_in_flight(parallelism: str, rank: int, ranks: int) -> int:
    """How many micro-batches a stage of this rank holds at once."""
    if parallelism in ("1f1b", "1f1b-told"):
        return min(MICRO_BATCHES, ranks - rank)
    return MICRO_BATCHES if parallelism in SCHEDULES else 1


def train(job: Job, directory: Path) -> None:
    """Body of one rank. Writes what it found to ``directory``, and a line for each step that it has made."""
    import torch.distributed as dist

    from ssdtrain_fx.studies.process_memory import peak_bytes, reset_peak, return_unused_memory, used_bytes
    from ssdtrain_fx.studies.trainer import digests
    from ssdtrain_fx.vector_math import settle_vector_math

    settle_vector_math()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    in_flight = forwards_in_flight(job.parallelism, rank, dist.get_world_size())
    options: dict[str, Any] = {"forwards_in_flight": in_flight, **job.options}
    config = OffloadConfig(**options)
    training = in_parallel(job, ssdtrain_fx.backend(config) if job.variant == "ssdtrain" else "inductor", config)
    parameters = {f"{index}.{name}": p for index, m in enumerate(training.modules) for name, p in m.named_parameters()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    found: list[dict[str, str]] = []
    seconds: list[float] = []
    with (directory / f"steps-{rank}").open("a") as steps:
        for index in range(job.steps):
            x, target = (torch.randn(job.batch, job.sequence, job.hidden, generator=generator) for _ in range(2))
            if index == WARM_UP_STEPS:
                ssdtrain_fx.reset_peak_memory_stats()
                reset_peak("cpu")
            optimizer.zero_grad()
            began_s = time.perf_counter()
            loss = training.step(x, target)
            seconds.append(time.perf_counter() - began_s)
            optimizer.step()
            found.append({"loss": loss.hex(), **digests(gradients_and_parameters(parameters))})
            steps.write(".")
            steps.flush()
    memory, moved, process_peak_bytes = ssdtrain_fx.memory_stats(), ssdtrain_fx.statistics(), peak_bytes("cpu")
    optimizer.zero_grad()
    return_unused_memory()
    result = {
        "steps": found,
        "step_s": statistics.median(seconds[WARM_UP_STEPS:]),
        "growth_bytes": process_peak_bytes - used_bytes("cpu"),
        "activation_peak_bytes": memory.allocated_peak_bytes,
        "planned_peak_bytes": training.planned_peak_bytes(),
        "offloads": moved.offloads,
        "bytes_written": moved.bytes_written,
        "kept_for_time": moved.kept_for_time,
        "ahead_bytes": moved.ahead_bytes,
        "stall_s": moved.stall_s,
    }
    (directory / f"rank-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def gradients_and_parameters(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """What this rank holds of them."""
    gradients = {f"gradient {name}": _local(p.grad) for name, p in parameters.items() if p.grad is not None}
    return gradients | {f"parameter {name}": _local(p.detach()) for name, p in parameters.items()}


def _local(tensor: Any) -> Tensor:
    """The shard of this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# -- all ranks ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def torchrun(job: Job, ranks: int, directory: Path) -> Generator[subprocess.Popen[str]]:
    """The launcher of one run. At the end it is killed, with all ranks, if it still runs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with (directory / "output").open("w") as output:
        process = subprocess.Popen(
            [*command, "--job", json.dumps(dataclasses.asdict(job)), "--directory", str(directory)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_to_end(job: Job, ranks: int) -> list[dict[str, Any]]:
    """What each rank has found. Raises RuntimeError with the output if the run fails."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with torchrun(job, ranks, directory) as process:
            process.wait(TIMEOUT_S)
        if process.returncode != 0:
            output = (directory / "output").read_text()
            raise RuntimeError(f"torchrun ended with {process.returncode}:\n{output[-4000:]}")
        return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def first_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    """Where the runs of two variants differ first: rank, step, and tensor. Empty if all bits are equal."""
    for rank, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        for index, (step, expected) in enumerate(zip(ours["steps"], theirs["steps"], strict=True)):
            for name in expected:
                if step[name] != expected[name]:
                    return f"rank {rank}, step {index}: {name}"
    return ""


def compare(job: Job, ranks: int) -> dict[str, Any]:
    """Train with both variants."""
    plain, ours = (run_to_end(dataclasses.replace(job, variant=variant), ranks) for variant in VARIANTS)
    most = {name: max(rank[name] for rank in ours) for name in ours[0] if name != "steps"}
    return {
        "parallelism": job.parallelism,
        "ranks": ranks,
        "steps": job.steps,
        "difference": first_difference(ours, plain),
        "inductor_step_s": max(rank["step_s"] for rank in plain),
        "inductor_growth_bytes": max(rank["growth_bytes"] for rank in plain),
        "offloads_of_each_rank": [rank["offloads"] for rank in ours],
        "growth_bytes_of_each_rank": [rank["growth_bytes"] for rank in ours],
        "inductor_growth_bytes_of_each_rank": [rank["growth_bytes"] for rank in plain],
        **most,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """What was left of a run one of whose ranks was killed."""

    rank: int
    exit_code: int
    names_the_rank: bool
    """The launcher said which rank failed."""
    processes_left: int
    files_left: int


def kill_one(job: Job, ranks: int, generator: random.Random) -> Kill:
    """Kill a random rank at a random moment."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir=job.options["ssd_dir"]) as ssd_dir:
        directory = Path(name)
        endless = dataclasses.replace(job, steps=1_000_000, options={**job.options, "ssd_dir": ssd_dir})
        with torchrun(endless, ranks, directory) as process:
            end_s = time.monotonic() + TIMEOUT_S
            while not all(_has_made_a_step(directory / f"steps-{rank}") for rank in range(ranks)):
                if process.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError(f"the ranks do not train:\n{(directory / 'output').read_text()[-4000:]}")
                time.sleep(0.05)
            time.sleep(KILLED_AFTER_S * generator.random())
            started = psutil.Process(process.pid).children(recursive=True)
            rank = generator.randrange(ranks)
            victim = next(one for one in started if one.environ().get("RANK") == str(rank))
            victim.kill()
            process.wait(TIMEOUT_S)
            _, left = psutil.wait_procs(started, timeout=10)
        return Kill(
            rank=rank,
            exit_code=process.returncode,
            names_the_rank=f"rank      : {rank} " in (directory / "output").read_text(),
            processes_left=len(left),
            files_left=len(list(Path(ssd_dir).iterdir())),
        )


def _has_made_a_step(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append", help="default: 2")
    parser.add_argument("--parallelism", action="append", choices=PARALLELISMS, help="default: all")
    parser.add_argument("--steps", type=int, default=50, help="at least 4")
    parser.add_argument("--kills", type=int, default=0, help="kill so many ranks instead")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="of all ranks together")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the backend")
    parser.add_argument("--ssd-dir", default=tempfile.gettempdir())
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be at least {WARM_UP_STEPS + 1}: the first {WARM_UP_STEPS} do not count.")
    return chosen


def main(arguments: Sequence[str]) -> int:
    chosen = parse_arguments(arguments)
    if chosen.job is not None:
        train(Job(**json.loads(chosen.job)), Path(chosen.directory))
        return 0
    options: dict[str, Any] = {"ssd_dir": chosen.ssd_dir, "max_slowdown": 0.05, "min_tensor_bytes": 1 << 16}
    options |= parse_options(chosen.option)
    size = {name: getattr(chosen, name) for name in ("steps", "layers", "hidden", "batch", "sequence")}
    console, is_right = Console(), True
    rows: list[dict[str, Any]] = []
    generator = random.Random(chosen.seed)
    for ranks in chosen.ranks or [2]:
        for parallelism in chosen.parallelism or PARALLELISMS:
            job = Job(parallelism=parallelism, variant="ssdtrain", options=options, **size)
            if chosen.kills:
                for number in range(chosen.kills):
                    kill = kill_one(job, ranks, generator)
                    rows.append({"parallelism": parallelism, "ranks": ranks, **dataclasses.asdict(kill)})
                    console.print(f"kill {number + 1} of {chosen.kills}: {kill}", highlight=False)
                    is_right &= bool(kill.exit_code and kill.names_the_rank)
                    is_right &= not (kill.processes_left or kill.files_left)
            else:
                rows.append(compare(job, ranks))
                is_right &= not rows[-1]["difference"]
                console.print(rows[-1], highlight=False)
    if not chosen.kills:
        console.print(render(rows))
    if chosen.json:
        written = {"torch": torch.__version__, "cores": os.cpu_count(), **size, "options": options, "results": rows}
        Path(chosen.json).write_text(json.dumps(written, indent=1) + "\n")
    return 0 if is_right else 1


def render(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="The rank with the largest values, MiB")
    names = ("inductor_growth_bytes", "growth_bytes", "activation_peak_bytes", "planned_peak_bytes")
    for column in ("", "ranks", "growth, Inductor", "growth", "activations", "planned", "offloads", "bits"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["parallelism"],
            str(row["ranks"]),
            *(f"{row[name] / (1 << 20):.1f}" for name in names),
            str(row["offloads"]),
            row["difference"] or "equal",
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
