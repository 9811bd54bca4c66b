"""Lightning and Fabric, with a module that the program compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import BATCH, EVERYTHING, Text, Trained, compare, parameters_of
from torch import Tensor, nn

import ssdtrain_fx


@pytest.fixture(autouse=True)
def _lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning replaces ``torch.compile`` when it is imported. The other tests get the original back."""
    original = torch.compile
    pytest.importorskip("lightning", reason="lightning is not installed")
    import lightning.fabric.wrappers as wrappers

    replacement = wrappers._capture_compile_kwargs(original)
    torch.compile = original
    monkeypatch.setattr(torch, "compile", replacement)


pytestmark = [
    pytest.mark.usefixtures("one_thread", "plain_kernels"),
    pytest.mark.filterwarnings("ignore"),
]


def make_module() -> Any:
    """A Lightning module that predicts the next byte. Every call returns the same weights."""
    from lightning import LightningModule

    class NextByte(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256))
            self.losses: list[float] = []

        def forward(self, tokens: Tensor) -> Tensor:
            logits = self.layers(tokens[:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            return self(batch["input_ids"])

        def on_train_batch_end(self, outputs: Any, *_: object) -> None:
            self.losses.append(outputs["loss"].item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    return NextByte()


def options_of(how: str, backend: str) -> dict[str, Any]:
    """Arguments of ``torch.compile``."""
    if backend != "ssdtrain" or how == "options":
        return {"backend": backend, "options": EVERYTHING if backend == "ssdtrain" else None}
    if how == "enable":
        ssdtrain_fx.enable(**EVERYTHING)
        return {"backend": backend}
    return {"backend": ssdtrain_fx.backend(ssdtrain_fx.OffloadConfig(**EVERYTHING))}


def loader() -> Any:
    return torch.utils.data.DataLoader(Text(8), batch_size=BATCH)


def test_a_compiled_lightning_module(tmp_path: Path) -> None:
    from lightning import Trainer

    def train(backend: str) -> Trained:
        module = make_module()
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(torch.compile(module, **options_of("options", backend)), loader())
        return Trained(module.losses, parameters_of(module))

    compare(train)


@pytest.mark.parametrize(
    "how", ["options", *(pytest.param(how, marks=pytest.mark.slow) for how in ("enable", "value"))]
)
def test_fabric_compiles_again_with_the_same_arguments(how: str) -> None:
    """Fabric unwraps a compiled module, sets it up, and compiles it with a deep copy of what it was compiled with."""
    from lightning import Fabric

    def train(backend: str) -> Trained:
        fabric = Fabric(accelerator="cpu", devices=1)
        module = make_module()
        compiled, optimizer = fabric.setup(
            torch.compile(module, **options_of(how, backend)), module.configure_optimizers()
        )
        losses: list[float] = []
        for batch in loader():
            loss = compiled(batch["input_ids"])
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return Trained(losses, parameters_of(module))

    compare(train)
