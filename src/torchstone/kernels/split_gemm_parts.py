"""Float32 numbers as sums of bfloat16 parts, and products of them.

A float32 number is the sum of bfloat16 parts, ``a = a1 + a2 + a3``, each the nearest to what those
before it leave. With two parts (``x3``) ``a b`` is taken to be ``a1 b1 + a1 b2 + a2 b1``; with three
(``x6``) the six products ``ai bj`` with ``i + j <= 4`` are summed. Products of bfloat16 are exact in
float32, in which they are summed. Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial
intelligence datatype for higher-precision computations" (2019); Ootomo, Yokota, "Recovering single
precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance" (2022).

*Error.* For ``2**e <= |a| < 2**(e+1)`` rounding to 8 bits leaves at most ``2**(e-8)``, a multiple of
``2**(e-23)``; the second part leaves at most ``2**(e-17)``, and that has 7 bits, so that the third
leaves nothing. Hence ``|a - a1| <= 2**-8 |a|``, ``|a - a1 - a2| <= 2**-17 |a|`` and ``a = a1 + a2 +
a3``. What the products leave out (of x3 ``a2 b2`` and the remainders; of x6 ``a2 b3 + a3 b2 + a3 b3``)
is at most :data:`LEFT_OUT` times the sum of ``|a| |b|``: beyond it there is only the rounding of sums
in float32. x6 therefore counts as a reordering of the float32 product (REASSOCIATES), x3 as LOSSY.

Element by element, the error of x6 is 0.4 to 1 of that of float32 on normal numbers, and at most 1.06
of it for sums that few products dominate. Relative (Frobenius) error on a CPU, (64, k) by (k, 96),
float32 by MKL:

====  =======  =======  =======  =======  =======  =======
k     normal                     uniform in [0, 1)
----  -------------------------  -------------------------
..    fp32     x3       x6       fp32     x3       x6
====  =======  =======  =======  =======  =======  =======
64    1.4e-07  4.4e-06  5.7e-08  1.2e-07  6.2e-07  5.6e-08
512   2.9e-07  4.4e-06  1.1e-07  1.6e-07  2.4e-07  9.5e-08
2048  3.4e-07  4.4e-06  1.2e-07  1.3e-07  1.3e-07  6.3e-08
8192  3.6e-07  4.5e-06  1.5e-07  9.2e-08  9.8e-08  8.1e-08
====  =======  =======  =======  =======  =======  =======

*Range.* Parts of numbers below ``2**-110`` would lose bits to bfloat16's smallest, ``2**-133``. So both
sides are multiplied by :data:`SCALE` first: every float32 is a multiple of ``2**-149``, which makes it
one of ``2**-133``, and bfloat16 holds these without a gap. It is exact, and subnormal numbers keep the
bounds above. At the other end magnitudes from ``2**112`` and sums from ``2**96`` overflow; they,
infinities and NaN make the sum infinite or NaN, which no later step undoes. So exactly the sums that
are not finite are computed anew in plain float32, on the device and without telling the host. For
weights that are split ahead of time :func:`split_range` tells whether they can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "EPILOGUES",
    "LEFT_OUT",
    "SCALE",
    "Range",
    "multiplied",
    "parts_of",
    "recombined",
    "split_range",
]

SCALE = 2.0**16
"""What numbers are multiplied by before they are split; parts are those of the scaled number."""

LEFT_OUT = {2: 2.0**-15 * (1 + 2.0**-17), 3: 2.0**-24 * (1 + 2.0**-9)}
"""For 2 and 3 parts: bound of what the products leave out, times the sum of ``|a| |b|``."""

EPILOGUES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""What may follow a product and its bias, in float32."""

_CHUNK = 256
"""Products that are summed before they are added to the total, without Triton."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Magnitudes of a tensor, as far as splitting it is concerned."""

    finite: bool
    """No infinity and no NaN."""
    largest: float
    """Largest magnitude, NaN left out; 0 of none."""
    smallest: float
    """Smallest magnitude beside 0; 0 of none. Whatever it is, nothing is lost."""

    @property
    def refuses(self) -> str | None:
        """Why the tensor must not be split ahead of time; None if it may be."""
        if not self.finite:
            return "there are infinite elements or NaN"
        if self.largest * SCALE >= (2 - 2.0**-8) * 2.0**127:  # bfloat16 rounds it to infinity
            return (
                f"magnitudes up to {self.largest:.3g} have no bfloat16 parts at a scale of {SCALE:.0f}"
            )
        return None


def split_range(w: Tensor) -> Range:
    """Magnitudes of float32 weights of any shape: ask ahead of time whether they can be split."""
    size = w.detach().abs()
    known, used = size[~size.isnan()], size[size > 0]
    return Range(
        finite=bool(size.isfinite().all()),
        largest=float(known.max()) if known.numel() else 0.0,
        smallest=float(used.min()) if used.numel() else 0.0,
    )


def recombined(w_parts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What parts (parts, ...) stand for: the weights again, exactly for three parts of float32.

    Summed from the smallest: the sums then need no rounding.
    """
    total = torch.zeros(
        w_parts.shape[1:], dtype=torch.promote_types(dtype, torch.float32), device=w_parts.device
    )
    for part in w_parts.flip(0):
        total = total + part
    return (total / SCALE).to(dtype)


def parts_of(v: Tensor, parts: int) -> list[Tensor]:
    """Parts of ``2**16 v``; those after one that is not finite are 0: the first tells what it was."""
    rest, found = v * SCALE, []
    for _ in range(parts):
        found.append(rest.bfloat16())
        rest = torch.where(found[-1].isfinite(), rest - found[-1].float(), 0.0)
    return found


def _summed(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """The products of parts ``ai bj``, scaled back: the sums that the device kernel forms, by PyTorch.

    :param a: float32 parts (batch, m, k).
    :param b: as many, (batch or 1, n, k).
    """
    parts, (batch, m, k), n = len(a), a[0].shape, b[0].shape[1]
    total = a[0].new_zeros((batch, m, n))
    for start in range(0, k, _CHUNK):
        here = slice(start, start + _CHUNK)
        chunk = torch.zeros_like(total)
        for order in range(parts - 1, -1, -1):  # the small ones first
            for i in range(order + 1):
                chunk += a[i][..., here] @ b[order - i][..., here].mT
        total += chunk
    return total / SCALE**2


def multiplied(a: Tensor, b: Tensor, bias: Tensor | None, parts: int, epilogue: str) -> Tensor:
    """``epilogue(a @ b.mT + bias)`` by PyTorch, with the error of the device code and not its speed.

    :param a: float32 (batch, m, k).
    :param b: float32 (batch, n, k), or bfloat16 parts (parts, n, k) of one for all batches.
    :param bias: float32 (n,).
    """
    split = b.dtype is torch.bfloat16
    b_parts = [p[None] for p in b] if split else parts_of(b, parts)
    y = _summed([p.float() for p in parts_of(a, parts)], [p.float() for p in b_parts])
    held = y.isfinite()
    if not held.all():
        y = torch.where(held, y, a @ (recombined(b)[None] if split else b).mT)
    return EPILOGUES[epilogue](y if bias is None else y + bias)
