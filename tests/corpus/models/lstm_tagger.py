"""A bidirectional LSTM tagger with character convolutions; sentences are packed."""

# torchstone: check Tagger(), words=i64[B, S], chars=i64[B, S, 12]

from __future__ import annotations

import torch
from torch import nn


class CharCNN(nn.Module):
    def __init__(self, alphabet: int, width: int, channels: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(alphabet, width, padding_idx=0)
        self.conv = nn.Conv1d(width, channels, kernel_size=3, padding=1)

    def forward(self, chars: torch.Tensor) -> torch.Tensor:
        batch, words, length = chars.shape
        x = self.embed(chars.view(batch * words, length)).transpose(1, 2)
        x = torch.relu(self.conv(x)).max(dim=-1).values
        return x.view(batch, words, -1)


class Tagger(nn.Module):
    def __init__(
        self, vocabulary: int = 200, alphabet: int = 60, hidden: int = 24, tags: int = 9
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, 32)
        self.chars = CharCNN(alphabet, 8, 16)
        self.lstm = nn.LSTM(32 + 16, hidden, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, tags)

    def forward(self, words: torch.Tensor, chars: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.words(words), self.chars(chars)], dim=-1)
        states, _ = self.lstm(x)
        return self.out(states)
