"""Fine-tune a Llama with LoRA adapters and the Trainer of transformers, and show what offloading does to its memory.

    pip install -e '.[demo,trainers]'
    python examples/finetune_trainer.py
    python examples/finetune_trainer.py --backend inductor    # the same without offloading

The text is the source code of Python's standard library, and the weights are random, so nothing is downloaded. To
fine-tune a model of yours, replace ``make_model`` and ``Text``; nothing else depends on them.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import ssdtrain_fx
from ssdtrain_fx.studies.process_memory import Course, peak_bytes, reset_peak, used_bytes
from ssdtrain_fx.units import format_bytes


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of the text, one token per byte."""

    def __init__(self, sequence: int) -> None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
        self.pieces = text[: len(text) // sequence * sequence].view(-1, sequence)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.pieces[index].long()
        return {"input_ids": tokens, "labels": tokens}


def make_model(layers: int, hidden: int, sequence: int) -> Any:
    """A Llama over bytes with LoRA adapters. Only the adapters are trained."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=sequence,
        use_cache=False,
    )
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), adapters)


class Memory(TrainerCallback):
    """The memory of every step but the first, which compiles, and the course of it over the last step."""

    def __init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.course = Course(self.device)
        self.idle_bytes = self.growth_bytes = 0

    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        reset_peak(self.device)
        self.idle_bytes = used_bytes(self.device)
        if state.global_step == state.max_steps - 1:
            self.course.__enter__()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step > 1:
            self.growth_bytes = max(self.growth_bytes, peak_bytes(self.device) - self.idle_bytes)
        if state.global_step == state.max_steps:
            self.course.__exit__()


def draw(course: Course, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    start_bytes = course.samples[0][1]
    axes.plot(*zip(*((ms, (size - start_bytes) / 2**20) for ms, size in course.samples), strict=True))
    axes.set(xlabel="ms of the last step", ylabel="MiB above its start")
    figure.savefig(path, dpi=120)
    print(f"Picture: {path.resolve()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ssdtrain", help="ssdtrain or inductor")
    parser.add_argument("--max-slowdown", type=float, default=0.1, help="share of the step time to trade for memory")
    parser.add_argument("--ssd-dir", default=None, help="directory on the SSD")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--output", type=Path, default=Path("finetuned"), help="directory for adapters and picture")
    chosen = parser.parse_args()

    ssdtrain_fx.enable(max_slowdown=chosen.max_slowdown, ssd_dir=chosen.ssd_dir)
    arguments = TrainingArguments(
        str(chosen.output),
        torch_compile=True,
        torch_compile_backend=chosen.backend,
        max_steps=chosen.steps,
        per_device_train_batch_size=chosen.batch,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
    )
    memory = Memory()
    trainer = Trainer(
        make_model(chosen.layers, chosen.hidden, chosen.sequence),
        arguments,
        train_dataset=Text(chosen.sequence),
        callbacks=[memory],
    )
    trainer.train()
    trainer.save_model()

    statistics = ssdtrain_fx.statistics()
    print(f"A step adds {format_bytes(memory.growth_bytes)} at its peak to the memory of the process.")
    print(f"Written: {format_bytes(statistics.bytes_written)}, read: {format_bytes(statistics.bytes_read)}.")
    if chosen.backend == "ssdtrain" and not statistics.offloads:
        print("Nothing was moved: see docs/troubleshooting.md, or allow more with --max-slowdown.")
    draw(memory.course, chosen.output / "memory.png")


if __name__ == "__main__":
    main()
