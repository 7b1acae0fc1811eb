"""MobileNetV2-style inverted residuals with depthwise convolutions."""

# torchstone: check MobileNet(), x=f32[B, 3, H, W]

from __future__ import annotations

import torch
from torch import nn


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        self.residual = stride == 1 and inputs == outputs
        layers = [conv_bn(inputs, hidden, 1)] if expand != 1 else []
        layers.append(conv_bn(hidden, hidden, 3, stride, groups=hidden))
        layers.append(nn.Sequential(nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)))
        self.body = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class MobileNet(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        plan = [(1, 8, 1, 1), (4, 12, 2, 2), (4, 16, 2, 2), (4, 24, 1, 1)]
        width = 16
        features = [conv_bn(3, width, 3, stride=2)]
        for expand, outputs, count, stride in plan:
            for index in range(count):
                features.append(InvertedResidual(width, outputs, stride if index == 0 else 1, expand))
                width = outputs
        features.append(conv_bn(width, 64, 1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(64, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = x.mean([2, 3])
        return self.classifier(x)
