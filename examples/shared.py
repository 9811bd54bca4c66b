"""What the examples share: text, options, training with the Trainer of transformers, and a picture of memory."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import ssdtrain_fx
from ssdtrain_fx.studies.process_memory import Course, peak_bytes, reset_peak, used_bytes
from ssdtrain_fx.units import format_bytes

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
VOCABULARY = 256
"""A token is a byte."""


def text_of(sequence: int) -> torch.Tensor:
    """The source code of Python's standard library, in rows of ``sequence`` bytes: real text that every machine has."""
    text = b"".join(path.read_bytes() for path in sorted(STANDARD_LIBRARY.glob("*.py")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tokens[: len(tokens) // sequence * sequence].view(-1, sequence)


def parse_arguments(description: str, **defaults: int) -> argparse.Namespace:
    """The options of an example. ``defaults`` are sizes, each of which becomes an option too."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--backend", default="ssdtrain", help="ssdtrain or inductor")
    parser.add_argument("--max-slowdown", type=float, default=0.1, help="share of the step time to trade for memory")
    parser.add_argument("--ssd-dir", default=None, help="directory on the SSD")
    parser.add_argument("--output", type=Path, default=Path("trained"), help="directory for the model and the picture")
    for name, default in {"steps": 10, **defaults}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


class Memory:
    """The memory of every step but the first, which compiles, and the course of it over the last step."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.course = Course(self.device)
        self.idle_bytes = self.growth_bytes = 0

    def step_begins(self, number: int) -> None:
        """Steps have numbers from 1."""
        reset_peak(self.device)
        self.idle_bytes = used_bytes(self.device)
        if number == self.steps:
            self.course.__enter__()

    def step_ends(self, number: int) -> None:
        if number > 1:
            self.growth_bytes = max(self.growth_bytes, peak_bytes(self.device) - self.idle_bytes)
        if number == self.steps:
            self.course.__exit__()

    def report(self, backend: str, directory: Path) -> None:
        """Print what the steps took, and draw the last one."""
        statistics = ssdtrain_fx.statistics()
        print(f"A step adds {format_bytes(self.growth_bytes)} at its peak to the memory of the process.")
        print(f"Written: {format_bytes(statistics.bytes_written)}, read: {format_bytes(statistics.bytes_read)}.")
        if backend == "ssdtrain" and not statistics.offloads:
            print("Nothing was moved: see docs/troubleshooting.md, or allow more with --max-slowdown.")
        directory.mkdir(parents=True, exist_ok=True)
        self._draw(directory / "memory.png")

    def _draw(self, path: Path) -> None:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
        start_bytes = self.course.samples[0][1]
        axes.plot(*zip(*((ms, (size - start_bytes) / 2**20) for ms, size in self.course.samples), strict=True))
        axes.set(xlabel="ms of the last step", ylabel="MiB above its start")
        figure.savefig(path, dpi=120)
        print(f"Picture: {path.resolve()}")


class MemoryOfSteps(TrainerCallback):
    """Tells ``memory`` where the steps of a Trainer begin and end."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        self.memory.step_begins(state.global_step + 1)

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        self.memory.step_ends(state.global_step)


def train(model: Any, dataset: Any, chosen: argparse.Namespace, *, learning_rate: float = 1e-3) -> None:
    """Train with the Trainer, which shows a progress bar, and save what it has learned."""
    ssdtrain_fx.enable(max_slowdown=chosen.max_slowdown, ssd_dir=chosen.ssd_dir)
    arguments = TrainingArguments(
        str(chosen.output),
        torch_compile=True,
        torch_compile_backend=chosen.backend,
        max_steps=chosen.steps,
        per_device_train_batch_size=chosen.batch,
        learning_rate=learning_rate,
        logging_steps=1,
        report_to="none",
    )
    memory = Memory(chosen.steps)
    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[MemoryOfSteps(memory)])
    trainer.train()
    trainer.save_model()
    memory.report(chosen.backend, chosen.output)
