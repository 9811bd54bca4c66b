"""Supervised fine-tuning with TRL: both losses, and TRL's own offloading at the same time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import (
    BATCH,
    EVERYTHING,
    SEQUENCE,
    Text,
    Trained,
    bytes_tokenizer,
    compare,
    make_model,
    parameters_of,
    recording,
)

import ssdtrain_fx

pytestmark = [
    pytest.mark.usefixtures("one_thread", "plain_kernels"),
    pytest.mark.filterwarnings("ignore"),
]


def train(backend: str, folder: Path, **others: Any) -> Trained:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets, which TRL needs, is not installed")
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
    trainer = recording(trl.SFTTrainer)(
        make_model(), settings, train_dataset=pieces, processing_class=bytes_tokenizer()
    )
    trainer.train()
    return Trained(trainer.losses, parameters_of(trainer.model))


@pytest.mark.parametrize("loss_type", ["nll", pytest.param("dft", marks=pytest.mark.slow)])
def test_losses(loss_type: str, tmp_path: Path) -> None:
    compare(lambda backend: train(backend, tmp_path, loss_type=loss_type))


@pytest.mark.slow
def test_both_offloaders_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's hooks get what compiled code saves. The tokens among it are tensors of 8 bytes on the CPU: passed on.

    TRL's offloader needs a GPU for its streams. Here it runs without streams, and finds every tensor on the CPU.
    """
    pytest.importorskip("trl", reason="trl is not installed")
    from trl.models.activation_offloading import OffloadActivations, get_act_offloading_ctx_manager

    packed: list[tuple[int, str]] = []

    def without_streams(model: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
            context = get_act_offloading_ctx_manager(model, use_pin_memory=False, use_streams=False)
        pack = context.pack_hook

        @torch.compiler.disable
        def recording_pack(saved: torch.Tensor) -> Any:
            packed.append((saved.nbytes, saved.device.type))
            return pack(saved)

        assert isinstance(context, OffloadActivations)
        context.pack_hook = recording_pack
        return context

    monkeypatch.setattr("trl.trainer.sft_trainer.get_act_offloading_ctx_manager", without_streams)
    compare(lambda backend: train(backend, tmp_path, activation_offloading=True))
    assert (8, "cpu") in packed
