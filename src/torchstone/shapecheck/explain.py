"""Saying why an operation failed, in the user's names of the dims."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchstone.records import Operand
from torchstone.shapecheck.watch import Call

__all__ = ["Explanation", "Names", "explain", "is_shape_error"]

_SYMBOL = re.compile(r"\b[suz]\d+\b")
_TYPES = re.compile(r"torch\.Size\((\[[^]]*\])\)")
_SHAPES = re.compile(
    r"\b(shapes?|sizes?|dims?|dimensions?|dimensional|[1-5]D|rank|channels?|broadcast\w*|elements?|strides?|lengths?|"
    r"columns|unpack|out of (range|bounds)|multiply|kernel size|subscript|features?|divisible|match\w*|"
    r"mismatch\w*|num_heads|embed_dim|indices|numel)\b",
    re.IGNORECASE,
)
_NO_SHAPES = re.compile(r"\b(d?types?|device|requires_grad|keyword argument)\b", re.IGNORECASE)
_CONVOLUTIONS = re.compile(r"conv(_transpose)?[123]d\Z")
_PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "bmm", "mm")
_BROADCASTS = (
    "add", "sub", "mul", "div", "true_divide", "pow", "where", "masked_fill", "masked_fill_", "add_",
    "mul_", "sub_", "div_", "__add__", "__sub__", "__mul__", "__truediv__", "__iadd__", "__imul__",
    "__radd__", "__rmul__", "__and__", "__or__", "lerp", "maximum", "minimum", "eq", "lt", "gt", "le",
    "ge", "__eq__", "logical_and", "logical_or", "addcmul", "rsub", "__rsub__",
)  # fmt: skip
_VIEWS = ("view", "reshape")
_KINDS = (RuntimeError, ValueError, IndexError, AssertionError)


class Explanation(NamedTuple):
    """Why it failed."""

    text: str
    """One sentence."""
    fixed: bool
    """Whether the sizes that do not fit are known to be numbers, whatever the named dims are."""
    unequal: tuple[int | str, int | str] | None = None
    """The two sizes that must be the same, where that is all that is wrong."""


class Names:
    """The user's names for torch's symbols."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def text(self, text: str) -> str:
        """A text with torch's symbols replaced, ``torch.Size`` taken away, on one line."""
        plain = _TYPES.sub(r"\1", " ".join(text.split()))
        return _SYMBOL.sub(lambda m: self._names.get(m[0], m[0]), plain)

    def size(self, size: Any) -> int | str:
        """A size: a number, or an expression of named dims."""
        return size if type(size) is int else self.text(str(size))

    def shape(self, shape: Sequence[Any]) -> str:
        """``[B, 3, 32]``."""
        return f"[{', '.join(str(self.size(size)) for size in shape)}]"

    def operand(self, tensor: torch.Tensor) -> Operand:
        """A tensor's dtype and shape."""
        shape = tuple(self.size(size) for size in tensor.shape)
        return Operand(dtype=str(tensor.dtype).removeprefix("torch."), shape=shape)


def is_shape_error(error: BaseException, call: Call | None) -> bool:
    """Whether an exception tells of shapes rather than of dtypes, devices or anything else."""
    text = str(error)
    # a kernel that is not there is a RuntimeError too, and says nothing of shapes
    if not isinstance(error, _KINDS) or isinstance(error, NotImplementedError):
        return False
    if _NO_SHAPES.search(text):
        return False
    return bool(_SHAPES.search(text)) or (call is not None and len(call.tensors) > 1)


def explain(error: BaseException, call: Call | None, names: Names) -> Explanation:
    """Why it failed: which sizes do not fit, else torch's own words."""
    found = None if call is None else _mismatch(call)
    if found is not None:
        template, *sizes = found
        told = [names.size(size) for size in sizes]
        unequal = (told[0], told[1]) if call is not None and call.op not in _VIEWS else None
        return Explanation(template.format(*told), all(type(size) is int for size in sizes), unequal)
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    own = call.op if call is not None else ""
    text = names.text(first).rstrip(".").removeprefix(f"{own}(): ").removeprefix(f"{own}: ")
    return Explanation(text[:300], fixed=False)


