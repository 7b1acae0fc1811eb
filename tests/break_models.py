"""Models that break graphs, one way each, and the same with the edit that is said to help."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

logger = logging.getLogger(__name__)


class Prints(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        print("rows", x.shape[0])
        return x * 2


class Warns(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        warnings.warn("careful")  # noqa: B028  keywords are not reordered by torch 2.14
        return x * 2


class Logs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        logger.info("at work")
        return x * 2


class Item(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum().item()
        return x * total


class Int(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: int(x[0, 0])] * 2


class List(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = (x + 1).tolist()
        return torch.tensor(values) * 2


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x - 1


class Masks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2


class NumpyRandom(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1) * np.random.rand()


class Clock(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        time.time()
        return x * 2


class Opens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        open(__file__).close()
        return x * 2


class Disabled(nn.Module):
    @torch.compiler.disable
    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(x + 1) * 2


class Computes(nn.Module):
    """Without a break: what :class:`Item`, :class:`Branches`, :class:`Masks` and others should be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * x.sum()
        x = torch.where(x.sum() > 0, x * 2, x - 1)
        x = torch.where(x > 0, x, 0) * torch.rand(())
        return x.clone()


class Conditional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))


@torch.library.custom_op("torchstone_tests::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    time.time()
    return x * 3


@thrice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Wraps(nn.Module):
    """What :class:`Disabled` should be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return thrice(x + 1) * 2


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0] * 2


class Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Asks()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(x)) + 1


class Outer(nn.Module):
    """A break two calls deep."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = Middle()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.middle(self.linear(x)))


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Asks() for _ in range(3)])
        self.last = nn.Linear(4, 4)


class Loops(_Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class LoopsOverNumbers(_Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(len(self.blocks)):
            x = self.blocks[i](x)
        return self.last(x)


class Unrolled(_Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.blocks
        return self.last(c(b(a(x))))


class Recursive(_Blocks):
    def after(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return self.after(i + 1, self.blocks[i](x)) if i < len(self.blocks) else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.after(0, x))


class Tries(_Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.blocks[0](x)
        except ValueError:
            x = x - 1
        return self.last(x)


class TriesLess(_Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            width = x.shape[1]
        except IndexError:
            width = 0
        return self.last(self.blocks[0](x)) + width


class Comprehends(_Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [block(x) for block in self.blocks]
        return self.last(parts[0] + parts[1])


class Listed(_Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.blocks
        parts = [a(x), b(x), c(x)]
        return self.last(parts[0] + parts[1])


class Generates(_Blocks):
    def parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self.blocks[0](x)
        yield self.blocks[1](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.parts(x)
        return self.last(a + b)


class Returns(_Blocks):
    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.blocks[0](x)
        return first, self.blocks[1](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.parts(x)
        return self.last(a + b)


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not today")
