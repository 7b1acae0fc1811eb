"""Softmax and log-softmax over any dimension."""

from __future__ import annotations

import torch

from torchstone.kernels import base
from torchstone.kernels.base import Kernel, number, power
from torchstone.records.tuning import Config
from torchstone.tuner.space import Choice, Integer, Only, PowerOfTwo, Space

__all__ = ["KERNEL", "row_space"]

MOST_PER_THREAD = 64
"""Elements that a thread can hold in registers beside what it computes with, 16 warps or fewer."""
_MOST_WARPS = 16


def reference(x: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    """``torch.softmax`` or ``torch.log_softmax``."""
    return torch.log_softmax(x, dim) if log else torch.softmax(x, dim)


def refuses(x: torch.Tensor, dim: int, log: bool) -> str | None:
    """See :attr:`~torchstone.kernels.base.Kernel.refuses`."""
    return base.unfit(x)


def sizes(x: torch.Tensor, dim: int, log: bool) -> dict[str, int]:
    """``outer``, ``n``, ``inner``."""
    return row_sizes(x, dim, dim)


def row_sizes(x: torch.Tensor, first: int, last: int) -> dict[str, int]:
    """Products of a tensor's sizes before, along and after some neighbouring dimensions."""
    shape = x.shape or (1,)
    first, last = first % len(shape), last % len(shape)
    product = torch.Size.numel
    spans = (shape[:first], shape[first : last + 1], shape[last + 1 :])
    return dict(zip(("outer", "n", "inner"), (product(torch.Size(s)) for s in spans), strict=True))


def work(x: torch.Tensor, dim: int, log: bool) -> tuple[float, float]:
    """Read once, written once; a copy is a further read and write."""
    dim = dim % max(1, x.dim())
    copies = 2 if base.copied(x, dim, dim) else 1
    return 2.0 * copies * base.bytes_of(x), 5.0 * x.numel()


def space(x: torch.Tensor, dim: int, log: bool) -> Space:
    """Rows on chip where they fit, else in blocks, by one program each or by several."""
    return row_space(sizes(x, dim, log), base.multiprocessors(x.device))


def row_space(found: dict[str, int], processors: int, loads: int = 1) -> Space:
    """The space of kernels that work along rows, whose ways are ``chip``, ``stream`` and ``split``.

    :param found: ``outer``, ``n`` and ``inner``.
    :param loads: of whole tiles in a loop over a row's blocks.
    """
    outer, n, inner = (found[k] for k in ("outer", "n", "inner"))
    whole, others = power(n), power(inner if inner > 1 else outer)
    chosen = _heuristic(outer, n, inner, processors)

    def fits(config: Config) -> str | None:
        block = whole if config["way"] == "chip" else number(config, "block")
        each = number(config, "rows") * block / (32 * number(config, "warps"))
        if each > min(MOST_PER_THREAD, 1024 // number(config, "warps")):
            return f"{each:.0f} elements a thread do not fit into registers"
        if config["way"] != "chip" and each < 1:
            return "fewer elements than threads"
        return None if config["way"] == "chip" else base.buffered(config, loads)

    most_rows = min(1024, others)
    blocks = PowerOfTwo(16, 8192, default=number(chosen, "block"))
    return Space(
        {
            "way": Choice(("chip", "stream", "split"), default=chosen["way"]),
            "rows": PowerOfTwo(1, most_rows, default=number(chosen, "rows")),
            "warps": PowerOfTwo(1, 32, default=number(chosen, "warps")),
            "block": Only(blocks, "way", ("stream", "split")),
            "stages": Only(Integer(1, 3, default=2), "way", ("stream", "split")),
        },
        valid=(fits,),
        derived={
            "tile": lambda c: number(c, "rows") * (whole if c["way"] == "chip" else number(c, "block"))
        },
    )


def _heuristic(outer: int, n: int, inner: int, processors: int) -> Config:
    """Tiles of about 4096 elements, 16 a thread; 32 neighbours where rows are not contiguous."""
    whole = power(n)
    if inner > 1:
        rows = min(power(inner), max(32, min(128, 4096 // whole)))
        count, block = outer * -(-inner // rows), 128
    else:
        rows = min(power(outer), max(1, 1024 // whole))
        count, block = -(-outer // rows), 4096
    chip = rows * whole <= MOST_PER_THREAD * 32 * _MOST_WARPS
    few = count < processors and n >= 16 * block
    if few and inner == 1:  # rows that lie beside each other share what they are multiplied with
        rows, block = min(power(outer), 8), 1024
        return {"way": "split", "rows": rows, "warps": 8, "block": block, "stages": 1}
    way = "split" if few else "chip" if chip else "stream"
    tile = rows * (whole if way == "chip" else block)
    warps = min(_MOST_WARPS, max(1, power(tile // (32 * 16))))
    if way == "stream" and inner == 1:
        return {"way": way, "rows": rows, "warps": 4, "block": block, "stages": 3}
    return {"way": way, "rows": rows, "warps": warps, "block": block, "stages": 2}


def launch(config: Config, x: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    """Run Triton with one config."""
    from torchstone.kernels.device import softmax as device

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dim = dim % max(1, x.dim())
    device.run(config, base.rows_of(x, dim, dim if x.dim() else -1), y, log)
    return y


def _fake(x: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    return x.new_empty(x.shape)


KERNEL = base.kernel(
    "softmax(Tensor x, int dim, bool log) -> Tensor",
    _fake,
    Kernel(
        name="softmax",
        op=reference,
        reference=reference,
        refuses=refuses,
        sizes=sizes,
        work=work,
        space=space,
        launch=launch,
        device="softmax",
        follow=base.alone,
    ),
)
"""``softmax(x, dim, log)``: float32, float16 or bfloat16 of any shape and strides; float32 inside."""
