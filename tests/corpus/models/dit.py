"""A diffusion transformer: adaptive layer norm, patches in and out."""

# torchstone: check DiT(), x=f32[B, 4, 16, 16], t=f32[B], label=i64[B]

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        h = modulate(self.norm1(x), shift1, scale1)
        x = x + gate1.unsqueeze(1) * self.attention(h, h, h, need_weights=False)[0]
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    def __init__(self, side: int = 16, patch: int = 4, channels: int = 4, width: int = 48) -> None:
        super().__init__()
        self.patch, self.channels, self.grid = patch, channels, side // patch
        self.patchify = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Parameter(torch.zeros(1, self.grid**2, width))
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(DiTBlock(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.out = nn.Linear(width, patch * patch * channels)

    def unpatchify(self, x):
        b, g, p = x.shape[0], self.grid, self.patch
        x = x.reshape(b, g, g, p, p, self.channels)
        return torch.einsum("bhwpqc->bchpwq", x).reshape(b, self.channels, g * p, g * p)

    def forward(self, x, t, label):
        x = self.patchify(x).flatten(2).transpose(1, 2) + self.position
        c = self.time(t[:, None]) + self.label(label)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.out(F.silu(self.norm(x))))
