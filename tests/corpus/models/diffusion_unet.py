"""A denoising U-Net level: time-conditioned residual blocks, attention, cross attention to text."""

# torchstone: check Denoiser(), x=f32[B, 4, 16, 16], t=i64[B], text=f32[B, S, 40]

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


def timestep_embedding(t: torch.Tensor, dim: int) -> torch.Tensor:
    half = dim // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, device=t.device) / half)
    angles = t[:, None].float() * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x, emb, context=None):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(emb))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return h + self.skip(x)


class CrossAttention(nn.Module):
    def __init__(self, channels: int, context: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(4, channels)
        self.q = nn.Linear(channels, channels, bias=False)
        self.kv = nn.Linear(context, 2 * channels, bias=False)
        self.out = nn.Linear(channels, channels)

    def _split(self, x):
        b, n, c = x.shape
        return x.view(b, n, self.heads, c // self.heads).transpose(1, 2)

    def forward(self, x, emb, context):
        b, c, h, w = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        key, value = self.kv(context).chunk(2, dim=-1)
        out = F.scaled_dot_product_attention(
            self._split(self.q(tokens)), self._split(key), self._split(value)
        )
        out = self.out(out.transpose(1, 2).reshape(b, h * w, c))
        return x + out.transpose(1, 2).reshape(b, c, h, w)


class Denoiser(nn.Module):
    def __init__(self, channels: int = 4, base: int = 16, context: int = 40) -> None:
        super().__init__()
        time = 4 * base
        self.base = base
        self.embed = nn.Sequential(nn.Linear(base, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(channels, base, 3, padding=1)
        self.down = nn.ModuleList([ResBlock(base, 2 * base, time), CrossAttention(2 * base, context)])
        self.shrink = nn.Conv2d(2 * base, 2 * base, 3, stride=2, padding=1)
        self.middle = ResBlock(2 * base, 2 * base, time)
        self.up = nn.ModuleList([ResBlock(4 * base, base, time), CrossAttention(base, context)])
        self.last = nn.Conv2d(base, channels, 3, padding=1)

    def forward(self, x, t, text):
        emb = self.embed(timestep_embedding(t, self.base))
        h = self.first(x)
        for block in self.down:
            h = block(h, emb, text)
        skip = h
        h = self.middle(self.shrink(h), emb)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        h = torch.cat([h, skip], dim=1)
        for block in self.up:
            h = block(h, emb, text)
        return self.last(h)
