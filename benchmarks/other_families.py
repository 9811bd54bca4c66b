"""Models of more families, for ``families.py``: each function makes a model that returns its loss, and its inputs.

    python benchmarks/families.py --model benchmarks.other_families:qwen3 --model benchmarks.other_families:unet
    ssdtrain-fx explain benchmarks.other_families:whisper

Run it in the root of the repository. What is named after a released model has its architecture, from transformers or
from diffusers (``pip install --no-deps diffusers``). The others are written here. All weights are random.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssdtrain_fx.studies.zoo import CausalLanguageModel, ImageClassifier

Made = tuple[nn.Module, tuple[Any, ...]]

BATCH, SEQUENCE, VOCAB, HIDDEN, LAYERS = 8, 256, 2048, 256, 6
SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "use_cache": False,
    **SPECIAL_TOKENS,
}


class Loss(nn.Module):
    """A model, and a function that makes a loss of its output and the last input."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss(self.model(*inputs[:-1]), inputs[-1])


def causal(model_class: Any, config: Any, attention: str = "sdpa") -> Made:
    config._attn_implementation = attention
    return CausalLanguageModel(model_class(config)), (torch.randint(VOCAB, (BATCH, SEQUENCE)),)


def qwen3() -> Made:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return causal(Qwen3ForCausalLM, Qwen3Config(**DECODER))


def gemma2() -> Made:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**DECODER, sliding_window=SEQUENCE // 2)
    return causal(Gemma2ForCausalLM, config, attention="eager")  # it caps logits, which SDPA cannot


def olmoe() -> Made:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    sizes: dict[str, Any] = {**DECODER, "intermediate_size": HIDDEN}
    del sizes["head_dim"]
    return causal(OlmoeForCausalLM, OlmoeConfig(**sizes, num_experts=8, num_experts_per_tok=2))


def deepseek_v3() -> Made:
    """Latent attention, one dense layer, then 16 experts in groups and a shared one."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes: dict[str, Any] = {**DECODER, "num_key_value_heads": 4}
    del sizes["head_dim"]
    config = DeepseekV3Config(
        **sizes,
        moe_intermediate_size=HIDDEN // 2,
        n_routed_experts=16,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=64,
    )
    return causal(DeepseekV3ForCausalLM, config)


def convnext() -> Made:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    names = {index: str(index) for index in range(10)}
    config = ConvNextConfig(hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 4, 2], id2label=names)
    images = torch.randn(2 * BATCH, 3, 128, 128)
    return ImageClassifier(ConvNextForImageClassification(config)), (images, torch.randint(10, (2 * BATCH,)))


def clip() -> Made:
    """Texts and images in one space, with the contrastive loss."""
    from transformers import CLIPConfig, CLIPModel

    tower: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    config = CLIPConfig(
        text_config={**tower, "vocab_size": VOCAB, "max_position_embeddings": 77, "eos_token_id": VOCAB - 1},
        vision_config={**tower, "image_size": 128, "patch_size": 16},
        projection_dim=HIDDEN,
    )
    config._attn_implementation = "sdpa"

    def loss(output: Any, labels: Tensor) -> Tensor:
        return (F.cross_entropy(output.logits_per_text, labels) + F.cross_entropy(output.logits_per_image, labels)) / 2

    texts = torch.randint(VOCAB - 1, (4 * BATCH, 77))
    texts[:, -1] = VOCAB - 1
    return Loss(CLIPModel(config), loss), (texts, torch.randn(4 * BATCH, 3, 128, 128), torch.arange(4 * BATCH))


def whisper() -> Made:
    """Speech to text: a spectrogram of 6 s, and 128 tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=4 * HIDDEN,
        decoder_ffn_dim=4 * HIDDEN,
        max_source_positions=300,
        max_target_positions=128,
        dropout=0.0,
        decoder_start_token_id=0,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    config._attn_implementation = "sdpa"

    class Transcription(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = WhisperForConditionalGeneration(config)

        def forward(self, spectrogram: Tensor, tokens: Tensor) -> Tensor:
            logits = self.model(input_features=spectrogram, decoder_input_ids=tokens).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return Transcription(), (torch.randn(BATCH, 80, 600), torch.randint(VOCAB, (BATCH, 128)))


def unet() -> Made:
    """The denoiser of a latent diffusion model, conditioned on a text."""
    diffusers: Any = importlib.import_module("diffusers")  # not among the packages of the project
    model = diffusers.UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(64, 128, 128),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=2,
        cross_attention_dim=HIDDEN,
        attention_head_dim=32,
        norm_num_groups=16,
    )

    def loss(output: Any, noise: Tensor) -> Tensor:
        return F.mse_loss(output.sample, noise)

    noisy, noise = torch.randn(2, 4, 4, 32, 32)
    return Loss(model, loss), (noisy, torch.randint(1000, (4,)), torch.randn(4, 77, HIDDEN), noise)


