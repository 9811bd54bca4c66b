"""Supervised fine-tuning with TRL: both losses, and TRL's own offloading at the same time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_training import BATCH, EVERYTHING, SEQUENCE, Text, Trained, compare, make_model, parameters_of

import ssdtrain_fx

trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets, which TRL needs, is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread", "plain_kernels"),
    pytest.mark.filterwarnings("ignore"),
]


class SFTTrainer(trl.SFTTrainer):
    """Records the loss of every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def bytes_tokenizer() -> Any:
    """One token per byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=letters[0], eos_token=letters[1])


def train(backend: str, folder: Path, **others: Any) -> Trained:
    ssdtrain_fx.enable(**EVERYTHING)
    settings = trl.SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=BATCH,
        max_steps=3,
        save_strategy="no",
        learning_rate=1e-2,
        max_length=SEQUENCE,
        gradient_checkpointing=False,
        torch_compile=True,
        torch_compile_backend=backend,
        **others,
    )
    pieces = datasets.Dataset.from_dict({"input_ids": Text(8).pieces.tolist()})
    trainer = SFTTrainer(make_model(), settings, train_dataset=pieces, processing_class=bytes_tokenizer())
    trainer.train()
    return Trained(trainer.losses, parameters_of(trainer.model))


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_losses(loss_type: str, tmp_path: Path) -> None:
    compare(lambda backend: train(backend, tmp_path, loss_type=loss_type))


def test_both_offloaders_at_once(tmp_path: Path) -> None:
    """TRL's hooks get what compiled code saves: tokens of 8 bytes on the CPU, which they pass on unchanged."""
    alone = compare(lambda backend: train(backend, tmp_path))
    both = compare(lambda backend: train(backend, tmp_path, activation_offloading=True))
    assert both.bytes_written == alone.bytes_written
