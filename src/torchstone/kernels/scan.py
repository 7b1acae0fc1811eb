"""Running sums and products along any dimension: from either end, with or without the element, under a
mask.
"""

from __future__ import annotations

from typing import Any

import torch

from torchstone.kernels import base
from torchstone.kernels.base import Kernel, number
from torchstone.kernels.reduce import reducing_space
from torchstone.kernels.softmax import row_sizes
from torchstone.records.tuning import Config
from torchstone.tuner.space import Space

__all__ = ["KERNEL"]

Mask = torch.Tensor | None


def reference(  # noqa: PLR0913
    x: torch.Tensor, mask: Mask, kind: str, dim: int, reverse: bool, exclusive: bool
) -> torch.Tensor:
    """``torch.cumsum`` or ``torch.cumprod``, float32 at least inside, in the direction that is asked
    for.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    empty = float(kind == "prod")
    if mask is not None:
        wide = torch.where(mask, wide, empty)
    wide = wide.flip(dim) if reverse else wide
    if exclusive and x.dim():
        first = torch.full_like(wide.narrow(dim, 0, 1), empty)
        wide = torch.cat([first, wide.narrow(dim, 0, wide.shape[dim] - 1)], dim)
    elif exclusive:
        wide = torch.full_like(wide, empty)
    found = wide.cumsum(dim) if kind == "sum" else wide.cumprod(dim)
    return (found.flip(dim) if reverse else found).to(x.dtype)


def refuses(  # noqa: PLR0913
    x: torch.Tensor, mask: Mask, kind: str, dim: int, reverse: bool, exclusive: bool
) -> str | None:
    """See :attr:`~torchstone.kernels.base.Kernel.refuses`."""
    if kind not in ("sum", "prod"):
        return f"no scan is called {kind}"
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape):
        return "the mask is not boolean, or not of the same shape"
    return base.unfit(x, mask)


def _dim(x: torch.Tensor, dim: int) -> tuple[int, int]:
    return (dim % x.dim(),) * 2 if x.dim() else (0, -1)


def sizes(  # noqa: PLR0913
    x: torch.Tensor, mask: Mask, kind: str, dim: int, reverse: bool, exclusive: bool
) -> dict[str, int]:
    """``outer``, ``n``, ``inner``."""
    return row_sizes(x, *_dim(x, dim))


def work(  # noqa: PLR0913
    x: torch.Tensor, mask: Mask, kind: str, dim: int, reverse: bool, exclusive: bool
) -> tuple[float, float]:
    """Read once, written once; a copy is a further read and write."""
    copies = 2 if base.copied(x, *_dim(x, dim)) else 1
    return 2.0 * copies * base.bytes_of(x) + base.bytes_of(mask), float(x.numel())


def space(  # noqa: PLR0913
    x: torch.Tensor, mask: Mask, kind: str, dim: int, reverse: bool, exclusive: bool
) -> Space:
    """See :func:`~torchstone.kernels.reduce.reducing_space`."""
    found = reducing_space(sizes(x, mask, kind, dim, reverse, exclusive), base.multiprocessors(x.device))
    return found.restricted(
        lambda c: number(c, "rows") * number(c, "block") <= 32 * 32 * number(c, "warps")
    )


def launch(config: Config, *args: Any) -> torch.Tensor:
    """Run Triton with one config."""
    from torchstone.kernels.device import scan as device

    x, mask, kind, dim, reverse, exclusive = args
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    under = None if mask is None else base.rows_of(mask, *_dim(x, dim))
    device.run(config, base.rows_of(x, *_dim(x, dim)), under, y, (kind, reverse, exclusive))
    return y


def _fake(  # noqa: PLR0913
    x: torch.Tensor, mask: Mask, kind: str, dim: int, reverse: bool, exclusive: bool
) -> torch.Tensor:
    return x.new_empty(x.shape)


KERNEL = base.kernel(
    "scan(Tensor x, Tensor? mask, str kind, int dim, bool reverse, bool exclusive) -> Tensor",
    _fake,
    Kernel(
        name="scan",
        op=reference,
        reference=reference,
        refuses=refuses,
        sizes=sizes,
        work=work,
        space=space,
        launch=launch,
        device="scan",
        follow=lambda shape, x, mask, *rest: () if mask is None else (shape,),
    ),
)
"""``scan(x, mask, kind, dim, reverse, exclusive)``, kind ``sum`` or ``prod``. What the mask leaves out
counts as if it were not there, NaN and infinities included."""
