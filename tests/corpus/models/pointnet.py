"""PointNet segmentation: a learned transform, global features joined to each point."""

# torchstone: check PointNet(), points=f32[B, 3, N]

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class TNet(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.conv1, self.conv2 = nn.Conv1d(k, 32, 1), nn.Conv1d(32, 64, 1)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, k * k)

    def forward(self, x):
        h = F.relu(self.conv2(F.relu(self.conv1(x))))
        h = torch.max(h, 2)[0]
        h = self.fc2(F.relu(self.fc1(h)))
        identity = torch.eye(self.k, device=x.device).flatten()
        return (h + identity).view(-1, self.k, self.k)


class PointNet(nn.Module):
    def __init__(self, parts: int = 6) -> None:
        super().__init__()
        self.input_transform = TNet(3)
        self.local = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU())
        self.deep = nn.Sequential(
            nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 128, 1)
        )
        self.head = nn.Sequential(nn.Conv1d(128 + 32, 64, 1), nn.ReLU(), nn.Conv1d(64, parts, 1))

    def forward(self, points):
        transform = self.input_transform(points)
        x = torch.bmm(points.transpose(2, 1), transform).transpose(2, 1)
        local = self.local(x)
        whole = self.deep(local).max(dim=2, keepdim=True)[0]
        spread = whole.expand(-1, -1, points.shape[2])
        return self.head(torch.cat([spread, local], dim=1)).transpose(2, 1)
