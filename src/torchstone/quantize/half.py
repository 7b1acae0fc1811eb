"""Float32 products with half operands: the captured graph with its products' inputs rounded.

``precision(fp16_products)`` rounds what goes into matrix products, convolutions and attention to
float16, which has TF32's 11 bits and twice its rate; sums are formed in float32. Between products all is
float32 as before. ``bf16_products`` does it with bfloat16. Weights are converted once, ahead of time.

*Range.* float16 ends at 65504 and loses bits below ``2**-14``, where TF32 does not. So both operands are
first multiplied by powers of two that bring their largest magnitude to about :data:`_NEAR`: one for each
row of a product, each sample of a convolution, each channel of a weight. A row's numbers then depend on
that row alone, whatever the batch holds beside it, and an element counts as 0 only below ``2**-27`` of
the row's largest. Infinities and NaN come out where they would. The inverse factors go to the result,
which the compiler fuses with what follows. Convolutions of several groups and transposed ones are the
library's, and their results leave it as float16: their weights are scaled so that no sum can overflow.
bfloat16 has float32's range and needs none of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.export import ExportedProgram

from torchstone.kernels import half_gemm
from torchstone.ops import flops, moved
from torchstone.quantize.convolution import Convolution, laid
from torchstone.quantize.matrix import Product, product_of
from torchstone.rewrite import composites, constants, cost, driver
from torchstone.rewrite import graph as graphs

__all__ = ["DTYPES", "halve", "worth"]

aten = torch.ops.aten
operators = torch.ops.torchstone
DTYPES = {"fp16_products": torch.float16, "bf16_products": torch.bfloat16}
"""What products are given, by format."""

_NEAR = 2.0**3
"""About the largest magnitude of what is multiplied."""
_SUM = 2.0**10
"""About the largest sum of magnitudes in a convolution's kernel: its results stay below ``2**15``."""
_LEAST, _MOST = 2.0**-100, 2.0**100
"""Magnitudes beyond these are scaled as these are."""
_ALIGNED = 8
"""Elements of half numbers in 16 bytes."""
_INTENSITY = 16.0
"""FLOPs a byte of operands and result from which float32 units, and not memory, are what a product waits
for."""

_CONVS: dict[Any, Callable[..., Any]] = {
    aten.conv1d.default: F.conv1d,
    aten.conv2d.default: F.conv2d,
    aten.conv3d.default: F.conv3d,
    aten.conv_transpose1d.default: F.conv_transpose1d,
    aten.conv_transpose2d.input: F.conv_transpose2d,
    aten.conv_transpose3d.input: F.conv_transpose3d,
}
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def halve(
    program: ExportedProgram | fx.GraphModule, dtype: torch.dtype, *, convolutions: bool = False
) -> tuple[fx.GraphModule, int]:
    """The program's graph with half operands in its products, and how many; the program stays as it is.

    :param program: or its graph, normalized, which is changed.
    :param dtype: float16 or bfloat16.
    :param convolutions: these alone.
    """
    assert half_gemm.MATMUL is not None  # the import registers the operator
    module = program if isinstance(program, fx.GraphModule) else graphs.of(program)
    composites.expand(module)
    count = 0
    for node in list(module.graph.nodes):
        if convolutions and node.target not in _CONVS:
            continue
        if not worth(node):
            continue
        made = _made(node, dtype)
        traced = None if made is None else driver.trace(made.function, made.given)
        if made is not None and traced is not None:
            driver.inline(traced, made.last, driver.nodes_of(made.given))
            count += 1
    graphs.sweep(module.graph)
    constants.fold(module)
    module.recompile()
    return module, count


class _Made(NamedTuple):
    """What replaces nodes."""

    last: fx.Node
    function: Callable[..., Any]
    given: dict[str, Any]


def _made(node: fx.Node, dtype: torch.dtype) -> _Made | None:
    convolution = Convolution.of(node)
    if convolution is not None:
        return _Made(convolution.last, _convolution(convolution, dtype), convolution.given)
    if node.target in _CONVS and len(node.args) >= 3:
        names = ("x", "weight", "bias", *(f"rest{i}" for i in range(len(node.args) - 3)))
        call = _by_library(_CONVS[node.target], dtype)
        return _Made(node, call, dict(zip(names, node.args, strict=True)))
    if node.target is aten.scaled_dot_product_attention.default and graphs.pure(node):
        names = ("q", "k", "v", "mask", "dropout", "causal")
        call = _attention(dtype, dict(node.kwargs))
        return _Made(node, call, dict(zip(names, node.args, strict=True)))
    product = product_of(node)
    if product is None:
        return None
    given = {"a": product.a, "b": product.b, "bias": product.bias}
    return _Made(node, _matmul(product, dtype), given)


def worth(node: fx.Node) -> bool:
    """Whether a node computes in float32, and enough for each byte that it moves."""
    if node.op != "call_function" or "val" not in node.meta:
        return False
    fakes = [n.meta.get("val") for n in (*node.all_input_nodes, node)]
    tensors = [v for v in fakes if isinstance(v, torch.Tensor)]
    floats = [v for v in tensors if v.is_floating_point()]
    if not floats or any(v.dtype is not torch.float32 for v in floats):
        return False
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: cost.concrete(n.meta.get("val")))
    bytes_ = sum(moved.touched(cost.concrete(v)) for v in tensors)
    found = flops.count(node.target, args, kwargs, cost.concrete(node.meta["val"]))
    return found.products >= _INTENSITY * bytes_


