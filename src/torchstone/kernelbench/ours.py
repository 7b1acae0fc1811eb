"""What may be promoted. Each candidate is proved on every problem anew.

Ours is the fastest that is proved and faster than ``torch.compile``; else the baseline is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from torchstone.kernelbench.columns import Build, Unfit, allowing_tf32
from torchstone.kernelbench.rewritten import IDENTITIES, Rewritten

__all__ = ["CANDIDATES", "CONTRACTS", "Candidate"]

CONTRACTS = (1e-4, 1e-3)
"""Error bounds that ours is reported under: accurate as fp32, and as TF32."""

_COPIED_BYTES = 2**28  # copied in a tenth of a millisecond, in which some twenty kernels are launched
_WARM_CALLS = 3  # what a CUDA graph captures must have compiled and allocated all that it needs


@dataclass(frozen=True)
class Candidate:
    """One way to make a problem faster."""

    name: str
    """Unique among columns and candidates."""
    contract: float
    """The least error bound that it can be expected to meet; it is promoted under any that it proves."""
    build: Build
    """Makes the callable from a module of its own (training mode, no gradients) and inputs, whose values
    it must not rely on. Its buffers must come out as eager's do."""
    tunes: bool = False
    """As a column's: whether building it measures on the device."""


def _eager(module: nn.Module, _inputs: tuple[Any, ...]) -> Callable[..., Any]:
    return module


def _channels_last(module: nn.Module, _inputs: tuple[Any, ...]) -> Callable[..., Any] | Unfit:
    """Convolutions see the layout that their quickest kernels want; conversions are part of the call."""
    flat = any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in module.modules())
    solid = any(isinstance(m, nn.Conv3d | nn.ConvTranspose3d) for m in module.modules())
    if flat == solid:
        return Unfit(
            "has convolutions over 2 and over 3 dims" if flat else "has no convolution to lay out"
        )
    layout = torch.channels_last_3d if solid else torch.channels_last
    dims = 5 if solid else 4
    module.to(memory_format=layout)  # type: ignore[call-overload] # torch's stub knows 4 dims only

    def laid_out(*inputs: Any) -> Any:
        given = [
            x.contiguous(memory_format=layout) if isinstance(x, torch.Tensor) and x.dim() == dims else x
            for x in inputs
        ]
        return tree_map(_contiguous, module(*given))

    return torch.compile(laid_out)


def _tf32(module: nn.Module, _inputs: tuple[Any, ...]) -> Callable[..., Any] | Unfit:
    if not _on_cuda(module, _inputs):
        return Unfit("TF32 is a format of CUDA devices")
    return allowing_tf32(torch.compile(module))


def _bf16(module: nn.Module, inputs: tuple[Any, ...]) -> Callable[..., Any] | Unfit:
    kind = "cuda" if _on_cuda(module, inputs) else "cpu"
    dtypes = {x.dtype for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()}
    if dtypes != {torch.float32}:
        return Unfit("its inputs are not float32")

    def autocast(*given: Any) -> Any:
        with torch.autocast(kind, torch.bfloat16):
            result = module(*given)
        return tree_map(_single, result)

    return torch.compile(autocast)


def _graphed(module: nn.Module, inputs: tuple[Any, ...]) -> Callable[..., Any] | Unfit:
    """One launch for all kernels. Inputs are copied in, outputs cloned, so that a result may be held."""
    if not _on_cuda(module, inputs):
        return Unfit("CUDA graphs need a CUDA device")
    size = sum(x.numel() * x.element_size() for x in inputs if isinstance(x, torch.Tensor))
    if size > _COPIED_BYTES:
        return Unfit("copying its inputs takes longer than launching its kernels")
    call = torch.compile(module)
    held = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, inputs)
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARM_CALLS):
            call(*held)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*held)

    def replay(*given: Any) -> Any:
        for place, value in zip(held, given, strict=True):
            if isinstance(place, torch.Tensor):
                place.copy_(value)
        graph.replay()
        return tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, result)

    return replay


def _on_cuda(module: nn.Module, inputs: tuple[Any, ...]) -> bool:
    tensors = [*module.parameters(), *(x for x in inputs if isinstance(x, torch.Tensor))]
    return bool(tensors) and all(t.is_cuda for t in tensors)


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _single(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if half else value


CANDIDATES: tuple[Candidate, ...] = (
    Candidate("eager as is", 1e-4, _eager),
    Candidate("channels-last", 1e-4, _channels_last),
    Candidate("static CUDA graph", 1e-4, _graphed),
    Candidate("rewrite", 1e-4, Rewritten(), tunes=True),
    Candidate("rewrite with kernels", 1e-4, Rewritten("all"), tunes=True),
    Candidate("bf16x3", 1e-4, Rewritten(None, "bf16x3")),
    Candidate("rewrite + bf16x3", 1e-4, Rewritten(IDENTITIES, "bf16x3"), tunes=True),
    Candidate("rewrite with kernels + bf16x3", 1e-4, Rewritten("all", "bf16x3"), tunes=True),
    Candidate("TF32", 1e-3, _tf32),
    Candidate("bf16 autocast", 1e-2, _bf16),
)
"""In the order in which they are tried."""
