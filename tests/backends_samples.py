"""Tiny models, their workloads, and how a candidate of one is built and compared with eager."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchstone.backends import jobs
from torchstone.capture import jobs as capture_jobs
from torchstone.records import Build, Capture, Dim, Unsupported
from torchstone.workload import Workload


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weight = mask.unsqueeze(-1).to(torch.float32)
        return (self.table(ids) * weight).sum(1) / weight.sum(1).clamp(min=1)


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)).mean((2, 3))


class Attention(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1)
        return self.out(weights @ v)


class Several(nn.Module):
    """A dict of outputs: computed, none at all, the input itself, a number, a boolean tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"z": y, "none": None, "same": (x, x[:, :2]), "width": x.shape[1], "positive": y > 0}


class Counter(nn.Module):
    """Changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2


class Stateful(nn.Module):
    """Changes a buffer of its own."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x + self.seen


class Branch(nn.Module):
    """Branches on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            return y * 2
        return y - 1


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return x * k


B = Dim(name="B", low=1, high=8)
S = Dim(name="S", low=1, high=512)


@dataclass(frozen=True)
class Sample:
    """A workload and how it was captured."""

    module: nn.Module
    workload: Workload
    capture: Capture
    program: Path | None
    directory: Path

    def build(self, recipe: str, *, load: bool = False, **state: Any) -> tuple[Build | Unsupported, Any]:
        """Run the job in this process; gives its result and the candidate's callable."""
        state |= {"workload": self.workload}
        job = jobs.load if load else jobs.build
        program = None if self.program is None else str(self.program)
        result = job(state, recipe, program, str(self.directory / recipe.replace(" ", "")))
        return result, state.get("call")

    def eager(self, *args: Any) -> list[Any]:
        """Leaves of the module's own outputs; neither it nor the inputs are changed."""
        with torch.no_grad():
            return list(tree_leaves(copy.deepcopy(self.module)(*copy.deepcopy(args))))


def sample(
    directory: Path,
    module: nn.Module,
    inputs: tuple[Any, ...],
    dims: tuple[Dim, ...] = (B,),
    **options: Any,
) -> Sample:
    """Capture a module in this process."""
    shapes: Mapping[str, Any] = options.pop("shapes", {"x": ("B", *inputs[0].shape[1:])})
    module = module.eval()
    workload = Workload(
        name=type(module).__name__,
        model=lambda: copy.deepcopy(module),
        inputs=lambda: copy.deepcopy(inputs),
        dims=dims,
        shapes=shapes,
        **options,
    )
    path = directory / "program.pt2"
    captured = capture_jobs.capture({"workload": workload}, str(path))
    program = path if captured.mode == "export" else None
    return Sample(module, workload, captured, program, directory)


def strided(x: torch.Tensor) -> torch.Tensor:
    doubled = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
    doubled[..., ::2] = x
    return doubled[..., ::2]


def offset(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


LAYOUTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (torch.clone, strided, offset)


def agree(found: tuple[Any, ...], expected: list[Any], tolerance: float) -> None:
    """Same leaves: dtypes and shapes to the letter, floats within ``tolerance`` of their norm."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if not isinstance(b, torch.Tensor):
            assert type(a) is type(b)
            assert a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if b.is_floating_point():
            error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)
            assert error <= tolerance, float(error)
        else:
            assert torch.equal(a, b)


def exercise(
    made: Sample, call: Any, inputs: list[tuple[torch.Tensor, ...]], tolerance: float = 1e-5
) -> None:
    """Compare with eager in every layout; nothing held changes, nothing given is returned."""
    held: list[tuple[tuple[Any, ...], list[Any]]] = []
    for given, layout in itertools.product(inputs, LAYOUTS):
        args = tuple(layout(x) for x in given)
        expected = made.eager(*given)
        found = call(*args)
        agree(found, expected, tolerance)
        mine = {x.untyped_storage().data_ptr() for x in args}
        tensors = [o for o in found if isinstance(o, torch.Tensor)]
        assert not any(o.untyped_storage().data_ptr() in mine for o in tensors)
        held.append((found, expected))
    for found, expected in held:
        agree(found, expected, tolerance)
