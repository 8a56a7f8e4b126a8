"""A language model of GPT's shape that tells the next character of Python's own library (Radford et al., 2019)."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tailbound_lab.bench.digits import Examples

#: ASCII; other characters are left out.
CHARACTERS = 128
#: Characters of a piece.
LENGTH = 32
#: Pieces to train on, more than any benchmark has steps for; and to test on.
_TRAIN, _TEST = 16384, 64


def load(seed: int) -> Examples:
    """Pieces from places that ``seed`` draws: i64[n, LENGTH], and the characters that follow each of theirs."""
    library = Path(sysconfig.get_path("stdlib"))
    source = "".join(file.read_text("utf-8", "ignore") for file in sorted(library.glob("*.py")))
    text = np.frombuffer(source.encode("ascii", "ignore"), np.uint8).astype(np.int64)
    pieces = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    chosen = pieces[np.random.default_rng(seed).permutation(len(pieces))[: _TRAIN + _TEST]]
    inputs, labels = chosen[:, :-1].copy(), chosen[:, 1:].copy()
    return Examples(inputs[_TEST:], labels[_TEST:], inputs[:_TEST], labels[:_TEST])


class GPT(nn.Module):
    """10.7 M parameters, 43 MB of gradients; without dropout, and with the same weights for the same ``seed``."""

    def __init__(self, seed: int, layers: int = 6, heads: int = 6, width: int = 384) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.token, self.place = nn.Embedding(CHARACTERS, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CHARACTERS)
        for p in self.parameters():
            if p.dim() > 1:  # the layers are copies of one
                nn.init.normal_(p, std=0.02)
        # no buffer: DDP would broadcast it before every forward pass, and all ranks would wait for that
        self._later = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """What follows every character of ``text``, i64[batch, LENGTH]: f32[batch, CHARACTERS, LENGTH]."""
        x = self.token(text) + self.place.weight
        found: torch.Tensor = self.head(self.layers(x, mask=self._later, is_causal=True))
        return found.transpose(1, 2)
