"""A Siamese network on 105 x 105 drawings, compared by weighted distance; declared in Pyrefly's way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from shape_extensions import IntVar

    B = IntVar("B")


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 10),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 7),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 4),
            nn.ReLU(),
        )
        self.embed = nn.Sequential(nn.Flatten(), nn.Linear(64 * 6 * 6, 128), nn.Sigmoid())
        self.out = nn.Linear(128, 1)

    def one(self, x: Tensor[[B, 1, 105, 105]]) -> Tensor:
        return self.embed(self.features(x))

    def forward(self, left: Tensor[[B, 1, 105, 105]], right: Tensor[[B, 1, 105, 105]]) -> Tensor:
        distance = torch.abs(self.one(left) - self.one(right))
        return self.out(distance).squeeze(-1)
