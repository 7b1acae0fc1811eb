"""It ends its process."""

import os

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os._exit(7)


def get_inputs():
    return [torch.rand(4)]


def get_init_inputs():
    return []
