"""A Switch layer: each token goes to its best expert, which takes those that chose it."""

# torchstone: check SwitchBlock(), x=f32[B, S, 32], mask=bool[B, S]

from __future__ import annotations

import torch
from torch import nn


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.wi = nn.Linear(width, hidden)
        self.wo = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(torch.relu(self.wi(x)))


class SwitchBlock(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 48, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width, hidden * (1 + i % 2)) for i in range(experts))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x)[mask]
        weight, choice = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            mine = choice == index
            out[mine] = expert(tokens[mine]) * weight[mine].unsqueeze(-1)
        result = x.clone()
        result[mask] = x[mask] + out
        return result
