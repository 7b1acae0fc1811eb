"""A constant, to the bit."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(x, min=2.0, max=2.0)


def get_inputs():
    return [torch.rand(16, 8)]


def get_init_inputs():
    return []