def _factor(x: Tensor, dims: list[int], near: float = _NEAR, *, summed: bool = False) -> Tensor:
    """A power of two for each row along ``dims`` that brings its largest magnitude to about ``near``.

    :param summed: the sum of magnitudes in place of the largest.
    """
    size = torch.where(x.isfinite(), x.abs(), 0.0)
    found = size.sum(dims, keepdim=True) if summed else size.amax(dims, keepdim=True)
    return torch.exp2(-torch.floor(torch.log2(found.clamp(_LEAST, _MOST)))) * near


def _scaled(x: Tensor, dtype: torch.dtype, dims: list[int], **how: Any) -> tuple[Tensor, Tensor | None]:
    """A tensor rounded, and what undoes its scaling."""
    if dtype is not torch.float16:
        return x.to(dtype), None
    factor = _factor(x, dims, **how)
    return (x * factor).to(dtype), factor.reciprocal()


def _times(y: Tensor, *factors: Tensor | None) -> Tensor:
    for factor in factors:
        if factor is not None:
            y = y * factor
    return y


def _matmul(product: Product, dtype: torch.dtype) -> Callable[..., Any]:
    def made(a: Tensor, b: Tensor, bias: Tensor | None) -> Any:
        if product.transposed:
            b = b.mT
        if a.dim() < 2 or b.dim() < 2:
            return NotImplemented
        left, undo_left = _scaled(a, dtype, [-1])
        right, undo_right = _scaled(b, dtype, [-2])
        inner, columns = _missing(a.shape[-1]), _missing(b.shape[-1])
        if inner or columns:
            left, right = F.pad(left, [0, inner]), F.pad(right, [0, columns, 0, inner])
        y = operators.half_matmul(left, right)
        if columns:
            y = y[..., : b.shape[-1]]
        y = _times(y, undo_left, undo_right)
        return y if bias is None else y + bias

    return made


def _missing(size: Any) -> int:
    """What a known size lacks to rows that begin at 16 bytes, without which tensor cores starve."""
    return -size % _ALIGNED if isinstance(size, int) else 0


def _convolution(convolution: Convolution, dtype: torch.dtype) -> Callable[..., Any]:
    """By the kernel whose results are not rounded."""

    def made(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        dims = [*range(1, weight.dim())]
        left, undo_left = _scaled(x, dtype, dims)
        right, undo_right = _scaled(weight, dtype, dims)
        undo = (None if u is None else u.flatten() for u in (undo_left, undo_right))
        return operators.half_conv(laid(left), laid(right), bias, *undo, *convolution.how)

    return made


def _by_library(conv: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    transposed = conv in _TRANSPOSED

    def made(x: Tensor, weight: Tensor, bias: Tensor | None, **rest: Any) -> Any:
        dims = weight.dim()
        if x.dim() != dims:
            return NotImplemented  # no batch
        given = list(rest.values())
        groups = given[-2] if transposed else given[-1]
        left, undo_left = _scaled(x, dtype, [*range(1, dims)])
        right, undo_right = _kernel(weight, dtype, groups, transposed=transposed)
        if dims in _LAYOUTS:
            left, right = (t.contiguous(memory_format=_LAYOUTS[dims]) for t in (left, right))
        y = _times(conv(left, right, None, *given).float(), undo_left, undo_right)
        return y if bias is None else y + bias.view(-1, *[1] * (dims - 2))

    return made


def _kernel(
    weight: Tensor, dtype: torch.dtype, groups: int, *, transposed: bool
) -> tuple[Tensor, Tensor | None]:
    """A kernel rounded, and what undoes its scaling, (channels, 1, ...)."""
    dims = weight.dim()
    if dtype is not torch.float16:
        return weight.to(dtype), None
    if not transposed:
        half, undo = _scaled(weight, dtype, [*range(1, dims)], near=_SUM, summed=True)
        return half, None if undo is None else undo.view(-1, *[1] * (dims - 2))
    # (in, out / groups, ...): a channel's numbers are in its group's rows
    grouped = torch.unflatten(weight, 0, [groups, -1])
    factor = _factor(grouped, [1, *range(3, dims + 1)], near=_SUM, summed=True)
    half = (grouped * factor).to(dtype).flatten(0, 1)
    return half, factor.reciprocal().reshape(-1, *[1] * (dims - 2))


def _attention(dtype: torch.dtype, options: dict[str, Any]) -> Callable[..., Any]:
    def made(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **rest: Any) -> Tensor:
        # scores are a function of q k, so that neither may be scaled: beyond 65504 they are not finite
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        grouped = q.shape[:-2] != v.shape[:-2]
        right, undo = (v.to(dtype), None) if grouped else _scaled(v, dtype, [-2, -1])
        attend = aten.scaled_dot_product_attention.default
        y = attend(q.to(dtype), k.to(dtype), right, mask, *rest.values(), **options)
        return _times(y.float(), undo)

    return made
