"""Published models, by name."""

from __future__ import annotations

from collections.abc import Mapping

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.projection.transformer import Shape

MODELS: Mapping[str, Shape] = {
    "gpt2-xl": Shape(family="gpt", layers=48, hidden=1600, heads=25, kv_heads=25, ffn=6400, vocab=50257, sequence=1024),
    "gpt3-175b": Shape(
        family="gpt", layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocab=50257, sequence=2048
    ),
    "llama-3-8b": Shape(
        family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=8192, tied=False
    ),
    "llama-3-70b": Shape(
        family="llama", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, sequence=8192, tied=False
    ),
    "llama-3-405b": Shape(
        family="llama",
        layers=126,
        hidden=16384,
        heads=128,
        kv_heads=8,
        ffn=53248,
        vocab=128256,
        sequence=8192,
        tied=False,
    ),
    "mixtral-8x7b": Shape(
        family="llama",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocab=32000,
        sequence=8192,
        tied=False,
        experts=8,
        experts_per_token=2,
    ),
    "deepseek-moe-16b": Shape(
        family="llama",
        layers=28,
        hidden=2048,
        heads=16,
        kv_heads=16,
        ffn=1408,
        vocab=102400,
        sequence=4096,
        tied=False,
        experts=64,
        experts_per_token=6,
        shared_experts=2,
    ),
}
"""As published: Radford et al. (2019); Brown et al. (2020); The Llama 3 Herd of Models (arXiv 2407.21783), table 3;
Jiang et al. (2024); Dai et al. (2024). The first layer of DeepSeekMoE has no experts there."""


def find_model(name: str) -> Shape:
    """The shape of a published model. Raises ConfigError."""
    if name not in MODELS:
        raise ConfigError(f"There is no model {name!r}. Known are {', '.join(MODELS)}.")
    return MODELS[name]
