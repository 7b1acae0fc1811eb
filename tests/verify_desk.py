"""Drives the verification jobs in this process: the same jobs, states and files, without spawning."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchstone.errors import InputError
from torchstone.policy import Policy
from torchstone.recipe import Recipe, parse
from torchstone.records import Crashed, Dim, ReferenceErrors, Verdict, VerdictEntry
from torchstone.verify import inputs, run
from torchstone.workload import Workload

torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other

EXACT, REASSOCIATES, LOSSY = parse("eager"), parse("aotinductor"), parse("aotinductor + precision(bf16)")


@dataclass
class Here:
    """Answers jobs in this process."""

    state: dict[str, Any] = field(default_factory=dict)

    def call(self, target: str, /, *, stage: str, limit_s: float, **kwargs: object) -> Any:
        module, _, name = target.partition(":")
        try:
            return getattr(importlib.import_module(module), name)(self.state, **kwargs)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 # as in the worker: a candidate may raise anything
            text = f"{type(error).__name__}: {error}"
            return Crashed(stage=stage, kind="exception", text=text, log="")


class Bench:
    """A workload with its references, on which candidates are judged."""

    def __init__(self, workload: Workload, directory: Path, seed: int = 0) -> None:
        self.workload = workload
        self.directory = directory
        self.cases = inputs.cases(workload.spec(), seed)
        self.reference = Here({"workload": workload})
        self.known: tuple[ReferenceErrors, ...] = run.references(
            self.reference, self.cases, directory / "reference", 60.0
        )

    def entry(
        self,
        make: Callable[[nn.Module], Callable[..., Any]],
        recipe: Recipe = REASSOCIATES,
        policy: Policy | None = None,
    ) -> VerdictEntry:
        """The verdict, with its evidence, on what ``make`` makes of the model."""
        module = copy.deepcopy(self.workload.module())
        made = make(module)

        def call(*given: Any) -> tuple[Any, ...]:
            return tuple(tree_leaves(made(*given)))

        state = {"workload": self.workload, "module": module, "call": call}
        desk = run.Desk(
            candidate=Here(state),
            reference=self.reference,
            references=self.directory / "reference",
            results=self.directory / "results",
        )
        return run.verify(recipe, desk, self.known, policy or self.workload.policy)

    def verdict(
        self,
        make: Callable[[nn.Module], Callable[..., Any]],
        recipe: Recipe = REASSOCIATES,
        policy: Policy | None = None,
    ) -> Verdict:
        """The verdict alone."""
        return self.entry(make, recipe, policy).verdict


class Block(nn.Module):
    """Pre-norm causal attention with a class label for each position: floats and integers come out."""

    def __init__(self, width: int = 16, causal: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.causal = causal

    def forward(self, x_bsd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(self.norm(x_bsd)).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(self.causal)
        y_bsd = self.out(scores.masked_fill(hidden, -1e4).softmax(-1) @ v)
        return y_bsd, y_bsd.argmax(-1)


def block() -> nn.Module:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Block().eval()


def block_inputs() -> tuple[torch.Tensor]:
    return (torch.randn(3, 10, 16, generator=torch.Generator().manual_seed(5)),)


BLOCK_DIMS = (Dim(name="B", low=1, high=6), Dim(name="S", low=1, high=24))


def block_workload(**changes: Any) -> Workload:
    """The block with batch 1..6 and length 1..24."""
    facts: dict[str, Any] = {
        "name": "block",
        "model": block,
        "inputs": block_inputs,
        "dims": BLOCK_DIMS,
        "shapes": {"x_bsd": ("B", "S", 16)},
    }
    return Workload(**(facts | changes))


class Identity(nn.Module):
    """Gives a copy of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0


def of_module(module: nn.Module, *example: torch.Tensor, **more: Any) -> Workload:
    """A workload of one module and its example, without dims unless given."""
    return Workload(
        name="case", model=lambda: module, inputs=lambda: tuple(e.clone() for e in example), **more
    )
