"""What may be promoted. Each candidate is proved on every problem anew.

Ours is the fastest that is proved and faster than ``torch.compile``; else the baseline is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchstone.cudagraph import static
from torchstone.kernelbench.columns import BASELINE, Build, Unfit, allowing_tf32, compiled
from torchstone.kernelbench.rewritten import IDENTITIES, Rewritten

__all__ = ["CANDIDATES", "CONTRACTS", "GRAPHED", "Candidate"]

CONTRACTS = (1e-4, 1e-3)
"""Error bounds that ours is reported under: accurate as fp32, and as TF32."""

_COPIED_BYTES = 2**28  # copied in a tenth of a millisecond, in which some twenty kernels are launched


@dataclass(frozen=True)
class Candidate:
    """One way to make a problem faster."""

    name: str
    """Unique among columns and candidates."""
    contract: float
    """The least error bound that it can be expected to meet; it is promoted under any that it proves."""
    build: Callable[..., Any]
    """Makes the callable from a module of its own (training mode, no gradients) and inputs, whose values
    it must not rely on. Its buffers must come out as eager's do."""
    of: str | None = None
    """Column or candidate whose callable it is made from, in place of a module; nothing is compiled."""
    tunes: bool = False
    """As a column's: whether building it measures on the device."""


def _eager(module: nn.Module, _inputs: tuple[Any, ...]) -> Callable[..., Any]:
    return module


@dataclass(frozen=True)
class Allowing:
    """Builds a candidate with TF32 allowed in its products."""

    build: Build
    """Builds it without."""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> Callable[..., Any] | Unfit:
        """The callable, as TF32 would have it."""
        if not _on_cuda(module, inputs):
            return Unfit("TF32 is a format of CUDA devices")
        found = self.build(module, inputs)
        return found if isinstance(found, Unfit) else allowing_tf32(found)


@dataclass(frozen=True)
class Graphed:
    """Builds on what another candidate or column built: all its launches as one."""

    def __call__(self, call: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[..., Any] | Unfit:
        """Inputs are copied in, outputs cloned, so that a result may be held."""
        if not all(x.is_cuda for x in inputs if isinstance(x, torch.Tensor)):
            return Unfit("CUDA graphs need a CUDA device")
        size = sum(x.numel() * x.element_size() for x in inputs if isinstance(x, torch.Tensor))
        if size > _COPIED_BYTES:
            return Unfit("copying its inputs takes longer than launching its kernels")
        graphed = static.Graphed(call)
        graphed(*inputs)
        return Unfit(graphed.refused[0]) if graphed.refused else graphed


def _on_cuda(module: nn.Module, inputs: tuple[Any, ...]) -> bool:
    tensors = [*module.parameters(), *(x for x in inputs if isinstance(x, torch.Tensor))]
    return bool(tensors) and all(t.is_cuda for t in tensors)


GRAPHED = (
    BASELINE,
    "rewrite",
    "bf16x3",
    "rewrite + bf16x3",
    "TF32",
    "fp16 products",
    "rewrite + fp16 products",
    "mixed products",
    "rewrite + mixed products",
)
"""Columns and candidates whose launches are recorded too, where copying the inputs is cheap."""

CANDIDATES: tuple[Candidate, ...] = (
    Candidate("eager as is", 1e-4, _eager),
    Candidate("rewrite", 1e-4, Rewritten()),
    Candidate("rewrite with kernels", 1e-4, Rewritten("all")),
    Candidate("bf16x3", 1e-4, Rewritten(None, "bf16x3")),
    Candidate("rewrite + bf16x3", 1e-4, Rewritten(IDENTITIES, "bf16x3")),
    Candidate("eager as is, TF32", 1e-3, Allowing(_eager)),
    Candidate("TF32", 1e-3, Allowing(compiled)),
    Candidate("rewrite + TF32", 1e-3, Allowing(Rewritten())),
    Candidate("fp16 products", 1e-3, Rewritten(None, "fp16_products")),
    Candidate("rewrite + fp16 products", 1e-3, Rewritten(IDENTITIES, "fp16_products")),
    Candidate("mixed products", 1e-4, Rewritten(None, "mixed_products")),
    Candidate("rewrite + mixed products", 1e-4, Rewritten(IDENTITIES, "mixed_products")),
    *(Candidate(f"{name} + CUDA graph", 1e-4, Graphed(), of=name) for name in GRAPHED),
)
"""In the order in which they are tried."""
