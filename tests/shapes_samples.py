"""Models with one thing about shapes each. Not in a test module, where pytest rewrites asserts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchstone.records import Arrival, Dim
from torchstone.workload import Workload

B = Dim(name="B", low=1, high=256)
C = Dim(name="C", low=1, high=256)
S = Dim(name="S", low=1, high=256)
Shapes = Mapping[str, tuple[int | str, ...]]
ONE: Shapes = {"x": ("B", 4)}
TWO: Shapes = {"x": ("B", 4), "y": ("C", 4)}


def workload(
    forward: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    shaped: Shapes,
    dims: Sequence[Dim] = (B, C, S),
    traffic: Sequence[Mapping[str, int]] = (),
) -> Workload:
    """A model of which ``forward`` is all; ``self`` is its module."""
    module = type("Model", (nn.Module,), {"forward": forward})()
    used = {str(size).rpartition("*")[2] for shape in shaped.values() for size in shape}
    return Workload(
        name=getattr(forward, "__name__", "model"),
        model=lambda: module,
        inputs=lambda: tuple(inputs),
        dims=tuple(d for d in dims if d.name in used),
        shapes=dict(shaped),
        traffic=tuple(Arrival(sizes=dict(sizes)) for sizes in traffic),
    )


# --- branches -------------------------------------------------------------------------------------


def on_value(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x * 2
    return x


def on_length(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 128:
        return x * 2
    return x


def on_nothing(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] == 0 else x


def on_single(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == 1:
        return x * 2
    return x


def on_found(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = x.nonzero()
    if found.shape[0] > 3:
        return found * 2
    return found


# --- sizes as integers ----------------------------------------------------------------------------


def loop(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    total = x[0]
    for i in range(x.shape[0]):
        total = total + x[i]
    return total


def loop_of_value(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    n = int(x[0, 0].item())
    for _ in range(n):
        x = x + 1
    return x


def integer(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.full((int(x.shape[0]),), 1.0) + x[:, 0]


def length_from_item(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor(list(range(len(x)))).max().item() + 1
    return x[:rows] + 1


# --- conditions on sizes --------------------------------------------------------------------------


def odd(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert x.shape[0] % 2 == 1, "odd please"
    return x + 1


def eights(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0] // 8, 8, 4).sum(0)


def added(self: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def checked(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch._check(x.shape[0] <= 16, lambda: "short please")
    return x + 1


def widened(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(7, 3)


def joined(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, torch.ones(5, 5)])


def equal(self: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    torch._check(y.size()[0] == x.size()[0])
    return x
