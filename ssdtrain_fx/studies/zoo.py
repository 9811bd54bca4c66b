"""Small models with a scalar loss, for the demo, the benchmark and the tests. Nothing is downloaded.

    module, make_batch = build("gpt2", layers=4, hidden=256, batch=8, sequence=512, vocab=2048)
    loss = module(*make_batch(torch.Generator().manual_seed(0)))

Every module returns only its loss, because logits that the caller holds cannot leave memory. Weights are drawn from
torch's global generator, so `torch.manual_seed` before `build` fixes them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,  # pyright: ignore[reportUnknownVariableType]
    create_selective_checkpoint_contexts,  # pyright: ignore[reportUnknownVariableType]
)

from ssdtrain_fx.studies.own_models import OwnModelError, is_own_model, load_model_function

Batch = tuple[Any, ...]
MakeBatch = Callable[[torch.Generator], Batch]

HEAD_DIM = 64
PATCH = 16
CLASSES = 10
IGNORE = -100
LAYER_CLASSES = frozenset(
    {
        "GPT2Block",
        "LlamaDecoderLayer",
        "MixtralDecoderLayer",
        "BertLayer",
        "T5Block",
        "ViTLayer",
        "Mamba2Block",
        "ResNetBottleNeckLayer",
        "TransformerEncoderLayer",
        "ResidualBlock",
    }
)
"""What counts as one layer in these models."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Size of a model and of its batches."""

    layers: int = 4
    """For ``t5``, half of them are in the encoder. ``resnet`` has four stages, and at least one layer in each."""
    hidden: int = 256
    """Hidden size; for ``conv``, the number of channels, and for ``resnet`` those of its last stage. Attention heads
    have size 64, so use a multiple of 64."""
    batch: int = 4
    sequence: int = 256
    """Tokens per example; for images, number of patches (``vit``, ``resnet``) or pixels (``conv``), rounded down to a
    square."""
    vocab: int = 1024
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "batch", "sequence", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; expected 0 <= dropout < 1.")

    @property
    def heads(self) -> int:
        if self.hidden % HEAD_DIM:
            raise ValueError(f"hidden is {self.hidden}; expected a multiple of {HEAD_DIM} (one attention head each).")
        return self.hidden // HEAD_DIM

    @property
    def side(self) -> int:
        """Edge of a square image of about ``sequence`` positions."""
        return math.isqrt(self.sequence)


def build(
    name: str,
    *,
    layers: int = 4,
    hidden: int = 256,
    batch: int = 4,
    sequence: int = 256,
    vocab: int = 1024,
    dropout: float = 0.0,
) -> tuple[nn.Module, MakeBatch]:
    """Build the model `name` in training mode, and a function that makes a batch for it from a generator.

    `package.module:function` is a model of the user, and its one batch (`own_models.py`). It has no sizes.

    Raises:
        ValueError: the name is unknown (the message lists the valid ones) or a size is out of range.
        ModuleNotFoundError: the model comes from transformers, which is not installed.
    """
    if is_own_model(name):
        model, inputs = load_model_function(name)()
        if not isinstance(model, nn.Module):
            raise OwnModelError(f"{name} returned a {type(model).__name__} as model; expected a torch.nn.Module.")
        return model, lambda generator: inputs
    if name not in MODELS:
        raise ValueError(f"Unknown model {name!r}. Valid models: {', '.join(MODELS)}.")
    size = Size(layers=layers, hidden=hidden, batch=batch, sequence=sequence, vocab=vocab, dropout=dropout)
    module, make_batch = MODELS[name](size)
    return module.train(), make_batch


