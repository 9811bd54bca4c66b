"""Train a BERT to fill in masked bytes of source code, with the Trainer of transformers.

pip install -e '.[demo,trainers]'
python examples/train_bert.py
python examples/train_bert.py --backend inductor    # the same without offloading
"""

from __future__ import annotations

import torch
from shared import VOCABULARY, parse_arguments, text_of, train
from transformers import BertConfig, BertForMaskedLM

MASK = VOCABULARY
"""The token that stands for a masked byte."""


class MaskedText(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of the text, in which 15 % of the bytes are masked. The others do not count in the loss."""

    def __init__(self, sequence: int) -> None:
        self.pieces = text_of(sequence)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.pieces[index].long()
        masked = torch.rand(len(tokens), generator=torch.Generator().manual_seed(index)) < 0.15
        return {"input_ids": tokens.masked_fill(masked, MASK), "labels": tokens.masked_fill(~masked, -100)}


def make_model(layers: int, hidden: int, sequence: int) -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY + 1,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        max_position_embeddings=sequence,
    )
    return BertForMaskedLM(config)


def main() -> None:
    chosen = parse_arguments(__doc__ or "", layers=4, hidden=256, batch=8, sequence=512)
    train(make_model(chosen.layers, chosen.hidden, chosen.sequence), MaskedText(chosen.sequence), chosen)


if __name__ == "__main__":
    main()
