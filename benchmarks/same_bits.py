"""Train in fresh processes on a busy machine, and compare every bit: plain Inductor and offloading side by side.

    python benchmarks/same_bits.py --model gpt2 --model bert --model llama --processes 100 --steps 20

Each round starts two fresh processes, one for each variant. They make the same steps at the same time: the same
weights, the same batches. After each step, the digests of loss, gradients and parameters are compared, between the
two and with those of all rounds before. A round ends at its first deviation. The first deviation of each model is
described (step, tensor, number of elements, largest relative difference), and both values of the tensor are saved to
a file. The exit code is 1 if anything deviates.

The processes are forked from one that has imported what they need and computed nothing: importing on a busy machine
takes longer than compiling. The load is of this program's own making (processor, disk, memory); ``--calm`` leaves it
out.
"""

from __future__ import annotations

import os

# Set before torch is imported. Compiling processes would be started by the process from which all others are forked.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import argparse
import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ssdtrain_fx.studies import zoo
from ssdtrain_fx.studies.busy_machine import busy_machine
from ssdtrain_fx.studies.measure import ENVIRONMENT, Run, Variant
from ssdtrain_fx.studies.trainer import Trainer, digests

VARIANTS: tuple[Variant, ...] = ("inductor", "ssdtrain")
LOSS = "loss"
Bits = dict[str, str]
"""Digest of each tensor of a step, by "gradient NAME" or "parameter NAME", and the loss as hexadecimal number."""


def serve(run: Run, pipe: Connection) -> None:
    """Body of a fresh process: makes a step for each request, or sends a tensor."""
    trainer = Trainer(run)
    while (request := pipe.recv()) is not None:
        match request:
            case int(index):
                step = trainer.step(index, sampled=False)
                bits = {LOSS: step.loss_hex}
                bits |= {f"gradient {name}": digest for name, digest in step.gradients.items()}
                bits |= {f"parameter {name}": digest for name, digest in digests(trainer.parameters()).items()}
                pipe.send((bits, step.statistics.offloads))
            case _:
                kind, name = request.split(" ", 1)
                tensors = trainer.gradients() if kind == "gradient" else trainer.parameters()
                pipe.send(tensors[name].float().cpu().numpy())


