"""GraphSAGE on an edge list: neighbours are averaged by scatter, nodes scored by pairs."""

# torchstone: check GraphSAGE(), x=f32[N, 20], edges=i64[2, E], pairs=i64[P, 2]

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class SAGEConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.neighbour = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        messages = x[source]
        total = torch.zeros_like(x).index_add(0, target, messages)
        ones = torch.ones(edges.size(1), device=x.device)
        degree = torch.zeros(x.size(0), device=x.device).index_add(0, target, ones)
        mean = total / degree.clamp(min=1).unsqueeze(-1)
        return self.own(x) + self.neighbour(mean)


class GraphSAGE(nn.Module):
    def __init__(self, features: int = 20, hidden: int = 32, out: int = 16) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [SAGEConv(features, hidden), SAGEConv(hidden, hidden), SAGEConv(hidden, out)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.link = nn.Linear(2 * out, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        for index, conv in enumerate(self.convs):
            x = conv(x, edges)
            if index < len(self.norms):
                x = F.relu(self.norms[index](x))
        ends = torch.cat([x[pairs[:, 0]], x[pairs[:, 1]]], dim=-1)
        return self.link(ends).squeeze(-1)
