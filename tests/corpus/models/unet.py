"""U-Net: skip connections joined on the way up, sizes that are multiples of eight."""

# torchstone: check UNet(), image=f32[B, 1, H, W], H="8*k, 16..96", W="8*k, 16..96"

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


class Double(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.SiLU(),
        )

    def forward(self, x):
        return self.net(x)


class UNet(nn.Module):
    def __init__(self, base: int = 8, depth: int = 3, classes: int = 2) -> None:
        super().__init__()
        widths = [base * 2**i for i in range(depth + 1)]
        self.first = Double(1, base)
        self.down = nn.ModuleList(Double(a, b) for a, b in pairwise(widths))
        self.pool = nn.MaxPool2d(2)
        backwards = widths[::-1]
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(a, b, kernel_size=2, stride=2) for a, b in pairwise(backwards)
        )
        self.join = nn.ModuleList(Double(2 * b, b) for b in backwards[1:])
        self.out = nn.Conv2d(base, classes, 1)

    def forward(self, image):
        x = self.first(image)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(self.pool(x))
        for up, join in zip(self.up, self.join, strict=True):
            x = torch.cat([skips.pop(), up(x)], dim=1)
            x = join(x)
        return self.out(x)
