"""Train a GPT-2 or a Mixtral on source code in a loop of your own: what changes is one line.

pip install -e '.[demo,trainers]'
python examples/train_in_a_loop.py
python examples/train_in_a_loop.py --experts 4            # a Mixtral
python examples/train_in_a_loop.py --backend inductor     # the same without offloading
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.progress import track
from shared import VOCABULARY, Memory, parse_arguments, text_of
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM


def make_model(chosen: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    heads = chosen.hidden // 32
    if not chosen.experts:
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=chosen.sequence,
            n_embd=chosen.hidden,
            n_layer=chosen.layers,
            n_head=heads,
            use_cache=False,
        )
        return GPT2LMHeadModel(config)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=chosen.hidden,
            intermediate_size=4 * chosen.hidden,
            num_hidden_layers=chosen.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=chosen.sequence,
            num_local_experts=chosen.experts,
            num_experts_per_tok=2,
            use_cache=False,
        )
    )


def main() -> None:
    sizes = {"layers": 4, "hidden": 256, "batch": 8, "sequence": 512, "experts": 0}
    chosen = parse_arguments(__doc__ or "", **sizes)
    model, text = make_model(chosen), text_of(chosen.sequence)
    options = {"max_slowdown": chosen.max_slowdown, "ssd_dir": chosen.ssd_dir}

    model.compile(backend=chosen.backend, options=options if chosen.backend == "ssdtrain" else None)  # the line

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory, losses = Memory(chosen.steps), list[float]()
    for step in track(range(1, chosen.steps + 1), description="steps"):
        tokens = text[torch.randint(len(text), (chosen.batch,))].long()
        memory.step_begins(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        memory.step_ends(step)
        losses.append(loss.item())
    print(f"Loss: {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last one.")
    memory.report(chosen.backend, chosen.output)


if __name__ == "__main__":
    main()
