"""Triton kernels as operators of PyTorch, each with what it is held to: see
:mod:`torchstone.kernels.base`.

Nothing is registered, and no torch imported, before ``torchstone.kernels.KERNELS`` is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchstone.kernels.registry import KERNELS

__all__ = ["KERNELS"]


def __getattr__(name: str) -> Any:
    if name == "KERNELS":
        from torchstone.kernels.registry import KERNELS

        return KERNELS
    raise AttributeError(name)
