"""A two-tower retriever with in-batch negatives; history is a masked mean of item embeddings."""

# torchstone: check TwoTower(), user=f32[B, 12], history=i64[B, L], seen=bool[B, L], item=i64[B]

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Tower(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc2 = nn.Linear(hidden, outputs)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.relu(self.fc1(x)))
        return F.normalize(self.fc2(x), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, items: int = 500, features: int = 12, width: int = 16, out: int = 24) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.user_tower = Tower(features + width, 48, out)
        self.item_tower = Tower(width, 48, out)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, user, history, seen, item):
        vectors = self.items(history)
        weights = seen.unsqueeze(-1).float()
        profile = (vectors * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)
        users = self.user_tower(torch.cat([user, profile], dim=-1))
        items = self.item_tower(self.items(item))
        logits = users @ items.T * self.log_scale.exp()
        labels = torch.arange(logits.size(0), device=logits.device)
        return F.cross_entropy(logits, labels)
