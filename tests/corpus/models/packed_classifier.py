"""A GRU classifier of packed sequences, read at its last hidden state of both directions."""

# torchstone: check PackedClassifier(), tokens=i64[B, 15], lengths=i64[B]

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence


class PackedClassifier(nn.Module):
    def __init__(
        self, vocabulary: int = 100, width: int = 16, hidden: int = 20, classes: int = 3
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, hidden, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hidden, classes)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.embed(tokens), lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
        )
        _, last = self.gru(packed)
        both = torch.cat([last[0], last[1]], dim=1)
        return self.fc(both)
