"""A right one with parameters, and more than one output, one of them of integers."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.nn.functional.gelu(self.linear(x))
        return y, y.argmax(dim=1)


def get_inputs():
    return [torch.rand(24, 48)]


def get_init_inputs():
    return [48, 32]
