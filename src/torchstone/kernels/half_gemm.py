"""The operator ``half_matmul``: products of half numbers whose sums stay float32.

Tensor cores multiply float16 and bfloat16 exactly and add in float32; only the store rounds, and this
one does not. PyTorch has it on CUDA alone (``out_dtype``); elsewhere the same sum is formed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchstone.errors import InputError
from torchstone.kernels.split_gemm import registered

__all__ = ["MATMUL"]

_door: Any = torch
"""Parts of torch that have no types."""
_HALVES = (torch.float16, torch.bfloat16)


def _check(a: Tensor, b: Tensor) -> None:
    why = None
    if a.dtype not in _HALVES or b.dtype is not a.dtype:
        why = f"the factors are {a.dtype} and {b.dtype}, not both float16 or both bfloat16"
    elif a.dim() < 2 or b.dim() < 2:
        why = "a factor has fewer than two dimensions"
    if why is not None:
        raise InputError(why, where="torchstone.half_matmul", hint="convert both factors first")
    _door._check(a.shape[-1] == b.shape[-2], lambda: "the inner sizes differ")


def _shape(a: Tensor, b: Tensor) -> tuple[Any, ...]:
    outer = _door.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return (*outer, a.shape[-2], b.shape[-1])


def _fake(a: Tensor, b: Tensor) -> Tensor:
    _check(a, b)
    return a.new_empty(_shape(a, b), dtype=torch.float32)


def _run(a: Tensor, b: Tensor) -> Tensor:
    _check(a, b)
    if a.device.type != "cuda" or not (a.numel() and b.numel()):
        return torch.matmul(a.float(), b.float())
    (m, k), n, shape = a.shape[-2:], b.shape[-1], _shape(a, b)
    if b.dim() == 2:  # the batch's rows are rows of one product
        rows: Tensor = _door.mm(a.reshape(-1, k), b, out_dtype=torch.float32)
        return rows.view(shape)
    outer = shape[:-2]
    a, b = (t.expand(*outer, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (a, b))
    if len(a) == 1:
        one: Tensor = _door.mm(a[0], b[0], out_dtype=torch.float32)
        return one.view(shape)
    many: Tensor = _door.bmm(a, b, out_dtype=torch.float32)
    return many.view(*outer, m, n)


MATMUL = registered("half_matmul(Tensor a, Tensor b) -> Tensor", _run, _fake)
"""``half_matmul(a, b)``: float16 or bfloat16 (..., m, k) and (..., k, n), batches broadcast, any
strides, to float32 (..., m, n), contiguous."""