def find_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of one of these models. Raises ValueError where there are none."""
    layers = [layer for layer in module.modules() if type(layer).__name__ in LAYER_CLASSES]
    if not layers:
        raise ValueError(f"Found no layer; expected one of {', '.join(sorted(LAYER_CLASSES))}.")
    return layers


def checkpoint_every_layer(module: nn.Module, *, selective: bool = False) -> int:
    """Let backward compute each layer again; returns how many there are.

    ``selective`` checkpoints save what matrix products, attention and convolutions compute, so only the cheap ops
    between them run again.

    The switch that transformers has for this does not compile as one graph for T5.
    """
    layers = find_layers(module)
    options = {"context_fn": _save_expensive_ops} if selective else {}
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **options)
    return len(layers)


def _save_expensive_ops() -> Any:
    aten = torch.ops.aten
    expensive = [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._grouped_mm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    ]
    return create_selective_checkpoint_contexts(expensive)


def text_batches(*, batch: int, sequence: int) -> MakeBatch:
    """Make batches of real text for a causal language model with a vocabulary of 256: one token per byte.

    The text is the source code of Python's standard library, which is on every machine.
    """
    text = _standard_library_source()
    if len(text) <= sequence:
        raise ValueError(f"The text has {len(text)} bytes; expected more than sequence, which is {sequence}.")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def make_batch(generator: torch.Generator) -> Batch:
        starts = torch.randint(0, len(tokens) - sequence, (batch,), generator=generator)
        return (torch.stack([tokens[start : start + sequence] for start in map(int, starts)]).long(),)

    return make_batch


def _standard_library_source() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


class CausalLanguageModel(nn.Module):
    """Loss for predicting each token from the tokens before it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORE)  # as transformers does: cutting the logits would copy them
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


class MaskedLanguageModel(nn.Module):
    """Loss for predicting masked tokens; the labels of all other tokens are -100."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


class SequenceToSequence(nn.Module):
    """Loss for predicting each target token from the source and the target tokens before it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        logits = self.model(input_ids=source, decoder_input_ids=target[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


class ImageClassifier(nn.Module):
    """Classification loss of a model that returns logits, or an object with ``logits``, for a batch of images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        output = self.model(images)
        logits = output if isinstance(output, Tensor) else output.logits
        return F.cross_entropy(logits, labels)


class Regression(nn.Module):
    """Mean squared error of a model whose output has the shape of its input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.model(inputs), targets)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


def _gpt2(size: Size) -> tuple[nn.Module, MakeBatch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocab,
        n_positions=size.sequence,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        embd_pdrop=size.dropout,
        attn_pdrop=size.dropout,
        resid_pdrop=size.dropout,
        **_COMMON,
    )
    return CausalLanguageModel(_hugging_face(GPT2LMHeadModel, config)), _tokens(size)


def _llama(size: Size) -> tuple[nn.Module, MakeBatch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocab,
        max_position_embeddings=size.sequence,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 8 // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        attention_dropout=size.dropout,
        **_COMMON,
    )
    return CausalLanguageModel(_hugging_face(LlamaForCausalLM, config)), _tokens(size)


def _mixtral(size: Size) -> tuple[nn.Module, MakeBatch]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=size.vocab,
        max_position_embeddings=size.sequence,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_dropout=size.dropout,
        **_COMMON,
    )
    config._experts_implementation = "grouped_mm"  # the loop over the experts that are hit breaks the graph
    return CausalLanguageModel(_hugging_face(MixtralForCausalLM, config)), _tokens(size)


def _bert(size: Size) -> tuple[nn.Module, MakeBatch]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=size.vocab,
        max_position_embeddings=size.sequence,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
        **_COMMON,
    )
    mask_token, masked_share = 0, 0.15

    def make_batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(1, size.vocab, (size.batch, size.sequence), generator=generator)
        masked = torch.rand(tokens.shape, generator=generator) < masked_share
        return tokens.masked_fill(masked, mask_token), tokens.masked_fill(~masked, IGNORE)

    return MaskedLanguageModel(_hugging_face(BertForMaskedLM, config)), make_batch


