"""Dropout is live: no two calls agree."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(share)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x)


def get_inputs():
    return [torch.rand(32, 16)]


def get_init_inputs():
    return [0.5]
