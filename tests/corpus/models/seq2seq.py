"""GRU encoder and decoder with additive attention, unrolled over the target."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, encoder: int, decoder: int, width: int) -> None:
        super().__init__()
        self.key = nn.Linear(encoder, width, bias=False)
        self.query = nn.Linear(decoder, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, query, memory, mask):
        energy = torch.tanh(self.key(memory) + self.query(query).unsqueeze(1))
        scores = self.score(energy).squeeze(-1).masked_fill(~mask, float("-inf"))
        weights = scores.softmax(dim=-1)
        return torch.bmm(weights.unsqueeze(1), memory).squeeze(1)


class Seq2Seq(nn.Module):
    def __init__(self, source: int = 80, target: int = 90, width: int = 16, hidden: int = 24) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(source, width), nn.Embedding(target, width)
        self.encoder = nn.GRU(width, hidden, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * hidden, hidden)
        self.attention = Attention(2 * hidden, hidden, 20)
        self.cell = nn.GRUCell(width + 2 * hidden, hidden)
        self.out = nn.Linear(3 * hidden, target)

    def forward(self, source, target, mask):
        memory, last = self.encoder(self.source(source))
        state = torch.tanh(self.bridge(torch.cat([last[0], last[1]], dim=-1)))
        steps = []
        for step in range(target.size(1)):
            context = self.attention(state, memory, mask)
            state = self.cell(torch.cat([self.target(target[:, step]), context], dim=-1), state)
            steps.append(self.out(torch.cat([state, context], dim=-1)))
        return torch.stack(steps, dim=1)


def build_seq2seq() -> nn.Module:
    return Seq2Seq()


def inputs_seq2seq():
    return {
        "source": torch.randint(0, 80, (4, 9)),
        "target": torch.randint(0, 90, (4, 6)),
        "mask": torch.ones(4, 9, dtype=torch.bool),
    }
