"""A language model of GPT's shape that tells the next character (Radford et al., 2019)."""

from __future__ import annotations

import torch
from torch import nn

from tailbound_lab.bench.text import CHARACTERS, LENGTH


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
