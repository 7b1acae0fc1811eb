"""Convolutions of the captured graph as ``torchstone::half_conv``, with half or with split operands.

Split: both operands are taken apart into two bfloat16 parts, and the three products that count are one
convolution over three times the channels, ``[h, l, h] * [h, h, l]``. Parts are taken by their bits,
since a compiler drops a cast there and back. :mod:`torchstone.kernels.split_gemm_parts` has the bounds
of what is left out; here nothing is scaled first, so that below ``2**-110`` parts lose bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from torchstone.kernels import implicit_gemm
from torchstone.quantize.matrix import followed
from torchstone.rewrite.families.arguments import each

__all__ = ["Convolution", "laid", "parts_of", "split"]

aten = torch.ops.aten
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_CHANNELS = 8
"""Channels are a multiple of this: 16 bytes of one place."""


@dataclass(frozen=True)
class Convolution:
    """A convolution of one group that :data:`torchstone.kernels.implicit_gemm.KERNEL` can compute."""

    last: fx.Node
    """The last node that it replaces: the convolution, or the function that alone reads it."""
    given: dict[str, Any]
    """``x``, ``weight`` and ``bias``."""
    how: tuple[list[int], list[int], list[int], str]
    """Stride, padding, dilation, and what follows."""

    @classmethod
    def of(cls, node: fx.Node) -> Convolution | None:
        """The convolution that a normalized node is; None for what is none."""
        if node.target not in _CONVOLUTIONS:
            return None
        args: Any = node.args
        x, weight = (n.meta["val"] for n in args[:2])
        many = weight.dim() - 2
        found = [each(v, many) for v in args[3:6]]
        known = [list(v) for v in found if v is not None]
        if args[6] != 1 or x.dim() != weight.dim() or len(known) != len(found):
            return None
        last, name = followed(node)
        if name == "gelu_tanh":
            last, name = node, "none"
        given = {"x": args[0], "weight": args[1], "bias": args[2]}
        return cls(last, given, (known[0], known[1], known[2], name))


def laid(x: Tensor) -> Tensor:
    """(batch, channels, ...) as the kernel reads it: channels last, and zeros up to a multiple of 8."""
    missing = -x.shape[1] % _CHANNELS
    if missing:
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing])
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def parts_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 as the sum of two bfloat16 numbers: the nearest, and the nearest to what that leaves.

    By bits: 16 of them are cut off after half of their unit was added. Infinities and NaN are the first
    part's.
    """
    bits = (x.contiguous().view(torch.int32) + 0x8000) & -0x10000
    high = bits.view(torch.float32)
    high = torch.where(x.isfinite(), high, x)
    low = torch.where(high.isfinite(), x - high, 0.0)
    return high.to(torch.bfloat16), low.to(torch.bfloat16)


def split(convolution: Convolution) -> Any:
    """The replacement: a function of ``x``, ``weight`` and ``bias``."""
    assert implicit_gemm.KERNEL.op is not None  # the import registers the operator

    def made(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (high, low), (heavy, light) = parts_of(x), parts_of(weight)
        left = laid(torch.cat([high, low, high], 1))
        right = laid(torch.cat([heavy, heavy, light], 1))
        found: Tensor = torch.ops.torchstone.half_conv(left, right, bias, None, None, *convolution.how)
        return found

    return made
