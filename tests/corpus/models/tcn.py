"""A temporal convolutional network: dilated causal convolutions whose excess is cut off."""

# torchstone: check TCN(), series=f32[B, 5, T], T=8..512

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


class Chomp(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, : -self.size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int) -> None:
        super().__init__()
        padding = (kernel - 1) * dilation
        self.net = nn.Sequential(
            nn.Conv1d(inputs, outputs, kernel, padding=padding, dilation=dilation),
            Chomp(padding),
            nn.ReLU(),
            nn.Conv1d(outputs, outputs, kernel, padding=padding, dilation=dilation),
            Chomp(padding),
            nn.ReLU(),
        )
        self.match = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x if self.match is None else self.match(x)
        return torch.relu(self.net(x) + residual)


class TCN(nn.Module):
    def __init__(self, inputs: int = 5, channels=(16, 16, 24), kernel: int = 3, out: int = 2) -> None:
        super().__init__()
        sizes = [inputs, *channels]
        self.blocks = nn.Sequential(
            *(TemporalBlock(a, b, kernel, dilation=2**i) for i, (a, b) in enumerate(pairwise(sizes)))
        )
        self.head = nn.Linear(channels[-1], out)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(series)[:, :, -1])
