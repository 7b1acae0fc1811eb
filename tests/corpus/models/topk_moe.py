"""A mixture of experts with top-2 routing, dense over stacked expert weights."""

# torchstone: check MoE(), x=f32[B, S, 24]

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class MoE(nn.Module):
    def __init__(self, width: int = 24, hidden: int = 40, experts: int = 6, k: int = 2) -> None:
        super().__init__()
        self.k, self.count = k, experts
        self.gate = nn.Linear(width, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, width, hidden) * 0.02)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, width) * 0.02)
        self.shared = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length, width = x.shape
        flat = x.reshape(-1, width)
        probabilities = self.gate(flat).softmax(-1)
        weights, chosen = probabilities.topk(self.k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        routing = torch.zeros_like(probabilities).scatter(1, chosen, weights)
        hidden = F.silu(torch.einsum("nd,edh->enh", flat, self.w1))
        each = torch.einsum("enh,ehd->end", hidden, self.w2)
        out = torch.einsum("ne,end->nd", routing, each) + self.shared(flat)
        load = F.one_hot(chosen, self.count).float().sum(1).mean(0)
        balance = (load * probabilities.mean(0)).sum() * self.count
        return out.view(batch, length, width), balance
