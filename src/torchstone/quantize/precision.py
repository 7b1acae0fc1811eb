"""Lower floating-point formats, with casts at the module's boundary."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

__all__ = ["Cast", "convert"]

_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16_autocast": torch.bfloat16}


class Cast(nn.Module):
    """Runs ``inner`` in ``dtype`` and gives its outputs in the dtypes that it had before.

    :param inner: the module to run, owned by this one.
    :param dtype: format of arithmetic.
    :param outputs: dtype of each leaf of the result; None for what is no tensor.
    :param autocast: leave the weights and let autocast choose operation by operation.
    """

    def __init__(
        self,
        inner: nn.Module,
        dtype: torch.dtype,
        outputs: tuple[torch.dtype | None, ...],
        *,
        autocast: bool,
    ) -> None:
        super().__init__()
        self.inner = inner if autocast else inner.to(dtype)
        self.dtype = dtype
        self.outputs = outputs
        self.autocast = autocast
        device = next((p.device.type for p in inner.parameters()), "cpu")
        self.device_type = device

    def forward(self, *args: Any) -> Any:
        """The inner module's result."""
        if self.autocast:
            with torch.autocast(self.device_type, dtype=self.dtype):
                result = self.inner(*args)
        else:
            result = self.inner(*(self._lowered(a) for a in args))
        leaves, spec = _pytree.tree_flatten(result)
        restored = [_to(leaf, dtype) for leaf, dtype in zip(leaves, self.outputs, strict=True)]
        return _pytree.tree_unflatten(restored, spec)

    def _lowered(self, value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.dtype) if floating else value


def convert(module: nn.Module, form: str, example: tuple[Any, ...]) -> nn.Module:
    """A copy of ``module`` that works in ``form``: ``bf16``, ``bf16_autocast`` or ``fp16``."""
    with torch.no_grad():  # a copy runs, for running may change state
        leaves = _pytree.tree_leaves(copy.deepcopy(module)(*copy.deepcopy(example)))
    dtypes = tuple(leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
    cast = Cast(copy.deepcopy(module), _FORMATS[form], dtypes, autocast=form == "bf16_autocast")
    cast.training = module.training  # of this one alone: submodules keep their own mode
    return cast


def _to(leaf: Any, dtype: torch.dtype | None) -> Any:
    return leaf if dtype is None or not dtype.is_floating_point else leaf.to(dtype)
