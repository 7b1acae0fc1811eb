"""Swin: shifted windows with relative position bias and an attention mask for the shifted ones."""

# torchstone: check SwinStage(), x=f32[B, 16, 16, 32]

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def windows(x: torch.Tensor, size: int) -> torch.Tensor:
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, c)


def unwindow(x: torch.Tensor, size: int, h: int, w: int) -> torch.Tensor:
    b = x.shape[0] // ((h // size) * (w // size))
    x = x.view(b, h // size, w // size, size, size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, -1)


class WindowAttention(nn.Module):
    def __init__(self, dim: int, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.zeros((2 * size - 1) ** 2, heads))
        steps = torch.stack(
            torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        ).flatten(1)
        offsets = (steps[:, :, None] - steps[:, None, :]).permute(1, 2, 0) + size - 1
        self.register_buffer("index", offsets[..., 0] * (2 * size - 1) + offsets[..., 1])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.bias[self.index.view(-1)].view(t, t, -1).permute(2, 0, 1)
        scores = scores + bias.unsqueeze(0)
        if mask is not None:
            count = mask.shape[0]
            scores = scores.view(n // count, count, self.heads, t, t) + mask[None, :, None]
            scores = scores.view(-1, self.heads, t, t)
        out = scores.softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(n, t, c))


class SwinBlock(nn.Module):
    def __init__(self, dim: int, size: int, heads: int, shift: int) -> None:
        super().__init__()
        self.size, self.shift = size, shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = WindowAttention(dim, size, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def _mask(self, h: int, w: int) -> torch.Tensor | None:
        if self.shift == 0:
            return None
        image = torch.zeros(1, h, w, 1)
        parts = (slice(0, -self.size), slice(-self.size, -self.shift), slice(-self.shift, None))
        region = 0
        for rows in parts:
            for columns in parts:
                image[:, rows, columns] = region
                region += 1
        groups = windows(image, self.size).squeeze(-1)
        apart = groups.unsqueeze(1) - groups.unsqueeze(2)
        return torch.zeros_like(apart).masked_fill(apart != 0, -100.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, h, w, _ = x.shape
        y = self.norm1(x)
        y = torch.roll(y, (-self.shift, -self.shift), dims=(1, 2))
        y = self.attention(windows(y, self.size), self._mask(h, w))
        y = torch.roll(unwindow(y, self.size, h, w), (self.shift, self.shift), dims=(1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


class SwinStage(nn.Module):
    def __init__(self, dim: int = 32, size: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            SwinBlock(dim, size, heads, shift=0 if i % 2 == 0 else size // 2) for i in range(2)
        )
        self.reduce = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        corners = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return F.gelu(self.reduce(torch.cat(corners, -1)))
