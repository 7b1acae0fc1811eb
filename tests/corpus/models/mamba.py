"""A Mamba-like block: a short causal convolution and a selective scan, step by step."""

# torchstone: check Mamba(), tokens=i64[B, 10]

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class MambaBlock(nn.Module):
    def __init__(
        self, width: int, state: int = 8, expand: int = 2, kernel: int = 4, rank: int = 3
    ) -> None:
        super().__init__()
        inner = expand * width
        self.inner, self.state, self.rank = inner, state, rank
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.a_log = nn.Parameter(torch.arange(1, state + 1).float().log().repeat(inner, 1))
        self.d = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def scan(self, u, delta, b, c):
        a = -self.a_log.exp()
        decay = torch.exp(delta.unsqueeze(-1) * a)
        drive = delta.unsqueeze(-1) * b.unsqueeze(2) * u.unsqueeze(-1)
        h = u.new_zeros(u.size(0), self.inner, self.state)
        steps = []
        for i in range(u.size(1)):
            h = decay[:, i] * h + drive[:, i]
            steps.append((h @ c[:, i].unsqueeze(-1)).squeeze(-1))
        return torch.stack(steps, dim=1) + u * self.d

    def forward(self, x):
        length = x.size(1)
        u, gate = self.in_proj(x).chunk(2, dim=-1)
        u = self.conv(u.transpose(1, 2))[..., :length].transpose(1, 2)
        u = F.silu(u)
        delta, b, c = self.x_proj(u).split([self.rank, self.state, self.state], dim=-1)
        y = self.scan(u, F.softplus(self.dt_proj(delta)), b, c)
        return self.out_proj(y * F.silu(gate))


class Mamba(nn.Module):
    def __init__(self, vocabulary: int = 50, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "mixer": MambaBlock(width)})
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["mixer"](layer["norm"](x))
        return F.linear(self.norm(x), self.embed.weight)
