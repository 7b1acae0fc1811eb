"""Packed sequences without values: as if every sequence had the full length.

How many steps a packed batch has is in the values of ``lengths``, which a fake tensor lacks, so that
torch refuses to pack one. For the shapes it is enough to take the batch as full: then packed data are
the padded tensor with its first two dims joined, and a recurrent layer is called with the padded
tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["answer"]

_MARK = "_torchstone_full"
"""Attribute of the fake ``batch_sizes``: (steps, batch)."""


def answer(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> Callable[[], Any] | None:
    """How to answer a call that has to do with a packed sequence; None for every other call."""
    if name == "_pack_padded_sequence":
        return lambda: _pack(*args) if isinstance(args[0], FakeTensor) else func(*args, **keywords)
    if len(args) < 2 or not isinstance(args[0], torch.Tensor):
        return None
    if name == "__getitem__" and hasattr(args[0], _MARK):
        return lambda: getattr(args[0], _MARK)[1]
    if not isinstance(args[1], torch.Tensor) or not hasattr(args[1], _MARK):
        return None
    if name == "_pad_packed_sequence":
        return lambda: _pad(*args)
    return (lambda: _layer(func, *args)) if name in _LAYERS else None


_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _pack(
    data: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if lengths.shape[0] != data.shape[0 if batch_first else 1]:
        batch = data.shape[0 if batch_first else 1]
        raise RuntimeError(
            f"Expected `len(lengths)` to be equal to batch_size {batch}, got {lengths.shape[0]}"
        )
    full = data.transpose(0, 1) if batch_first else data
    sizes = torch.empty(full.shape[0], dtype=torch.int64)
    setattr(sizes, _MARK, (full.shape[0], full.shape[1]))
    return full.reshape(-1, *full.shape[2:]), sizes


def _pad(
    data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, _value: float, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    steps, batch = getattr(sizes, _MARK)
    padded = data.view(steps, batch, *data.shape[1:])
    if total > 0:
        padded = padded.new_empty((total, batch, *data.shape[1:]))
    lengths = torch.empty(batch, dtype=torch.int64)
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _layer(
    func: Callable[..., Any], data: torch.Tensor, sizes: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    steps, batch = getattr(sizes, _MARK)
    out, *states = func(data.view(steps, batch, *data.shape[1:]), *rest, False)  # time first
    return out.flatten(0, 1), *states
