"""Fine-tune a Llama with LoRA adapters and the Trainer of transformers, and show what offloading does to its memory.

    pip install -e '.[demo,trainers]'
    python examples/finetune_llama.py
    python examples/finetune_llama.py --backend inductor    # the same without offloading

The text is the source code of Python's standard library, and the weights are random, so nothing is downloaded. To
fine-tune a model of yours, replace ``make_model`` and ``Text``; nothing else depends on them.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from shared import VOCABULARY, parse_arguments, text_of, train
from transformers import LlamaConfig, LlamaForCausalLM


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of the text, one token per byte."""

    def __init__(self, sequence: int) -> None:
        self.pieces = text_of(sequence)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.pieces[index].long()
        return {"input_ids": tokens, "labels": tokens}


def make_model(layers: int, hidden: int, sequence: int) -> Any:
    """A Llama over bytes with LoRA adapters. Only the adapters are trained."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=sequence,
        use_cache=False,
    )
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), adapters)


def main() -> None:
    chosen = parse_arguments(__doc__ or "", layers=4, hidden=256, batch=8, sequence=512)
    train(make_model(chosen.layers, chosen.hidden, chosen.sequence), Text(chosen.sequence), chosen)


if __name__ == "__main__":
    main()
