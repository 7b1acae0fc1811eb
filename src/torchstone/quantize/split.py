"""Float32 products on bfloat16 tensor cores: the captured graph with its products replaced by operators.

``linear``, ``addmm``, ``mm``, ``bmm`` and ``matmul`` of float32 become ``torchstone::split_linear``
where the right side is a constant, whose parts are then computed once, ahead of time, and
``torchstone::split_matmul`` where it is not; a convolution of kernel size 1 is a product too, and others
of one group are split by :mod:`torchstone.quantize.convolution` (``bf16x3`` alone). A pointwise function
that alone reads a product is computed with it. How exact all that is:
:mod:`torchstone.kernels.split_gemm_parts`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from torchstone.kernels import split_conv, split_gemm, split_gemm_parts
from torchstone.quantize import convolution
from torchstone.quantize.convolution import Convolution
from torchstone.quantize.half import worth
from torchstone.quantize.matrix import Product, followed, product_of
from torchstone.rewrite import composites, constants, driver
from torchstone.rewrite import graph as graphs

__all__ = ["PARTS", "split"]

aten = torch.ops.aten
operators = torch.ops.torchstone
PARTS = {"bf16x3": 2, "bf16x6": 3}
"""Bfloat16 parts of each number, by format."""
_LEAST = 32
"""Inner and outer size of a product below which the tensor cores have too little to do."""


def split(program: ExportedProgram | fx.GraphModule, parts: int) -> tuple[fx.GraphModule, int]:
    """The program's graph with split products, and how many; the program is left as it is.

    :param program: or its graph, normalized, which is changed.
    :param parts: of each number, 2 or 3.
    """
    assert split_gemm.LINEAR.op is not None  # the imports register the operators
    assert split_conv.POINTWISE.op is not None
    module = program if isinstance(program, fx.GraphModule) else graphs.of(program)
    composites.expand(module)
    known, count = constants.constant(module), 0
    for node in list(module.graph.nodes):
        product = product_of(node)
        if product is None and parts == PARTS["bf16x3"]:
            count += _convolved(node)
        if product is None or not _worth(product):
            continue
        constant = product.b in known
        if constant and _refused(module, product.b):
            continue
        _replace(node, product, parts, constant=constant)
        count += 1
    graphs.sweep(module.graph)
    constants.fold(module, growth=2.0)
    module.recompile()
    return module, count


def _convolved(node: fx.Node) -> bool:
    """Split a convolution, if the node is one that is worth it."""
    found = Convolution.of(node)
    if found is None or not worth(node):
        return False
    traced = driver.trace(convolution.split(found), found.given)
    assert traced is not None  # it never declines
    driver.inline(traced, found.last, driver.nodes_of(found.given))
    return True


def _worth(product: Product) -> bool:
    """Whether both sides are float32 matrices, large enough for tensor cores."""
    sides = (product.a.meta.get("val"), product.b.meta.get("val"))
    if not all(isinstance(v, torch.Tensor) and v.dtype is torch.float32 and v.dim() >= 2 for v in sides):
        return False
    shape = product.b.meta["val"].shape
    rows, columns = shape[:2] if product.convolution else shape[-2:]
    return all(not isinstance(n, int) or n >= _LEAST for n in (rows, columns))


def _refused(module: fx.GraphModule, weight: fx.Node) -> bool:
    """Whether a constant has numbers that have no parts."""
    value = constants.value(module, weight)
    return split_gemm_parts.split_range(value).refuses is not None


def _replace(node: fx.Node, product: Product, parts: int, *, constant: bool) -> None:
    layer = product.convolution or product.transposed or product.bias is not None or constant
    last, epilogue = followed(node) if layer else (node, "none")
    flat = product.b.meta["val"].dim() == 2
    given: dict[str, Any] = {"a": product.a, "b": product.b, "bias": product.bias}

    def made(a: Any, b: Any, bias: Any) -> Any:
        if product.convolution:
            weight = operators.split_parts(b.flatten(1), parts)
            return operators.split_pointwise(a, weight, bias, parts, epilogue)
        if layer and flat:
            weight = operators.split_parts(b if product.transposed else b.mT.contiguous(), parts)
            return operators.split_linear(a, weight, bias, parts, epilogue)
        return operators.split_matmul(a, b, parts)

    if not (product.convolution or (layer and flat)):
        last = node
    traced = driver.trace(made, given)
    assert traced is not None  # it never declines
    driver.inline(traced, last, driver.nodes_of(given))