def _t5(size: Size) -> tuple[nn.Module, MakeBatch]:
    from transformers import T5Config, T5ForConditionalGeneration

    half = max(1, size.layers // 2)
    config = T5Config(
        vocab_size=size.vocab,
        d_model=size.hidden,
        d_kv=HEAD_DIM,
        d_ff=4 * size.hidden,
        num_layers=half,
        num_decoder_layers=half,
        num_heads=size.heads,
        dropout_rate=size.dropout,
        **_COMMON,
    )

    def make_batch(generator: torch.Generator) -> Batch:
        source = torch.randint(0, size.vocab, (size.batch, size.sequence), generator=generator)
        target = torch.randint(0, size.vocab, (size.batch, size.sequence + 1), generator=generator)
        return source, target

    return SequenceToSequence(_hugging_face(T5ForConditionalGeneration, config)), make_batch


def _vit(size: Size) -> tuple[nn.Module, MakeBatch]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=PATCH * size.side,
        patch_size=PATCH,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
        id2label={index: str(index) for index in range(CLASSES)},
    )
    return ImageClassifier(_hugging_face(ViTForImageClassification, config)), _images(size, PATCH * size.side)


def _mamba(size: Size) -> tuple[nn.Module, MakeBatch]:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        state_size=HEAD_DIM,
        head_dim=HEAD_DIM,
        num_heads=2 * size.heads,
        n_groups=1,
        chunk_size=min(HEAD_DIM, size.sequence),
        num_hidden_layers=size.layers,
        **_COMMON,
    )
    return CausalLanguageModel(Mamba2ForCausalLM(config)), _tokens(size)


def _resnet(size: Size) -> tuple[nn.Module, MakeBatch]:
    from transformers import ResNetConfig, ResNetForImageClassification

    stages = 4
    config = ResNetConfig(
        embedding_size=max(1, size.hidden // 16),
        hidden_sizes=[max(4, size.hidden >> (stages - 1 - stage)) for stage in range(stages)],
        depths=[max(1, (size.layers + stage) // stages) for stage in range(stages)],
        id2label={index: str(index) for index in range(CLASSES)},
    )
    return ImageClassifier(ResNetForImageClassification(config)), _images(size, PATCH * size.side)


def _encoder(size: Size) -> tuple[nn.Module, MakeBatch]:
    layer = nn.TransformerEncoderLayer(
        size.hidden, size.heads, 4 * size.hidden, dropout=size.dropout, batch_first=True, activation="gelu"
    )
    # TransformerEncoder initialises all layers as copies of one layer. Independent weights are more realistic.
    encoder = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
    for parameter in encoder.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)

    def make_batch(generator: torch.Generator) -> Batch:
        shape = (size.batch, size.sequence, size.hidden)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    return Regression(encoder), make_batch


def _conv(size: Size) -> tuple[nn.Module, MakeBatch]:
    model = nn.Sequential(
        nn.Conv2d(3, size.hidden, 3, padding=1, bias=False),
        nn.BatchNorm2d(size.hidden),
        nn.ReLU(),
        *(ResidualBlock(size.hidden) for _ in range(size.layers)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(size.hidden, CLASSES),
    )
    return ImageClassifier(model), _images(size, size.side)


def _tokens(size: Size) -> MakeBatch:
    def make_batch(generator: torch.Generator) -> Batch:
        return (torch.randint(0, size.vocab, (size.batch, size.sequence), generator=generator),)

    return make_batch


def _images(size: Size, side: int) -> MakeBatch:
    def make_batch(generator: torch.Generator) -> Batch:
        images = torch.randn(size.batch, 3, side, side, generator=generator)
        return images, torch.randint(0, CLASSES, (size.batch,), generator=generator)

    return make_batch


# The default special tokens of transformers are outside a small vocabulary.
_COMMON: Mapping[str, Any] = {
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def _hugging_face(model_class: Any, config: Any) -> nn.Module:
    config._attn_implementation = "sdpa"
    return model_class(config)


MODELS: Mapping[str, Callable[[Size], tuple[nn.Module, MakeBatch]]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "t5": _t5,
    "llama": _llama,
    "mixtral": _mixtral,
    "vit": _vit,
    "mamba": _mamba,
    "resnet": _resnet,
    "encoder": _encoder,
    "conv": _conv,
}
"""Models by name: the first eight come from transformers (extra ``hf``), the others from torch alone."""
