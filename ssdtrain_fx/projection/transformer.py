"""Transformers of any size, as one GPU sees them: what parallelism gives to other GPUs is left out.

The layers are those of Megatron-LM (GPT, BERT, T5) and of Llama, with experts if there are any, as in Mixtral: the
same saved tensors, and the same operators but for the collectives between GPUs, whose time is counted elsewhere. A
gather is a tensor that is repeated, so backward gathers again instead of keeping the result. Experts get equally many
tokens. Modules have no weights worth keeping: they are made under FakeTensorMode, to be traced.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.projection.parallelism import Parallelism

Family = Literal["gpt", "bert", "t5", "llama"]
checkpoint: Any = torch_checkpoint.checkpoint  # pyright: ignore[reportUnknownVariableType]


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
    """Width of the feed-forward network: of each of its two inputs for Llama. With experts, that of one expert."""
    vocab: int
    sequence: int
    """Tokens of one sample."""
    tied: bool = True
    """The head shares the weight of the embedding."""
    dropout: float = 0.0
    experts: int = 0
    """Of each layer, of which a token visits ``experts_per_token``. 0: there is one feed-forward network."""
    experts_per_token: int = 0
    shared_experts: int = 0
    """What all tokens visit beside them."""

    def __post_init__(self) -> None:
        if self.experts and not (self.is_gated and 1 <= self.experts_per_token <= self.experts):
            raise ConfigError(
                f"A {self.family} whose tokens visit {self.experts_per_token} of {self.experts} experts is not known: "
                "only layers of llama have experts, and a token visits at least one of them."
            )
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
    def ffn_parameters(self) -> int:
        """Of one feed-forward network, or of one expert."""
        return (3 if self.is_gated else 2) * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one layer, without cross-attention."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        router = self.hidden * self.experts
        return attention + router + (self.experts + self.shared_experts or 1) * self.ffn_parameters

    @property
    def expert_parameters(self) -> int:
        """Of the experts of all layers that not every token visits."""
        return self.layers * self.experts * self.ffn_parameters

    @property
    def active_parameters(self) -> int:
        """Of the matrices that a token visits."""
        unused = self.layers * (self.experts - self.experts_per_token) * self.ffn_parameters
        return self.parameters - unused

    @property
    def embedding_parameters(self) -> int:
        return (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Of all matrices: what counts in sizes and FLOPs."""
        cross = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return self.layers * self.layer_parameters + self.decoder_layers * cross + self.embedding_parameters


def flops_per_token(shape: Shape) -> float:
    """Of forward and backward: 6 per parameter of a matrix that a token visits, and 12 s h per layer for attention,
    half if causal (Narayanan et al., 2021; Chowdhery et al., 2022)."""
    causal = 0.5 if shape.family in ("gpt", "llama") else 1.0
    head = shape.vocab * shape.hidden
    matrices = shape.active_parameters - shape.embedding_parameters + head
    return 6.0 * matrices + causal * 12.0 * shape.layers * shape.sequence * shape.hidden


def check_shares(shape: Shape, parallelism: Parallelism) -> None:
    """Raises ConfigError if ``parallelism`` cannot share a layer."""
    tensor = parallelism.tensor
    fits = shape.heads % tensor == shape.ffn % tensor == 0
    if not fits or (shape.kv_heads % tensor and tensor % shape.kv_heads):
        raise ConfigError(
            f"{tensor} GPUs cannot share a layer with {shape.heads} heads, {shape.kv_heads} of keys and values, and a "
            f"feed-forward width of {shape.ffn}: these must be multiples of it."
        )
    parts = parallelism.context * (tensor if parallelism.sequence_parallel else 1)
    if shape.sequence % parts:
        raise ConfigError(f"{parts} GPUs cannot share {shape.sequence} tokens: these must be a multiple of it.")
    if (shape.experts or 1) % parallelism.expert:
        raise ConfigError(
            f"{parallelism.expert} GPUs cannot share {shape.experts} experts: these must be a multiple of it."
        )


def gather_tokens(x: Tensor, parallelism: Parallelism) -> Tensor:
    """All tokens of the tensor-parallel GPUs, from those of this one: batch, tokens, hidden."""
    return _repeat(x, 1, parallelism.tensor) if parallelism.sequence_parallel else x


def _repeat(x: Tensor, dim: int, times: int) -> Tensor:
    """Stands for a gather, whose result is not saved but made again, as in Megatron-LM."""

    def gather(x: Tensor) -> Tensor:
        return torch.cat([x] * times, dim)

    return checkpoint(gather, x, use_reentrant=False)


def own_tokens(x: Tensor, parallelism: Parallelism) -> Tensor:
    """Those of this GPU, from all of them."""
    return x.chunk(parallelism.tensor, 1)[0].clone() if parallelism.sequence_parallel else x


class RmsNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Its share of the heads, with rotary positions for Llama."""

    def __init__(self, shape: Shape, parallelism: Parallelism, *, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.heads, self.size = shape.heads // parallelism.tensor, shape.head_size
        self.kv_heads = max(1, shape.kv_heads // parallelism.tensor)
        self.causal, self.cross, self.rotates = causal, cross, shape.is_gated
        self.context = parallelism.context
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
        if self.context > 1:  # the queries of this GPU, and the keys and values of all
            k, v = _repeat(k, 2, self.context), _repeat(v, 2, self.context)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.kv_heads != self.heads)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor) -> Tensor:
        half = self.size // 2
        angles = torch.outer(torch.arange(x.shape[2]).float(), torch.arange(half).float().neg().div(half).exp())
        cos, sin = (torch.cat((t, t), -1).to(x.dtype) for t in (angles.cos(), angles.sin()))
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class FeedForward(nn.Module):
    """Its share of a feed-forward network that is ``count`` times as wide as ``shape`` says."""

    def __init__(self, shape: Shape, parallelism: Parallelism, *, count: int = 1) -> None:
        super().__init__()
        self.is_gated, width = shape.is_gated, count * shape.ffn // parallelism.tensor
        self.up = nn.Linear(shape.hidden, width * (2 if self.is_gated else 1), bias=not self.is_gated)
        self.down = nn.Linear(width, shape.hidden, bias=not self.is_gated)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_gated:
            return self.down(F.gelu(self.up(x)))
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Its share of the experts, each of which gets equally many tokens. As many come from other GPUs as leave."""

    def __init__(self, shape: Shape, parallelism: Parallelism) -> None:
        super().__init__()
        self.per_token, self.count = shape.experts_per_token, shape.experts // parallelism.expert
        hidden, width = shape.hidden, shape.ffn // parallelism.tensor
        self.router = nn.Linear(hidden, shape.experts, bias=False)
        self.up = nn.Parameter(torch.empty(self.count, hidden, 2 * width))
        self.down = nn.Parameter(torch.empty(self.count, width, hidden))
        self.shared = FeedForward(shape, parallelism, count=shape.shared_experts) if shape.shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).float().softmax(-1).to(x.dtype).topk(self.per_token)
        order = chosen.flatten().argsort()[: chosen.numel() // self.count * self.count]
        rows = order // self.per_token
        gate, up = torch.bmm(tokens[rows].view(self.count, -1, x.shape[-1]), self.up).chunk(2, -1)
        made = torch.bmm(F.silu(gate) * up, self.down).flatten(0, 1) * weights.flatten()[order].unsqueeze(-1)
        mixed = torch.zeros_like(tokens).index_add(0, rows, made).view(x.shape)
        return mixed if self.shared is None else mixed + self.shared(x)


class Layer(nn.Module):
    """Norms come first, as in GPT and Llama; in BERT they come last."""

    def __init__(self, shape: Shape, parallelism: Parallelism, *, cross: bool = False) -> None:
        super().__init__()
        self.parallelism = parallelism
        norm = RmsNorm if shape.is_gated else nn.LayerNorm
        is_decoder = shape.family in ("gpt", "llama") or cross
        self.parts = nn.ModuleList([Attention(shape, parallelism, causal=is_decoder)])
        if cross:
            self.parts.append(Attention(shape, parallelism, causal=False, cross=True))
        self.parts.append((Experts if shape.experts else FeedForward)(shape, parallelism))
        self.norms = nn.ModuleList(norm(shape.hidden) for _ in self.parts)
        self.norm_last, self.dropout = shape.family == "bert", shape.dropout

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        for part, norm in zip(self.parts, self.norms, strict=True):
            inputs = [x if self.norm_last else norm(x), *((memory,) if getattr(part, "cross", False) else ())]
            y = part(*(gather_tokens(one, self.parallelism) for one in inputs))
            y = F.dropout(own_tokens(y, self.parallelism), self.dropout)
            x = norm(x + y) if self.norm_last else x + y
        return x


class Transformer(nn.Module):
    """The loss of next tokens, or of masked ones.

    Args:
        with_head: False: the first stage of a pipeline, which ends after its layers.
        recompute: backward computes each layer again (``torch.utils.checkpoint``).
    """

    def __init__(
        self,
        shape: Shape,
        parallelism: Parallelism | None = None,
        *,
        with_head: bool = True,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.parallelism = parallelism = parallelism or Parallelism()
        check_shares(shape, parallelism)
        vocab, tokens = -(-shape.vocab // parallelism.tensor), shape.sequence // parallelism.context
        self.embedding = nn.Embedding(vocab, shape.hidden)
        self.position = None if shape.is_gated else nn.Parameter(torch.empty(tokens, shape.hidden))
        self.layers = nn.ModuleList(Layer(shape, parallelism) for _ in range(shape.layers - shape.decoder_layers))
        self.decoder = nn.ModuleList(Layer(shape, parallelism, cross=True) for _ in range(shape.decoder_layers))
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
        logits = self.head(gather_tokens(self.norm(x), self.parallelism))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = own_tokens(x if self.position is None else x + self.position, self.parallelism)
        return F.dropout(x, self.dropout)
