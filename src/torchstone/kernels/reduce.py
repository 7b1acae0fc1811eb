"""Sum, mean, largest, least, product over any dimensions; the largest or least with its place over one
or all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from torchstone.kernels import base
from torchstone.kernels.base import Kernel, number, power
from torchstone.kernels.softmax import MOST_PER_THREAD, row_sizes
from torchstone.records.tuning import Config
from torchstone.tuner.space import Choice, Integer, PowerOfTwo, Space

__all__ = ["KERNELS", "reducing_space"]

_KINDS = ("sum", "mean", "amax", "amin", "prod")
_ARGS = ("max", "min")


def reducing_space(found: dict[str, int], processors: int) -> Space:
    """The space of kernels that read rows in blocks, once, by one program each or by several
    (``split``).

    :param found: ``outer``, ``n`` and ``inner``.
    """
    outer, n, inner = (found[k] for k in ("outer", "n", "inner"))
    whole, others = power(n), power(inner if inner > 1 else outer)
    if inner > 1:
        rows = min(others, 128)
        block = min(whole, 4096 // rows)
        count = outer * -(-inner // rows)
    else:
        rows = min(others, max(1, 1024 // whole))
        block = min(whole, 4096)
        count = -(-outer // rows)
    way = "split" if count < 2 * processors and n >= 4 * block else "stream"
    warps = min(8, max(1, power(rows * block // 512)))

    def fits(config: Config) -> str | None:
        each = number(config, "rows") * number(config, "block") / (32 * number(config, "warps"))
        if each > MOST_PER_THREAD:
            return f"{each:.0f} elements a thread do not fit into registers"
        least = min(1.0, others * whole / (32 * number(config, "warps")))
        return "fewer elements than threads" if each < least else base.buffered(config)

    return Space(
        {
            "way": Choice(("stream", "split"), default=way),
            "rows": PowerOfTwo(1, min(1024, others), default=rows),
            "warps": PowerOfTwo(1, 16, default=warps),
            "block": PowerOfTwo(min(16, whole), min(8192, whole), default=max(block, min(16, whole))),
            # rows that do not begin at 16 bytes are copied 4 bytes at a time where they are buffered
            "stages": Integer(1, 3, default=1 if inner > 1 else 2),
        },
        valid=(fits,),
        derived={"tile": lambda c: number(c, "rows") * number(c, "block")},
    )


def _runs(x: torch.Tensor, dims: Sequence[int]) -> list[tuple[int, int]]:
    """The reduced dimensions as runs of neighbours, ascending; no dimensions mean all."""
    if not x.dim():
        return [(0, -1)]
    found = sorted({d % x.dim() for d in dims}) or list(range(x.dim()))
    runs = [list(run) for _, run in itertools.groupby(enumerate(found), lambda pair: pair[1] - pair[0])]
    return [(run[0][1], run[-1][1]) for run in runs]


def _reference(x: torch.Tensor, kind: str, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    every = sorted({d % x.dim() for d in dims}) or list(range(x.dim())) if x.dim() else []
    if kind == "prod":
        found = x if x.dtype == torch.float64 else x.float()
        for d in reversed(every):
            found = found.prod(d, keepdim=keepdim)
        return found.to(x.dtype)
    if kind in ("sum", "mean"):
        wide = x if x.dtype == torch.float64 else x.float()
        return getattr(torch, kind)(wide, every, keepdim=keepdim).to(x.dtype) if every else x.clone()
    made: torch.Tensor = getattr(torch, kind)(x, every, keepdim=keepdim)
    return made


def _refuses(x: torch.Tensor, kind: str, dims: Sequence[int], keepdim: bool) -> str | None:
    return base.unfit(x) or (None if kind in _KINDS else f"no reduction is called {kind}")


def _sizes(x: torch.Tensor, kind: str, dims: Sequence[int], keepdim: bool) -> dict[str, int]:
    return row_sizes(x, *_runs(x, dims)[-1])


def _work(x: torch.Tensor, kind: str, dims: Sequence[int], keepdim: bool) -> tuple[float, float]:
    """Read once; a copy is a further read and write."""
    copies = 3 if base.copied(x, *_runs(x, dims)[-1]) else 1
    out = _shape(x, dims, False)
    return copies * base.bytes_of(x) + math.prod(out) * x.element_size(), float(x.numel())


def _space(x: torch.Tensor, kind: str, dims: Sequence[int], keepdim: bool) -> Space:
    return reducing_space(_sizes(x, kind, dims, keepdim), base.multiprocessors(x.device))


def _shape(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> list[int]:
    gone = {d for a, b in _runs(x, dims) for d in range(a, b + 1)}
    return [1 if i in gone else s for i, s in enumerate(x.shape) if keepdim or i not in gone]


def _launch(config: Config, *args: Any) -> torch.Tensor:
    """One run of neighbours after the other, the last first; float32 in between."""
    from torchstone.kernels.device import reduce as device

    x, kind, dims, keepdim = args
    y = _fake(x, kind, dims, keepdim)
    op, count, left = "sum" if kind == "mean" else kind, 1.0, x
    for place, run in reversed(list(enumerate(_runs(x, dims)))):
        rows = base.rows_of(left, *run)
        count *= rows.n
        shape = [1 if run[0] <= i <= run[1] else s for i, s in enumerate(left.shape)]
        out = y if not place else torch.empty(shape, dtype=torch.float32, device=x.device)
        if left is not x:
            found = {"outer": rows.outer, "n": rows.n, "inner": rows.inner}
            config = reducing_space(found, base.multiprocessors(x.device)).default()
        device.run(config, rows, out, op, count if kind == "mean" and not place else 1.0)
        left = out
    return y


def _fake(x: torch.Tensor, kind: str, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    return x.new_empty(_shape(x, dims, keepdim))


def _arg_reference(
    x: torch.Tensor, kind: str, dim: int | None, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    least = kind == "min"
    if dim is None:
        place = (torch.argmin if least else torch.argmax)(x)
        value = x.reshape(-1)[place]
        shape = [1] * x.dim() if keepdim else []
        return value.reshape(shape), place.reshape(shape)
    place = (torch.argmin if least else torch.argmax)(x, dim, keepdim=True)
    value = x.gather(dim, place) if x.dim() else x
    return (value, place) if keepdim or not x.dim() else (value.squeeze(dim), place.squeeze(dim))


def _arg_refuses(x: torch.Tensor, kind: str, dim: int | None, keepdim: bool) -> str | None:
    why = base.unfit(x) or (None if kind in _ARGS else f"no arg-reduction is called {kind}")
    if why is None and _arg_sizes(x, kind, dim, keepdim)["n"] > 2**31 - 2:
        return "places do not fit into 32 bits"
    return why


def _one(x: torch.Tensor, dim: int | None) -> tuple[int, int]:
    if dim is None or not x.dim():
        return 0, x.dim() - 1
    return dim % x.dim(), dim % x.dim()


def _arg_sizes(x: torch.Tensor, kind: str, dim: int | None, keepdim: bool) -> dict[str, int]:
    return row_sizes(x, *_one(x, dim))


def _arg_work(x: torch.Tensor, kind: str, dim: int | None, keepdim: bool) -> tuple[float, float]:
    """Read once; a copy is a further read and write."""
    copies = 3 if base.copied(x, *_one(x, dim)) else 1
    sizes = _arg_sizes(x, kind, dim, keepdim)
    out = sizes["outer"] * sizes["inner"] * (8 + x.element_size())
    return copies * base.bytes_of(x) + out, float(x.numel())


def _arg_space(x: torch.Tensor, kind: str, dim: int | None, keepdim: bool) -> Space:
    found = _arg_sizes(x, kind, dim, keepdim)
    heavy = 4  # a place beside each value, and both compared
    space = reducing_space(found, base.multiprocessors(x.device))
    return space.restricted(
        lambda c: number(c, "rows") * number(c, "block") * heavy <= 128 * 32 * number(c, "warps")
    )


def _arg_launch(config: Config, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from torchstone.kernels.device import reduce as device

    x, kind, dim, keepdim = args
    values, places = _arg_fake(x, kind, dim, keepdim)
    device.run_arg(config, base.rows_of(x, *_one(x, dim)), values, places, kind == "min")
    return values, places


def _arg_fake(
    x: torch.Tensor, kind: str, dim: int | None, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = _shape(x, () if dim is None else (dim,), keepdim)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


KERNELS = (
    base.kernel(
        "reduce(Tensor x, str kind, int[] dims, bool keepdim) -> Tensor",
        _fake,
        Kernel(
            name="reduce",
            op=_reference,
            reference=_reference,
            refuses=_refuses,
            sizes=_sizes,
            work=_work,
            space=_space,
            launch=_launch,
            device="reduce",
            follow=base.alone,
        ),
    ),
    base.kernel(
        "arg_reduce(Tensor x, str kind, int? dim, bool keepdim) -> (Tensor, Tensor)",
        _arg_fake,
        Kernel(
            name="arg_reduce",
            op=_arg_reference,
            reference=_arg_reference,
            refuses=_arg_refuses,
            sizes=_arg_sizes,
            work=_arg_work,
            space=_arg_space,
            launch=_arg_launch,
            device="reduce",
            follow=base.alone,
        ),
    ),
)
"""``reduce(x, kind, dims, keepdim)``, kind ``sum mean amax amin prod``, no dims meaning all, accumulated
in float32; ``arg_reduce(x, kind, dim, keepdim)``, kind ``max min``, no dim meaning all: values and their
first places, int64. NaN is the largest and the least, as in PyTorch.
"""
