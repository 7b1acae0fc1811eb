"""Models whose recompiles, or lack of them, are known failures of torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchstone.workload import Workload


def workload(module: nn.Module, inputs: Any, **options: Any) -> Workload:
    return Workload(name="w", model=lambda: module, inputs=lambda: inputs, **options)


class Switch:
    factor = 1.0


class OfClass(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * Switch.factor


class Stepped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.step


def advance(module: nn.Module) -> None:
    module.step += 1  # type: ignore[operator, assignment] # a plain number


def raise_factor(_: nn.Module) -> None:
    Switch.factor *= 2


class Optimizer(nn.Module):
    """Adam by hand: pytorch#185382."""

    def forward(self, start: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        t = torch.zeros(())
        for _ in range(5):
            adam_step(p, grad, m, v, t)
        return p


def adam_step(
    p: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, t: torch.Tensor
) -> None:
    t.add_(1)
    m.mul_(0.9).add_(grad, alpha=0.1)
    v.mul_(0.999).addcmul_(grad, grad, value=0.001)
    step = t.item()
    first, second = 1 - 0.9**step, 1 - 0.999**step
    denominator = (v.sqrt() / (second**0.5)).add_(1e-8)
    p.addcdiv_(m, denominator, value=-0.001 / first)
