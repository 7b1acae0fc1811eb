"""Inputs of a module class that says nothing of them: from annotations, or from its first layer.

What comes of it are guesses. A class passes if it runs with one of them; that it runs with none is told
only where the failure does not hang on what was guessed (:mod:`torchstone.shapecheck.symbolic`).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torchstone.shapecheck.entries import Arguments, Form, FreeDim, Target

__all__ = ["classes"]

_JAXTYPING = {
    "Float": torch.float32,
    "Float32": torch.float32,
    "Float16": torch.float16,
    "BFloat16": torch.bfloat16,
    "Int": torch.int64,
    "Int64": torch.int64,
    "Int32": torch.int32,
    "Integer": torch.int64,
    "Bool": torch.bool,
    "Num": torch.float32,
    "Inexact": torch.float32,
}
_SIDES = (32, 28, 64, 224, 96, 128, 256, 84, 227, 299, 384, 512, 160, 192, 50, 100, 105, 150, 200)
"""Sides of square images that models are made for, the most usual first; then all small ones."""
_SMALL_SIDES = tuple(n for n in range(8, 128, 4) if n not in _SIDES)
_LENGTHS = (37, 64, 128, 1024)
_VOLUMES = (16, 32, 64)
_FIRST = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.Linear)
_Shape = tuple[int | str, ...]


def classes(module: ModuleType, _path: Path, text: str) -> Iterator[Target]:
    """The module classes of a file that their defaults make, in the order of the file."""
    tree = ast.parse(text)
    for node in (n for n in tree.body if isinstance(n, ast.ClassDef)):
        cls = getattr(module, node.name, None)
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)) or not _by_defaults(cls):
            continue
        forward = next(
            (f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "forward"), None
        )
        if forward is not None:
            forms = partial(_forms, forward)
            yield Target(name=f"{node.name}()", how="class", line=node.lineno, build=cls, forms=forms)


def _by_defaults(cls: type) -> bool:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(cls).parameters.values()
    return all(p.default is not p.empty or p.kind in kinds for p in parameters)


def _forms(forward: ast.FunctionDef, made: object) -> tuple[Form, ...]:
    if not isinstance(made, nn.Module):
        return ()
    arguments = forward.args.args[1:]
    required = arguments[: len(arguments) - len(forward.args.defaults)]
    annotated = [_annotated(argument.annotation, made) for argument in required]
    stated = [a for a in annotated if a is not None]
    if required and len(stated) == len(required):
        return (_form(stated),)
    if len(required) == 1:
        return tuple(_form([guess]) for guess in _of_first_layer(made))
    return ()


def _form(tensors: list[tuple[torch.dtype, _Shape]]) -> Form:
    names = {size: None for _, shape in tensors for size in shape if isinstance(size, str)}
    first = {shape[0] for _, shape in tensors if shape}

    def make(sizes: Mapping[str, Any]) -> Arguments:
        shapes = [(d, [sizes[n] if isinstance(n, str) else n for n in shape]) for d, shape in tensors]
        return tuple(torch.empty(shape, dtype=dtype) for dtype, shape in shapes), {}

    dims = tuple(FreeDim(name, None, name in first) for name in names)
    return Form(make=make, dims=dims, ranks=tuple(len(shape) for _, shape in tensors))


def _annotated(annotation: ast.expr | None, made: nn.Module) -> tuple[torch.dtype, _Shape] | None:
    """dtype and sizes that an annotation states; None where it states none.

    Read are jaxtyping's ``Float[Tensor, "b t 64"]`` and Pyrefly's ``Tensor[[B, 3, 32]]`` and
    ``Shaped[Tensor, "[B, 3, 32]"]``.
    """
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if not isinstance(annotation, ast.Subscript):
        return None
    kind = ast.unparse(annotation.value).rpartition(".")[2]
    inner = annotation.slice
    text = _text(inner.elts[1]) if isinstance(inner, ast.Tuple) and len(inner.elts) == 2 else None
    if kind in _JAXTYPING and text is not None:
        words, dtype = text.split(), _JAXTYPING[kind]
    elif kind == "Shaped" and text is not None:
        words, dtype = text.strip("[] ").replace(",", " ").split(), torch.float32
    elif kind == "Tensor" and isinstance(inner, ast.List):
        words, dtype = [ast.unparse(size) for size in inner.elts], torch.float32
    else:
        return None
    sizes = [_known(word.lstrip("#"), made) for word in words]
    known = tuple(size for size in sizes if size is not None)
    return (dtype, known) if len(known) == len(sizes) else None


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _known(word: str, made: nn.Module) -> int | str | None:
    """A size in an annotation: a number, a number that is an attribute or default, or a name."""
    if word.isdigit():
        return int(word)
    if not word.isidentifier():
        return None  # an expression, or any number of dims
    own = getattr(made, word, None)
    parameter = inspect.signature(type(made)).parameters.get(word)
    for value in (own, None if parameter is None else parameter.default):
        if type(value) is int:
            return value
    return word


def _of_first_layer(made: nn.Module) -> list[tuple[torch.dtype, _Shape]]:
    layer = next((m for m in made.modules() if isinstance(m, _FIRST)), None)
    shapes: list[_Shape] = []
    if isinstance(layer, nn.Embedding):
        return [(torch.int64, ("B", "S")), (torch.int64, ("B",))]
    if isinstance(layer, nn.Linear):
        size = layer.in_features
        shapes = [("B", size), ("B", "S", size), ("B", 1, 28, 28), ("B", 3, 32, 32)]
    elif isinstance(layer, nn.RNNBase):
        shapes = [("B", "S", layer.input_size)]
    elif isinstance(layer, nn.Conv1d):
        shapes = [("B", layer.in_channels, n) for n in _LENGTHS]
    elif isinstance(layer, nn.Conv2d):
        shapes = [("B", layer.in_channels, n, n) for n in (*_SIDES, *_SMALL_SIDES)]
    elif isinstance(layer, nn.Conv3d):
        shapes = [("B", layer.in_channels, n, n, n) for n in _VOLUMES]
    return [(torch.float32, shape) for shape in shapes]
