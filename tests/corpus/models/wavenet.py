"""WaveNet: gated dilated convolutions, skips cut to the length of the last layer."""

# torchstone: check WaveNet(), wave=f32[B, 1, T], condition=f32[B, 10]

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class GatedLayer(nn.Module):
    def __init__(self, channels: int, skip: int, condition: int, dilation: int) -> None:
        super().__init__()
        self.gate = nn.Conv1d(channels, 2 * channels, kernel_size=2, dilation=dilation)
        self.condition = nn.Linear(condition, 2 * channels)
        self.residual = nn.Conv1d(channels, channels, 1)
        self.skip = nn.Conv1d(channels, skip, 1)

    def forward(self, x, condition):
        h = self.gate(x) + self.condition(condition).unsqueeze(-1)
        value, gate = h.chunk(2, dim=1)
        h = torch.tanh(value) * torch.sigmoid(gate)
        out = self.residual(h) + x[:, :, -h.size(-1) :]
        return out, self.skip(h)


class WaveNet(nn.Module):
    def __init__(self, layers: int = 4, channels: int = 12, skip: int = 20, levels: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, channels, 1)
        self.layers = nn.ModuleList(GatedLayer(channels, skip, 10, 2**i) for i in range(layers))
        self.out1 = nn.Conv1d(skip, skip, 1)
        self.out2 = nn.Conv1d(skip, levels, 1)

    def forward(self, wave, condition):
        x = self.first(wave)
        skips = []
        for layer in self.layers:
            x, skip = layer(x, condition)
            skips.append(skip)
        length = x.size(-1)
        total = sum(s[:, :, -length:] for s in skips)
        return self.out2(F.relu(self.out1(F.relu(total))))