class Recurrent(nn.Module):
    """Two layers of LSTM cells, unrolled over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(HIDDEN, HIDDEN), nn.LSTMCell(HIDDEN, HIDDEN)])
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        states = [(torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])) for _ in self.cells]
        outputs: list[Tensor] = []
        for time in range(x.shape[1]):
            value = x[:, time]
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(value, states[layer])
                value = states[layer][0]
            outputs.append(value)
        return self.head(torch.stack(outputs, dim=1))


def lstm() -> Made:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    tokens = torch.randint(VOCAB, (64, 33))
    return Loss(Recurrent(), loss), (tokens[:, :-1], tokens[:, 1:])


class GraphNetwork(nn.Module):
    """Messages along edges, added at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = nn.ModuleList([nn.Linear(2 * HIDDEN, HIDDEN) for _ in range(4)])
        self.updates = nn.ModuleList([nn.Linear(2 * HIDDEN, HIDDEN) for _ in range(4)])
        self.head = nn.Linear(HIDDEN, 10)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = F.relu(message(torch.cat([nodes[source], nodes[target]], dim=1)))
            received = torch.zeros_like(nodes).index_add(0, target, sent)
            nodes = nodes + F.relu(update(torch.cat([nodes, received], dim=1)))
        return self.head(nodes)


def gnn() -> Made:
    nodes, edges = 2048, 16384
    inputs = torch.randn(nodes, HIDDEN), torch.randint(nodes, (2, edges)), torch.randint(10, (nodes,))
    return Loss(GraphNetwork(), F.cross_entropy), inputs


class Recommender(nn.Module):
    """DLRM: embeddings of categories and a network over numbers, their products pair by pair, and a network on top."""

    def __init__(self, tables: int = 8, rows: int = 4096, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)])
        self.below = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.above = nn.Sequential(nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
        self.head = nn.Linear(1024, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.below(numbers)
        vectors = [dense] + [table(column) for table, column in zip(self.tables, categories, strict=True)]
        stacked = torch.stack(vectors, dim=1)
        row, column = torch.tril_indices(len(vectors), len(vectors), offset=-1)
        products = (stacked @ stacked.mT)[:, row, column]
        return self.head(self.above(torch.cat([dense, products], dim=1))).squeeze(1)


def dlrm() -> Made:
    batch = 4096
    inputs = torch.randn(batch, 16), torch.randint(4096, (8, batch, 4)), torch.rand(batch).round()
    return Loss(Recommender(), F.binary_cross_entropy_with_logits), inputs


class Autoencoder(nn.Module):
    """A variational autoencoder: backward needs the random numbers of forward."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()

        def block(layer: nn.Module, features: int) -> list[nn.Module]:
            return [layer, nn.GroupNorm(8, features), nn.SiLU()]

        self.encoder = nn.Sequential(
            *block(nn.Conv2d(3, channels, 3, 2, 1), channels),
            *block(nn.Conv2d(channels, 2 * channels, 3, 2, 1), 2 * channels),
            nn.Conv2d(2 * channels, 16, 3, padding=1),
        )
        self.decoder = nn.Sequential(
            *block(nn.ConvTranspose2d(8, 2 * channels, 4, 2, 1), 2 * channels),
            *block(nn.ConvTranspose2d(2 * channels, channels, 4, 2, 1), channels),
            nn.Conv2d(channels, 3, 3, padding=1),
        )

    def forward(self, images: Tensor) -> Tensor:
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        decoded = self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp())
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance).mean() / 2
        return F.mse_loss(decoded, images) + divergence


def vae() -> Made:
    return Autoencoder(), (torch.randn(2 * BATCH, 3, 128, 128),)
