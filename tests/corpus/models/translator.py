"""An encoder-decoder translator on nn.Transformer with sinusoidal positions, batch second."""

# torchstone: check Translator(), source=i64[S, B], target=i64[T, B], padding=bool[B, S]

from __future__ import annotations

import math

import torch
from torch import nn


class Positions(nn.Module):
    def __init__(self, width: int, longest: int = 128) -> None:
        super().__init__()
        place = torch.arange(longest).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(longest, 1, width)
        table[:, 0, 0::2] = torch.sin(place * rate)
        table[:, 0, 1::2] = torch.cos(place * rate)
        self.register_buffer("table", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.size(0)]


class Translator(nn.Module):
    def __init__(self, source: int = 70, target: int = 80, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.source, self.target = nn.Embedding(source, width), nn.Embedding(target, width)
        self.positions = Positions(width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 64, dropout=0.0)
        self.out = nn.Linear(width, target)

    def forward(self, source, target, padding):
        src = self.positions(self.source(source) * math.sqrt(self.width))
        tgt = self.positions(self.target(target) * math.sqrt(self.width))
        causal = nn.Transformer.generate_square_subsequent_mask(target.size(0), dtype=torch.bool)
        out = self.transformer(
            src, tgt, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding
        )
        return self.out(out)