_Mismatch = tuple[Any, ...]
"""A sentence with places for sizes, and the sizes."""


def _mismatch(call: Call) -> _Mismatch | None:
    for names, read in _READERS:
        if call.op in names and (found := read(call)) is not None:
            return found
    return _convolution(call) if _CONVOLUTIONS.match(call.op) else None


def _linear(call: Call) -> _Mismatch | None:
    x, weight = call.tensors[:2]
    if x.shape[-1] == weight.shape[-1]:
        return None
    return "expected {} as the input's last size, got {}", weight.shape[-1], x.shape[-1]


def _convolution(call: Call) -> _Mismatch | None:
    x, weight = call.tensors[:2]
    spatial = weight.dim() - 2
    if x.dim() not in (spatial + 1, spatial + 2):
        return "expected an input of {} dims, got one of {}", spatial + 2, x.dim()
    transposed = "transpose" in call.op
    groups = call.keywords.get("groups", next(iter(call.arguments[6:7]), 1))
    takes = weight.shape[0] if transposed else weight.shape[1] * groups
    channels = x.shape[-spatial - 1]
    return None if channels == takes else ("expected {} channels, got {}", takes, channels)


def _product(call: Call) -> _Mismatch | None:
    a, b = call.tensors[:2]
    if a.dim() == 0 or b.dim() == 0:
        return None
    inner = b.shape[-2] if b.dim() > 1 else b.shape[-1]
    if a.shape[-1] == inner:
        return _broadcast_shapes([a.shape[:-2], b.shape[:-2]])
    return "the inner sizes differ: {} on the left, {} on the right", a.shape[-1], inner


def _broadcast(call: Call) -> _Mismatch | None:
    return _broadcast_shapes([tensor.shape for tensor in call.tensors])


def _broadcast_shapes(shapes: Sequence[Sequence[Any]]) -> _Mismatch | None:
    for axis in range(1, max((len(shape) for shape in shapes), default=0) + 1):
        sizes = [shape[-axis] for shape in shapes if len(shape) >= axis]
        large = [size for size in sizes if size != 1]
        for size in large[1:]:
            if size != large[0]:
                return "{} and {} do not broadcast, in the dim {} from the right", large[0], size, axis
    return None


def _joined(call: Call) -> _Mismatch | None:
    axis = call.keywords.get("dim", call.arguments[1] if len(call.arguments) > 1 else 0)
    first, *rest = call.tensors
    for tensor in rest:
        if tensor.dim() != first.dim():
            return "tensors of {} and of {} dims", first.dim(), tensor.dim()
        for i, (a, b) in enumerate(zip(first.shape, tensor.shape, strict=True)):
            if a != b and i != axis % first.dim():
                return (
                    f"sizes other than dim {axis} must be the same: {{}} and {{}} in dim {{}}",
                    a,
                    b,
                    i,
                )
    return None


def _viewed(call: Call) -> _Mismatch | None:
    (x, *_) = call.tensors
    sizes = call.arguments[1:]
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    if not all(isinstance(size, int | torch.SymInt) for size in sizes):
        return None
    known = math.prod(size for size in sizes if size != -1)
    fits = x.numel() % known == 0 if -1 in sizes and known != 0 else x.numel() == known
    if fits:
        return None  # its strides are at fault
    wanted = ", ".join("{}" for _ in sizes)
    return f"{{}} elements do not make [{wanted}]", x.numel(), *sizes


def _normalized(call: Call) -> _Mismatch | None:
    wanted = call.arguments[1] if len(call.arguments) > 1 else call.keywords["normalized_shape"]
    last = call.tensors[0].shape[-len(wanted) :]
    if len(wanted) != 1 or not last:
        return None
    return "expected {} as the input's last size, got {}", wanted[0], last[0]


_READERS: tuple[tuple[tuple[str, ...], Callable[[Call], _Mismatch | None]], ...] = (
    (("linear",), _linear),
    (_PRODUCTS, _product),
    (_BROADCASTS, _broadcast),
    (("cat", "concat", "concatenate"), _joined),
    (_VIEWS, _viewed),
    (("layer_norm", "rms_norm"), _normalized),
)
"""Operations whose sizes can be read off their operands."""