class FreshProcess:
    """A process that trains ``run``."""

    def __init__(self, run: Run) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=serve, args=(run, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that recv() ends if the process dies

    def request(self, what: int | str) -> None:
        self._pipe.send(what)

    def bits(self) -> tuple[Bits, int]:
        """Of the step that was requested, and how many tensors were offloaded in it."""
        return self._pipe.recv()

    def tensor(self, name: str) -> NDArray[np.float32]:
        self._pipe.send(name)
        return self._pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(None)
        self._process.join(20)
        self._process.kill()
        self._process.join()
        self._pipe.close()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """The first tensor of a step that does not have the bits that it should have."""

    model: str
    process: int
    """Number of the round."""
    variant: str
    """The variant whose bits no round before had; both, if there was no round before."""
    step: int
    tensor: str
    elements: int
    """How many differ. 0: both processes of this round agree, but not with the rounds before."""
    size: int
    relative: float
    """Largest relative difference."""
    path: str = ""
    """Where both values of the tensor were saved."""


def first_difference(one: Bits, other: Bits) -> str | None:
    """Name of the first tensor that differs."""
    return next((name for name in one if one[name] != other[name]), None)


def describe(name: str, bits: Sequence[Bits], processes: Sequence[FreshProcess], path: Path | None) -> dict[str, Any]:
    """How far the two values of tensor ``name`` are from each other. They are saved to ``path`` if there is one."""
    if name == LOSS:
        values = [np.array([float.fromhex(one[LOSS])], dtype=np.float64) for one in bits]
    else:
        values = [process.tensor(name).astype(np.float64).ravel() for process in processes]
    plain, other = values
    with np.errstate(all="ignore"):
        relative = np.nan_to_num(np.abs(other - plain) / np.abs(plain))
    if path is not None:
        saved = cast(Any, np.savez)
        saved(path, name=name, **dict(zip(VARIANTS, values, strict=True)))
    return {
        "elements": int((plain != other).sum()),
        "size": plain.size,
        "relative": float(relative.max()),
        "path": "" if path is None else str(path),
    }


def train_round(
    run: Run, number: int, steps: int, reference: list[Bits], save_to: Path | None
) -> tuple[Deviation | None, int]:
    """One fresh process of each variant. Appends to ``reference`` what both agree on. Also returns the offloads."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(FreshProcess(dataclasses.replace(run, variant=variant))) for variant in VARIANTS
        ]
        offloads = 0
        for index in range(steps):
            for process in processes:
                process.request(index)
            results = [process.bits() for process in processes]
            bits = [one for one, _ in results]
            offloads += results[1][1]
            known = reference[index] if index < len(reference) else None
            differing = first_difference(*bits)
            strange = [v for v, one in zip(VARIANTS, bits, strict=True) if known is not None and one != known]
            if differing is not None:
                return Deviation(
                    model=run.model,
                    process=number,
                    variant=" and ".join(strange or VARIANTS),
                    step=index,
                    tensor=differing,
                    **describe(differing, bits, processes, save_to),
                ), offloads
            if known is None:
                reference.append(bits[0])
            elif strange:
                name = first_difference(bits[0], known)
                assert name is not None
                return Deviation(
                    model=run.model,
                    process=number,
                    variant=" and ".join(strange),
                    step=index,
                    tensor=name,
                    elements=0,
                    size=0,
                    relative=0.0,
                ), offloads
    return None, offloads


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(zoo.MODELS), help="default: gpt2, bert, llama")
    parser.add_argument("--processes", type=int, default=100, help="of each variant and model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each model has the same in all rounds")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--ssd-dir", default=tempfile.gettempdir())
    parser.add_argument("--calm", action="store_true", help="make no load")
    parser.add_argument("--save-to", metavar="DIRECTORY", default=".", help="where deviating tensors are saved")
    parser.add_argument("--json", metavar="PATH")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse_arguments(arguments)
    os.environ.update(ENVIRONMENT)
    importlib.import_module("ssdtrain_fx.compiler.inductor")  # and Inductor: once, not in each process
    console = Console()
    sizes = {name: getattr(chosen, name) for name in ("layers", "hidden", "batch", "sequence", "vocab", "dropout")}
    options = {"policy": "all", "min_tensor_bytes": 0, "ssd_dir": chosen.ssd_dir}
    deviations: list[Deviation] = []
    rows: list[dict[str, Any]] = []
    with contextlib.nullcontext() if chosen.calm else busy_machine(chosen.ssd_dir):
        for model in chosen.model or ["gpt2", "bert", "llama"]:
            run = Run(model=model, optimizer="adamw", seed=chosen.seed, dtype=chosen.dtype, options=options, **sizes)
            reference: list[Bits] = []
            found: list[Deviation] = []
            offloads = 0
            began_s = time.perf_counter()
            for number in range(chosen.processes):
                path = None if found else Path(chosen.save_to) / f"same_bits_{model}.npz"
                deviation, moved = train_round(run, number, chosen.steps, reference, path)
                offloads += moved
                console.print(f"{model}, round {number + 1} of {chosen.processes}", style="dim", highlight=False)
                if deviation is not None:
                    found.append(deviation)
                    console.print(f"{deviation}", highlight=False)
            rows.append(
                {
                    "model": model,
                    "processes": chosen.processes,
                    "steps": chosen.steps,
                    "offloads": offloads,
                    "deviations": len(found),
                    "seconds": time.perf_counter() - began_s,
                }
            )
            deviations += found
    table = Table(title=f"{', '.join(VARIANTS)} side by side, torch {torch.__version__}")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{value:,.0f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    if chosen.json:
        written = {"results": rows, "deviations": [dataclasses.asdict(deviation) for deviation in deviations]}
        Path(chosen.json).write_text(json.dumps(written, indent=1))
    return 1 if deviations else 0


if __name__ == "__main__":
    sys.exit(main())
