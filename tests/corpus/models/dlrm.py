"""DLRM: dense and sparse features, pairwise dot interactions."""

# torchstone: check DLRM(), dense=f32[B, 13], sparse=i64[B, 4]

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    def __init__(self, dense: int = 13, vocabularies=(50, 20, 100, 7), width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, width) for n in vocabularies)
        self.bottom = mlp(dense, 32, width)
        count = len(vocabularies) + 1
        rows, columns = torch.tril_indices(count, count, offset=-1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)
        self.top = mlp(width + count * (count - 1) // 2, 32, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        vectors = [x] + [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack(vectors, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        pairs = products[:, self.rows, self.columns]
        return self.top(torch.cat([x, pairs], dim=1)).squeeze(1)
