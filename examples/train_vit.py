"""Train a ViT to read letters in every font that ships with matplotlib, with the Trainer of transformers.

pip install -e '.[demo,trainers]'
python examples/train_vit.py
python examples/train_vit.py --backend inductor    # the same without offloading
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.ft2font import FT2Font
from shared import parse_arguments, train
from transformers import ViTConfig, ViTForImageClassification

CHARACTERS = string.ascii_letters + string.digits


class Letters(torch.utils.data.Dataset[dict[str, Any]]):
    """Every letter and digit, drawn in every font."""

    def __init__(self, pixels: int) -> None:
        self.pixels = pixels
        self.fonts = sorted((Path(mpl.get_data_path()) / "fonts" / "ttf").glob("DejaVu*.ttf"))

    def __len__(self) -> int:
        return len(self.fonts) * len(CHARACTERS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        font, label = divmod(index, len(CHARACTERS))
        return {"pixel_values": draw_letter(self.fonts[font], CHARACTERS[label], self.pixels), "labels": label}


def draw_letter(font: Path, letter: str, pixels: int) -> torch.Tensor:
    """Shape (3, pixels, pixels): the letter in the middle of a black square."""
    drawn = FT2Font(str(font))
    drawn.set_size(0.6 * pixels, 72)
    drawn.set_text(letter)
    drawn.draw_glyphs_to_bitmap()
    glyph = torch.from_numpy(np.array(drawn.get_image()))[:pixels, :pixels]
    image = torch.zeros(pixels, pixels)
    top, left = (pixels - glyph.shape[0]) // 2, (pixels - glyph.shape[1]) // 2
    image[top : top + glyph.shape[0], left : left + glyph.shape[1]] = glyph / 255
    return image.expand(3, -1, -1)


def make_model(layers: int, hidden: int, pixels: int) -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=pixels,
        patch_size=8,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_labels=len(CHARACTERS),
    )
    return ViTForImageClassification(config)


def main() -> None:
    chosen = parse_arguments(__doc__ or "", layers=4, hidden=256, batch=32, pixels=96)
    train(make_model(chosen.layers, chosen.hidden, chosen.pixels), Letters(chosen.pixels), chosen)


if __name__ == "__main__":
    main()
