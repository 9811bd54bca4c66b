"""A model and text that train in a second, and a comparison of two trainings to the bit.

Trainers take seconds to import, and some change torch, so tests import them when they run.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from steps import settled_statistics
from torch import Tensor, nn
from torch.utils.data import Dataset

from ssdtrain_fx import Statistics, statistics
from ssdtrain_fx.testing import assert_same_bits

SEQUENCE = 32
BATCH = 2
EVERYTHING: dict[str, Any] = {"policy": "all", "min_tensor_bytes": 0}
"""With the default options, everything in such a small model is below ``min_tensor_bytes``, and nothing moves."""


class Text(Dataset[dict[str, Tensor]]):
    """The bytes of a file of the standard library, in pieces of ``SEQUENCE``."""

    def __init__(self, count: int, *, skip: int = 0) -> None:
        text = Path(textwrap.__file__).read_bytes()[skip * SEQUENCE : (skip + count) * SEQUENCE]
        self.pieces = torch.tensor(list(text)).view(count, SEQUENCE)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def make_model() -> Any:
    """A Llama of one layer over bytes. Every call returns the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=SEQUENCE,
            use_cache=False,
        )
    )


def bytes_tokenizer() -> Any:
    """One token per byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=letters[0], eos_token=letters[1])


def recording(trainer_class: type) -> Any:
    """A subclass of a Trainer of transformers that keeps the loss of every micro-batch. Those in its log are means."""

    class Recording(trainer_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.losses: list[float] = []

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss.item())
            return loss

    return Recording


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a training leaves."""

    losses: list[float]
    parameters: dict[str, Tensor]
    logged: list[dict[str, float]] = dataclasses.field(default_factory=list)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def compare(train: Callable[[str], Trained]) -> Statistics:
    """Call ``train`` with ``"inductor"`` and ``"ssdtrain"``: the same bits, and only the second moves bytes.

    Returns the statistics of the second training.
    """
    expected, found, moved = _train(train, "inductor")[0], *_train(train, "ssdtrain")
    assert len(expected.losses) > 1
    assert len(set(expected.losses)) > 1
    assert found.losses == expected.losses
    assert found.logged == expected.logged
    assert_same_bits(found.parameters, expected.parameters)
    assert moved.bytes_written > 0
    assert settled_statistics().slots_in_use == 0
    return moved


def _train(train: Callable[[str], Trained], backend: str) -> tuple[Trained, Statistics]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    before = statistics()
    trained = train(backend)
    moved = statistics().since(before)
    assert (moved.offloads > 0) == (backend == "ssdtrain")
    return trained, moved
