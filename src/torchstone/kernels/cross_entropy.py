"""Cross-entropy of logits with classes, without storing probabilities."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from torchstone.kernels import base
from torchstone.kernels.base import Kernel, number
from torchstone.kernels.reduce import reducing_space
from torchstone.kernels.softmax import MOST_PER_THREAD, row_sizes
from torchstone.records.tuning import Config
from torchstone.tuner.space import Space

__all__ = ["KERNEL"]

_REDUCTIONS = ("none", "mean", "sum")


def reference(
    logits: torch.Tensor, targets: torch.Tensor, reduction: str, ignore_index: int
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy`` in float32 at least."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    found = F.cross_entropy(wide, targets, reduction=reduction, ignore_index=ignore_index)
    return found.to(logits.dtype)


def refuses(
    logits: torch.Tensor, targets: torch.Tensor, reduction: str, ignore_index: int
) -> str | None:
    """See :attr:`~torchstone.kernels.base.Kernel.refuses`."""
    if targets.dtype != torch.int64:
        return f"targets are {targets.dtype}, not classes as int64"
    if reduction not in _REDUCTIONS:
        return f"no reduction is called {reduction}"
    return base.unfit(logits, targets)


def _dim(logits: torch.Tensor) -> int:
    return 1 if logits.dim() > 1 else 0


def sizes(logits: torch.Tensor, *rest: Any) -> dict[str, int]:
    """``outer``, ``n`` classes, ``inner``."""
    return row_sizes(logits, _dim(logits), _dim(logits))


def work(
    logits: torch.Tensor, targets: torch.Tensor, reduction: str, ignore_index: int
) -> tuple[float, float]:
    """Logits and targets read once, a loss each written; a copy is a further read and write."""
    copies = 3 if base.copied(logits, _dim(logits), _dim(logits)) else 1
    out = targets.numel() * logits.element_size() if reduction == "none" else logits.element_size()
    return copies * base.bytes_of(logits) + base.bytes_of(targets) + out, 4.0 * logits.numel()


def space(logits: torch.Tensor, *rest: Any) -> Space:
    """See :func:`~torchstone.kernels.reduce.reducing_space`; a maximum and a sum a lane."""
    found = reducing_space(sizes(logits), base.multiprocessors(logits.device))
    return found.restricted(
        lambda c: 2 * number(c, "rows") * number(c, "block") <= MOST_PER_THREAD * 32 * number(c, "warps")
    )


def launch(config: Config, *args: Any) -> torch.Tensor:
    """Run Triton with one config."""
    from torchstone.kernels.device import cross_entropy as device

    logits, targets, reduction, ignored = args
    out = _fake(*args)
    rows = base.rows_of(logits, _dim(logits), _dim(logits))
    targets = targets.contiguous()
    if reduction == "none":
        device.run(config, rows, targets, out, ignored)
        return out
    loss = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    device.run(config, rows, targets, loss, ignored)
    device.total(loss, targets, out, ignored, reduction == "mean")
    return out


def _fake(
    logits: torch.Tensor, targets: torch.Tensor, reduction: str, ignore_index: int
) -> torch.Tensor:
    return logits.new_empty(targets.shape if reduction == "none" else ())


KERNEL = base.kernel(
    "cross_entropy(Tensor logits, Tensor targets, str reduction, int ignore_index) -> Tensor",
    _fake,
    Kernel(
        name="cross_entropy",
        op=reference,
        reference=reference,
        refuses=refuses,
        sizes=sizes,
        work=work,
        space=space,
        launch=launch,
        device="cross_entropy",
        follow=lambda shape, *args: ((shape[:1] + shape[2:]) if len(shape) > 1 else (),),
    ),
)
"""``cross_entropy(logits, targets, reduction, ignore_index)`` of (batch, classes, ...) or (classes,)
logits, int64 targets, no label smoothing, no class weights. A target that is no class gives NaN; a CPU
without Triton raises."""
