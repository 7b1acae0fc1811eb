"""EfficientNet-style MBConv with squeeze-and-excitation; its inputs are declared nowhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, reduced: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Linear(channels, reduced)
        self.fc2 = nn.Linear(reduced, channels)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.pool(x).flatten(1)
        scale = torch.sigmoid(self.fc2(nn.functional.silu(self.fc1(scale))))
        return x * scale[:, :, None, None]


class MBConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, expand: int, stride: int, kernel: int = 3) -> None:
        super().__init__()
        hidden = inputs * expand
        self.expand = nn.Sequential(nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden))
        self.depthwise = nn.Sequential(
            nn.Conv2d(hidden, hidden, kernel, stride, kernel // 2, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
        )
        self.excite = SqueezeExcite(hidden, max(1, inputs // 4))
        self.project = nn.Sequential(nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.silu(self.expand(x))
        h = nn.functional.silu(self.depthwise(h))
        h = self.project(self.excite(h))
        return h + x if self.skip else h


class EfficientNet(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            [
                MBConv(16, 16, expand=1, stride=1),
                MBConv(16, 24, expand=4, stride=2),
                MBConv(24, 24, expand=4, stride=1, kernel=5),
                MBConv(24, 40, expand=4, stride=2),
            ]
        )
        self.head = nn.Conv2d(40, 80, 1)
        self.classifier = nn.Linear(80, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.head(x).amax(dim=(2, 3))
        return self.classifier(x)
