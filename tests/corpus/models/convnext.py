"""ConvNeXt: channels-last blocks, layer scale, stochastic depth from a schedule."""

# torchstone: check ConvNeXt(), x=f32[B, 3, 64, 64]

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, dim: int, drop: float, scale: float = 1e-6) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, 4 * dim)
        self.project = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(scale * torch.ones(dim))
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        x = self.depthwise(x).permute(0, 2, 3, 1)
        x = self.project(F.gelu(self.expand(self.norm(x))))
        x = (self.gamma * x).permute(0, 3, 1, 2)
        if self.training and self.drop > 0:
            keep = torch.rand(x.shape[0], 1, 1, 1, device=x.device) >= self.drop
            x = x * keep / (1 - self.drop)
        return residual + x


class ConvNeXt(nn.Module):
    def __init__(self, depths=(1, 1, 2), dims=(16, 32, 64), classes: int = 10) -> None:
        super().__init__()
        rates = [r.item() for r in torch.linspace(0, 0.2, sum(depths))]
        self.downsample = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(3, dims[0], 4, 4), LayerNorm2d(dims[0]))]
        )
        for before, after in pairwise(dims):
            self.downsample.append(nn.Sequential(LayerNorm2d(before), nn.Conv2d(before, after, 2, 2)))
        self.stages = nn.ModuleList()
        done = 0
        for depth, dim in zip(depths, dims, strict=True):
            self.stages.append(nn.Sequential(*(Block(dim, rates[done + i]) for i in range(depth))))
            done += depth
        self.norm = nn.LayerNorm(dims[-1])
        self.head = nn.Linear(dims[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for down, stage in zip(self.downsample, self.stages, strict=True):
            x = stage(down(x))
        return self.head(self.norm(x.mean([-2, -1])))
