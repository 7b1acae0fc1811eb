"""A duelling deep Q-network on stacked frames."""

# torchstone: check DuellingDQN(), frames=f32[B, 4, 84, 84], actions=i64[B]

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class DuellingDQN(nn.Module):
    def __init__(self, frames: int = 4, actions: int = 6) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(frames, 32, kernel_size=8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, kernel_size=3, stride=1)
        self.value = nn.Sequential(nn.Linear(64 * 7 * 7, 256), nn.ReLU(), nn.Linear(256, 1))
        self.advantage = nn.Sequential(nn.Linear(64 * 7 * 7, 256), nn.ReLU(), nn.Linear(256, actions))

    def forward(self, frames: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        x = frames / 255.0
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        x = x.flatten(start_dim=1)
        advantage = self.advantage(x)
        q = self.value(x) + advantage - advantage.mean(dim=1, keepdim=True)
        return q.gather(1, actions.unsqueeze(1)).squeeze(1)
