"""The Trainer of transformers, with the backend named in its arguments and by ``model.compile``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import EVERYTHING, Text, Trained, compare, make_model, parameters_of, recording

import ssdtrain_fx

pytestmark = [
    pytest.mark.usefixtures("accelerate", "one_thread", "plain_kernels"),
    pytest.mark.filterwarnings("ignore"),
]


def make_trainer(*args: Any, **kwargs: Any) -> Any:
    import transformers

    return recording(transformers.Trainer)(*args, **kwargs)


def arguments(folder: Path, **others: Any) -> Any:
    import transformers

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "seed": 0,
    }
    return transformers.TrainingArguments(**{**settings, **others})


def logged(trainer: Any) -> list[dict[str, float]]:
    """What was logged, except times."""
    timed = ("runtime", "per_second", "flos")
    return [
        {name: value for name, value in line.items() if not any(part in name for part in timed)}
        for line in trainer.state.log_history
    ]


def compiled_by(how: str, backend: str, model: Any, options: dict[str, Any] = EVERYTHING) -> dict[str, Any]:
    """Let the Trainer compile ``model``, or compile it now. Returns arguments of the Trainer."""
    if how == "argument":
        ssdtrain_fx.enable(**options)
        return {"torch_compile": True, "torch_compile_backend": backend}
    model.compile(backend=backend, options=options if backend == "ssdtrain" else None)
    return {}


def train(trainer: Any, **options: Any) -> Trained:
    trainer.train(**options)
    return Trained(trainer.losses, parameters_of(trainer.model), logged(trainer))


@pytest.mark.parametrize("how", ["argument", pytest.param("model.compile", marks=pytest.mark.slow)])
def test_accumulation_evaluation_checkpoint_and_resume(how: str, tmp_path: Path) -> None:
    """Four steps of two micro-batches with an evaluation after each; then again from the checkpoint after step 2."""

    def whole_and_resumed(backend: str) -> Trained:
        def trainer() -> Any:
            model = make_model()
            extra = compiled_by(how, backend, model)
            settings = arguments(
                tmp_path / backend,
                gradient_accumulation_steps=2,
                eval_strategy="steps",
                eval_steps=1,
                save_strategy="steps",
                save_steps=2,
                **extra,
            )
            return make_trainer(model, settings, train_dataset=Text(24), eval_dataset=Text(4, skip=24))

        whole = train(trainer())
        checkpoint = tmp_path / backend / "checkpoint-2"
        resumed = train(trainer(), resume_from_checkpoint=str(checkpoint))
        assert resumed.losses == whole.losses[4:]
        assert all(torch.equal(resumed.parameters[name], whole.parameters[name]) for name in whole.parameters)
        return whole

    compare(whole_and_resumed)
    from safetensors import safe_open

    with safe_open(tmp_path / "ssdtrain" / "checkpoint-4" / "model.safetensors", "pt") as saved:
        assert set(saved.keys()) <= make_model().state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["argument", "model.compile"])
def test_bf16(how: str, tmp_path: Path) -> None:
    def run(backend: str) -> Trained:
        model = make_model()
        settings = arguments(tmp_path, bf16=True, **compiled_by(how, backend, model))
        return train(make_trainer(model, settings, train_dataset=Text(8)))

    compare(run)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["argument", "model.compile"])
def test_gradient_checkpointing(how: str, tmp_path: Path) -> None:
    """What enters a layer has 8 KiB. The state of the random numbers, which checkpoints save too, has 5056 bytes."""

    def run(backend: str) -> Trained:
        model = make_model()
        compiled = compiled_by(how, backend, model, {**EVERYTHING, "min_tensor_bytes": 8 << 10})
        settings = arguments(tmp_path, activation_checkpointing=True, **compiled)
        return train(make_trainer(model, settings, train_dataset=Text(8)))

    compare(run)


@pytest.mark.slow
def test_checkpoints_that_transformers_keeps_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hooks copy what enters a layer to pinned memory, which is replaced here: torch needs a GPU for it."""
    empty = torch.empty

    def empty_unpinned(*arguments: Any, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        return empty(*arguments, **keywords)

    monkeypatch.setattr(torch, "empty", empty_unpinned)

    def run(backend: str) -> Trained:
        model = make_model()
        checkpoints = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}
        settings = arguments(tmp_path, **checkpoints, **compiled_by("argument", backend, model))
        return train(make_trainer(model, settings, train_dataset=Text(8)))

    compare(run)


@pytest.mark.slow
def test_low_rank_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def run(backend: str) -> Trained:
        adapters = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(make_model(), adapters)
        settings = arguments(tmp_path, **compiled_by("argument", backend, model))
        return train(make_trainer(model, settings, train_dataset=Text(8)))

    compare(run)


def test_without_enable_the_argument_is_refused(tmp_path: Path) -> None:
    """The reason for ``enable``. Where this fails, Accelerate takes any name, and the docs can be shortened."""
    settings = arguments(tmp_path, torch_compile=True, torch_compile_backend="ssdtrain")
    with pytest.raises(ValueError, match="'SSDTRAIN' is not a valid DynamoBackend"):
        make_trainer(make_model(), settings, train_dataset=Text(8))
