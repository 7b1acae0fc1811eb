"""What a problem is timed as, beside ours: eager, and the compiler as users may ask for it.

The *strong baseline* is the best of the columns that say so: ``torch.compile``'s default and both of its
autotuned modes, all with TF32 allowed. No single one will do: autotuning with CUDA graphs copies large
inputs and loses to the default there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

__all__ = ["BASELINE", "COLUMNS", "Column", "Noted", "Unfit", "allowing_tf32", "compiled"]

Call = Callable[..., Any]
Mode = Literal["default", "max-autotune", "max-autotune-no-cudagraphs"]

BASELINE = "compile"
"""What speed-ups are told against: ``torch.compile`` with nothing said."""


@dataclass(frozen=True)
class Unfit:
    """Why something cannot be built here."""

    why: str
    """One clause."""


@dataclass(frozen=True)
class Noted:
    """A callable, and what it was made of."""

    call: Call
    """The callable."""
    note: str
    """What was done to the problem, in few words."""

    def __call__(self, *inputs: Any) -> Any:
        """Call it."""
        return self.call(*inputs)


Build = Callable[[nn.Module, tuple[Any, ...]], Call | Unfit]
"""Makes a callable of a model of its own and the problem's inputs; both are on the device already."""


@dataclass(frozen=True)
class Column:
    """One way to run a problem."""

    name: str
    """Unique among columns and candidates."""
    build: Build
    """Makes the callable; compilation may happen at its first call."""
    strong: bool = False
    """Whether it takes part in the strong baseline."""
    tunes: bool = False
    """Whether building it measures on the device; such builds are made one at a time, since what they
    choose would be left to chance among others that measure."""


def allowing_tf32(call: Call) -> Call:
    """The call with TF32 allowed in matrix products and convolutions, and as it was afterwards."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn

    def allowed(*inputs: Any) -> Any:
        before = products.allow_tf32, convolutions.allow_tf32
        products.allow_tf32 = convolutions.allow_tf32 = True
        try:
            return call(*inputs)
        finally:
            products.allow_tf32, convolutions.allow_tf32 = before

    return allowed


def compiled(
    module: nn.Module, _inputs: tuple[Any, ...], mode: Mode = "default", tf32: bool = False
) -> Call:
    """``torch.compile``; it compiles at the first call."""
    call: Call = torch.compile(module, mode=mode)
    return allowing_tf32(call) if tf32 else call


def _eager(module: nn.Module, _inputs: tuple[Any, ...]) -> Call:
    return module


COLUMNS: tuple[Column, ...] = (
    Column("eager", _eager),
    Column(BASELINE, compiled),
    Column("compile+tf32", partial(compiled, tf32=True), strong=True),
    Column("max-autotune", partial(compiled, mode="max-autotune", tf32=True), strong=True, tunes=True),
    Column(
        "max-autotune-no-cudagraphs",
        partial(compiled, mode="max-autotune-no-cudagraphs", tf32=True),
        strong=True,
        tunes=True,
    ),
)
"""In the order of the report."""
