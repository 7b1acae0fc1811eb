"""DeepFM: linear part, factorization machine and a deep part over shared embeddings."""

from __future__ import annotations

import torch
from torch import nn

FIELDS = (10, 25, 8, 100, 3)


class DeepFM(nn.Module):
    def __init__(self, fields: tuple[int, ...] = FIELDS, width: int = 8, hidden: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sum(fields), width)
        self.linear = nn.Embedding(sum(fields), 1)
        starts = torch.tensor([0, *fields[:-1]]).cumsum(0)
        self.register_buffer("starts", starts)
        self.bias = nn.Parameter(torch.zeros(1))
        self.deep = nn.Sequential(
            nn.Linear(len(fields) * width, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = x + self.starts
        vectors = self.embedding(index)
        square_of_sum = vectors.sum(1) ** 2
        sum_of_square = (vectors**2).sum(1)
        pairwise = 0.5 * (square_of_sum - sum_of_square).sum(1, keepdim=True)
        deep = self.deep(vectors.flatten(1))
        return self.bias + self.linear(index).sum(1) + pairwise + deep


def build() -> DeepFM:
    return DeepFM()


def example() -> tuple[torch.Tensor]:
    return (torch.stack([torch.randint(0, n, (6,)) for n in FIELDS], dim=1),)
