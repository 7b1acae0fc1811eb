"""It changes its input, as an in-place activation at the front does."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x) * 2


def get_inputs():
    return [torch.randn(16, 24)]


def get_init_inputs():
    return []
