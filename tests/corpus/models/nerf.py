"""A NeRF field with positional encoding, a skip connection and volume rendering."""

# torchstone: check NeRF(), origins=f32[R, 3], directions=f32[R, 3], depths=f32[R, S]

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def encode(x: torch.Tensor, levels: int) -> torch.Tensor:
    parts = [x]
    for level in range(levels):
        parts += [torch.sin(2.0**level * x), torch.cos(2.0**level * x)]
    return torch.cat(parts, dim=-1)


class NeRF(nn.Module):
    def __init__(self, width: int = 32, position: int = 4, view: int = 2, depth: int = 4) -> None:
        super().__init__()
        self.position, self.view = position, view
        inputs, views = 3 + 6 * position, 3 + 6 * view
        self.skip = depth // 2
        self.layers = nn.ModuleList(
            nn.Linear(inputs if i == 0 else width + (inputs if i == self.skip else 0), width)
            for i in range(depth)
        )
        self.density = nn.Linear(width, 1)
        self.feature = nn.Linear(width, width)
        self.colour = nn.Sequential(
            nn.Linear(width + views, width // 2), nn.ReLU(), nn.Linear(width // 2, 3)
        )

    def forward(self, origins, directions, depths):
        points = origins[:, None] + directions[:, None] * depths[..., None]
        x = encode(points, self.position)
        h = x
        for i, layer in enumerate(self.layers):
            if i == self.skip:
                h = torch.cat([h, x], dim=-1)
            h = F.relu(layer(h))
        density = F.relu(self.density(h)).squeeze(-1)
        seen = encode(F.normalize(directions, dim=-1), self.view)
        seen = seen[:, None].expand(-1, depths.shape[1], -1)
        colour = torch.sigmoid(self.colour(torch.cat([self.feature(h), seen], dim=-1)))
        gaps = F.pad(depths[:, 1:] - depths[:, :-1], (0, 1), value=1e10)
        alpha = 1 - torch.exp(-density * gaps)
        through = torch.cumprod(F.pad(1 - alpha + 1e-10, (1, 0), value=1.0)[:, :-1], dim=-1)
        return ((alpha * through)[..., None] * colour).sum(dim=1)
