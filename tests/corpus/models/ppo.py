"""A PPO actor-critic with a shared trunk, and its clipped loss."""

# torchstone: check PPO(), state=f32[N, 8], action=f32[N, 2], old=f32[N], advantage=f32[N], target=f32[N]

from __future__ import annotations

import math

import torch
from torch import nn


class ActorCritic(nn.Module):
    def __init__(self, states: int = 8, actions: int = 2, hidden: int = 64) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(states, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()
        )
        self.mean = nn.Linear(hidden, actions)
        self.log_std = nn.Parameter(torch.zeros(actions))
        self.critic = nn.Linear(hidden, 1)

    def forward(self, state):
        h = self.trunk(state)
        return self.mean(h), self.log_std.exp(), self.critic(h).squeeze(-1)


class PPO(nn.Module):
    def __init__(self, clip: float = 0.2) -> None:
        super().__init__()
        self.policy = ActorCritic()
        self.clip = clip

    def forward(self, state, action, old, advantage, target):
        mean, std, value = self.policy(state)
        log_prob = -((action - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
        log_prob = log_prob.sum(-1)
        ratio = (log_prob - old).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        gain = torch.min(ratio * advantage, clipped * advantage).mean()
        return nn.functional.mse_loss(value, target) - gain
