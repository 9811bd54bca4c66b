"""Train with DeepSpeed under plain Inductor and under ssdtrain, and compare to the bit. One process per rank.

    python -m torch.distributed.run --nproc-per-node 2 tests/trainers/deepspeed_training.py --stages 1 2 3

DeepSpeed's extensions in C++ are not used: each takes a minute to build.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from small_training import BATCH, EVERYTHING, Text, Trained, compare, make_model, parameters_of, recording

import ssdtrain_fx

STEPS = 8
"""Micro-batches of each rank. The optimizer steps after every second one."""


def settings(stage: int, *, bfloat16: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **({"bf16": {"enabled": True}} if bfloat16 else {}),
    }


def train_engine(backend: str, stage: int, *, bfloat16: bool) -> Trained:
    """A loop over DeepSpeed's engine, compiled by `engine.compile`."""
    import deepspeed

    model = make_model()
    config = settings(stage, bfloat16=bfloat16)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.compile(backend=backend, compile_kwargs={"options": EVERYTHING} if backend == "ssdtrain" else {})
    losses: list[float] = []
    rank = torch.distributed.get_rank()
    for batch in torch.utils.data.DataLoader(Text(STEPS * BATCH, skip=STEPS * BATCH * rank), batch_size=BATCH):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return Trained(losses, whole_parameters(engine.module, stage))


def train_trainer(backend: str, stage: int, *, bfloat16: bool) -> Trained:
    """The Trainer of transformers with DeepSpeed, and the backend in its arguments."""
    import transformers

    ssdtrain_fx.enable(**EVERYTHING)
    arguments = transformers.TrainingArguments(
        output_dir="trainer",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        bf16=bfloat16,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        max_steps=STEPS // 2,
        learning_rate=1e-2,
        torch_compile=True,
        torch_compile_backend=backend,
        deepspeed=settings(stage, bfloat16=bfloat16),
    )
    trainer = recording(transformers.Trainer)(make_model(), arguments, train_dataset=Text(4 * STEPS * BATCH))
    trainer.train()
    return Trained(trainer.losses, whole_parameters(trainer.model_wrapped.module, stage))


def whole_parameters(module: Any, stage: int) -> dict[str, torch.Tensor]:
    """All of each parameter. In stage 3, a rank holds a part of it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
        return parameters_of(module)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[3])
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--trainer", action="store_true", help="through the Trainer of transformers")
    chosen = parser.parse_args()
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo carries the messages
    torch._inductor.config.cpp.simdlen = 1  # kernels without vector instructions, which compile in half the time
    train = train_trainer if chosen.trainer else train_engine
    for stage in chosen.stages:
        moved = compare(lambda backend, stage=stage: train(backend, stage, bfloat16=chosen.bfloat16))
        sys.stdout.write(f"stage {stage}: equal, {moved.offloads} tensors moved\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
