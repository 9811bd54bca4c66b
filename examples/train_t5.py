"""Train a T5 to write the first line of a docstring for a function, with the Trainer of transformers.

    pip install -e '.[demo,trainers]'
    python examples/train_t5.py
    python examples/train_t5.py --backend inductor    # the same without offloading

The functions are those of Python's standard library.
"""

from __future__ import annotations

import ast

import torch
from shared import STANDARD_LIBRARY, VOCABULARY, parse_arguments, train
from transformers import T5Config, T5ForConditionalGeneration

ANSWER = 64
"""Bytes of a docstring's first line that count."""


def functions_with_docstrings() -> list[tuple[bytes, bytes]]:
    """The source of each function without its docstring, and the first line of the docstring."""
    found: list[tuple[bytes, bytes]] = []
    for path in sorted(STANDARD_LIBRARY.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if isinstance(node, ast.FunctionDef) and text and len(node.body) > 1:
                node.body = node.body[1:]
                found.append((ast.unparse(node).encode(), text.splitlines()[0].encode()))
    return found


class Docstrings(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Functions as input, docstrings as labels, both cut or filled up with zeros."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.pairs = functions_with_docstrings()

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        source, answer = self.pairs[index]
        tokens, labels = _tokens(source, self.sequence), _tokens(answer, ANSWER)
        return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels.where(labels > 0, -100)}


def _tokens(text: bytes, length: int) -> torch.Tensor:
    return torch.tensor(list(text[:length].ljust(length, b"\0")))


def make_model(layers: int, hidden: int) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=hidden,
        d_kv=32,
        d_ff=4 * hidden,
        num_layers=layers,
        num_heads=hidden // 32,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def main() -> None:
    chosen = parse_arguments(__doc__ or "", layers=4, hidden=256, batch=8, sequence=512)
    train(make_model(chosen.layers, chosen.hidden), Docstrings(chosen.sequence), chosen)


if __name__ == "__main__":
    main()
