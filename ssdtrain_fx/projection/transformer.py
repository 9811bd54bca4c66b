"""Transformers of any size, as one GPU sees them: what tensor parallelism gives to other GPUs is left out.

The layers are those of Megatron-LM (GPT, BERT, T5) and of Llama: the same saved tensors, and the same operators but for
the collectives between GPUs, whose time is counted elsewhere. Modules have no weights worth keeping: they are made
under FakeTensorMode, to be traced.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from ssdtrain_fx.errors import ConfigError

Family = Literal["gpt", "bert", "t5", "llama"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A transformer.

    Raises:
        ConfigError: a size does not divide another one that it must divide.
    """

    family: Family
    layers: int
    """T5: of encoder and decoder together. The decoder has half of them, rounded down."""
    hidden: int
    heads: int
    kv_heads: int
    """Fewer than ``heads`` with grouped queries."""
    ffn: int
    """Width of the feed-forward network: of each of its two inputs for Llama."""
    vocab: int
    sequence: int
    """Tokens of one sample."""
    tied: bool = True
    """The head shares the weight of the embedding."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for what, whole, part in (("hidden", self.hidden, self.heads), ("heads", self.heads, self.kv_heads)):
            if whole % part:
                raise ConfigError(f"{what} is {whole}, which {part} does not divide: a head has no whole size.")

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def is_gated(self) -> bool:
        return self.family == "llama"

    @property
    def decoder_layers(self) -> int:
        """Layers with cross-attention."""
        return self.layers // 2 if self.family == "t5" else 0

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one layer, without cross-attention."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return attention + (3 if self.is_gated else 2) * self.hidden * self.ffn

    @property
    def embedding_parameters(self) -> int:
        return (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Of all matrices: what counts in sizes and FLOPs."""
        cross = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return self.layers * self.layer_parameters + self.decoder_layers * cross + self.embedding_parameters


def flops_per_token(shape: Shape) -> float:
    """Of forward and backward: 6 per parameter of a matrix, and 12 s h per layer for attention, half if causal
    (Narayanan et al., 2021; Chowdhery et al., 2022)."""
    causal = 0.5 if shape.family in ("gpt", "llama") else 1.0
    head = shape.vocab * shape.hidden
    matrices = shape.parameters - shape.embedding_parameters + head
    return 6.0 * matrices + causal * 12.0 * shape.layers * shape.sequence * shape.hidden


def share(shape: Shape, tensor_parallel: int) -> Shape:
    """Check that ``tensor_parallel`` GPUs can share a layer. Raises ConfigError."""
    fits = tensor_parallel >= 1 and shape.heads % tensor_parallel == shape.ffn % tensor_parallel == 0
    if not fits or (shape.kv_heads % tensor_parallel and tensor_parallel % shape.kv_heads):
        raise ConfigError(
            f"{tensor_parallel} GPUs cannot share a layer with {shape.heads} heads, {shape.kv_heads} of keys and "
            f"values, and a feed-forward width of {shape.ffn}: these must be multiples of it."
        )
    return shape


class RmsNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Its share of the heads, with rotary positions for Llama."""

    def __init__(self, shape: Shape, parallel: int, *, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.heads, self.size = shape.heads // parallel, shape.head_size
        self.kv_heads = max(1, shape.kv_heads // parallel)
        self.causal, self.cross, self.rotates = causal, cross, shape.is_gated
        bias = not shape.is_gated
        kv_width = 2 * self.kv_heads * self.size
        self.query = nn.Linear(shape.hidden, self.heads * self.size + (0 if cross else kv_width), bias=bias)
        self.key_value = nn.Linear(shape.hidden, kv_width, bias=bias) if cross else None
        self.out = nn.Linear(self.heads * self.size, shape.hidden, bias=bias)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        width = self.kv_heads * self.size
        if self.key_value is not None:
            assert memory is not None
            q, (k, v) = self.query(x), self.key_value(memory).split(width, -1)
        else:
            q, k, v = self.query(x).split([self.heads * self.size, width, width], -1)
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in (q, k, v))
        if self.rotates:
            q, k = self._rotate(q), self._rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.kv_heads != self.heads)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor) -> Tensor:
        half = self.size // 2
        angles = torch.outer(torch.arange(x.shape[2]).float(), torch.arange(half).float().neg().div(half).exp())
        cos, sin = (torch.cat((t, t), -1).to(x.dtype) for t in (angles.cos(), angles.sin()))
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class FeedForward(nn.Module):
    def __init__(self, shape: Shape, parallel: int) -> None:
        super().__init__()
        self.is_gated, width = shape.is_gated, shape.ffn // parallel
        self.up = nn.Linear(shape.hidden, width * (2 if self.is_gated else 1), bias=not self.is_gated)
        self.down = nn.Linear(width, shape.hidden, bias=not self.is_gated)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_gated:
            return self.down(F.gelu(self.up(x)))
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """Norms come first, as in GPT and Llama; in BERT they come last."""

    def __init__(self, shape: Shape, parallel: int, *, cross: bool = False) -> None:
        super().__init__()
        norm = RmsNorm if shape.is_gated else nn.LayerNorm
        is_decoder = shape.family in ("gpt", "llama") or cross
        self.parts = nn.ModuleList([Attention(shape, parallel, causal=is_decoder)])
        if cross:
            self.parts.append(Attention(shape, parallel, causal=False, cross=True))
        self.parts.append(FeedForward(shape, parallel))
        self.norms = nn.ModuleList(norm(shape.hidden) for _ in self.parts)
        self.norm_last, self.dropout = shape.family == "bert", shape.dropout

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        for part, norm in zip(self.parts, self.norms, strict=True):
            arguments = (memory,) if getattr(part, "cross", False) else ()
            y = F.dropout(part(x if self.norm_last else norm(x), *arguments), self.dropout)
            x = norm(x + y) if self.norm_last else x + y
        return x


class Transformer(nn.Module):
    """The loss of next tokens, or of masked ones.

    Args:
        with_head: False: the first stage of a pipeline, which ends after its layers.
        recompute: backward computes each layer again (``torch.utils.checkpoint``).
    """

    def __init__(self, shape: Shape, parallel: int, *, with_head: bool = True, recompute: bool = False) -> None:
        super().__init__()
        share(shape, parallel)
        vocab = -(-shape.vocab // parallel)
        self.embedding = nn.Embedding(vocab, shape.hidden)
        self.position = None if shape.is_gated else nn.Parameter(torch.empty(shape.sequence, shape.hidden))
        self.layers = nn.ModuleList(Layer(shape, parallel) for _ in range(shape.layers - shape.decoder_layers))
        self.decoder = nn.ModuleList(Layer(shape, parallel, cross=True) for _ in range(shape.decoder_layers))
        if recompute:
            for layer in (*self.layers, *self.decoder):
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        self.norm = RmsNorm(shape.hidden) if shape.is_gated else nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, vocab, bias=False) if with_head else None
        if self.head is not None and shape.tied:
            self.head.weight = self.embedding.weight
        self.dropout = shape.dropout

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self._embed(tokens)
        for layer in self.layers:
            x = layer(x)
        if self.decoder:
            memory, x = x, self._embed(labels)
            for layer in self.decoder:
                x = layer(x, memory)
        if self.head is None:
            return x
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return F.dropout(x if self.position is None else x + self.position, self.dropout)
