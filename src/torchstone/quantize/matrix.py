"""Matrix products in a captured graph, whatever operation they are written as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

__all__ = ["Product", "followed", "product_of"]

aten = torch.ops.aten
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)

_EPILOGUES: dict[Any, Callable[[fx.Node], str]] = {
    aten.relu.default: lambda _: "relu",
    aten.sigmoid.default: lambda _: "sigmoid",
    aten.tanh.default: lambda _: "tanh",
    aten.silu.default: lambda _: "silu",
    aten.gelu.default: lambda node: "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu",
}
"""What may be computed with a product, and its name in kernels."""


@dataclass(frozen=True)
class Product:
    """``a @ b``, or ``a @ b.T``, plus a bias of one dim."""

    a: fx.Node
    """The left side."""
    b: fx.Node
    """The right side, a weight where there is one."""
    bias: fx.Node | None = None
    """Added to each row."""
    transposed: bool = False
    """Whether it is ``a @ b.T``."""
    convolution: bool = False
    """A convolution of kernel size 1 of ``a`` with the kernel ``b``."""


def product_of(node: fx.Node) -> Product | None:
    """The product that a normalized node is; None for what is none."""
    args: Any = node.args
    if node.target is aten.linear.default:
        return Product(args[0], args[1], args[2], transposed=True)
    if node.target is aten.addmm.default:
        bias, a, b, *factors = args[0], args[1], args[2], *node.kwargs.values()
        plain = all(f == 1 for f in factors) and bias.meta["val"].dim() == 1
        return Product(a, b, bias) if plain and _sized(bias, b) else None
    if node.target in (aten.mm.default, aten.bmm.default, aten.matmul.default):
        return Product(args[0], args[1])
    if node.target in _CONVOLUTIONS and _pointwise(node):
        return Product(args[0], args[1], args[2], convolution=True)
    return None


def _pointwise(node: fx.Node) -> bool:
    """Whether a convolution has a kernel of size 1, and takes every place once."""
    _, weight, _, stride, padding, dilation, groups = node.args
    assert isinstance(weight, fx.Node)
    plain = groups == 1 and padding != "same" and weight.meta["val"].dtype is torch.float32
    return bool(plain) and all(
        set(v if isinstance(v, list | tuple) else [v]) <= {wanted}
        for v, wanted in ((weight.meta["val"].shape[2:], 1), (stride, 1), (padding, 0), (dilation, 1))
    )


def _sized(bias: fx.Node, b: fx.Node) -> bool:
    return bool(bias.meta["val"].shape[0] == b.meta["val"].shape[-1])


def followed(node: fx.Node) -> tuple[fx.Node, str]:
    """The function of single elements that alone reads a node, and its name; else the node, "none"."""
    user = next(iter(node.users), None)
    if user is None or len(node.users) != 1 or user.target not in _EPILOGUES:
        return node, "none"
    return user, _EPILOGUES[user.target](user)
