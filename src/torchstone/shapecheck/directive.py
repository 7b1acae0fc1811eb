"""The comment that says how to call a model.

::

    # torchstone: check Net(width=64), x=f32[B, 3, 32, 32], mask=bool[B, S], S=8..512

After ``check`` comes what makes the model: an expression in the file's own names that gives an
``nn.Module``, or a function of its inputs. Then, parted by commas, its arguments and dims:

=====================  ==========================================================================
``x=f32[B, 3, 2*S]``   an argument by name: dtype and sizes. A size is a number, a dim, or sums,
                       products and whole quotients of them (``S + 1``, ``4*B``, ``H // 2``)
``f32[B, 3]``          an argument by position
``steps=4``            a number, text, None, True or False is passed as it is
``S=1..64``            the range of a dim that a shape names (also ``S=16*k``, ``S="16*k, 32..512"``):
                       both ends and a size in between must run. A dim without a range may be any
                       size: the model is only held to run at some
=====================  ==========================================================================

dtypes: f64 f32 f16 bf16 i64 i32 i16 i8 u8 bool c64, or torch's own names. A comment whose brackets are
open, or that ends in a comma, goes on in the comment on the next line. One file may hold several.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

from torchstone.errors import InputError, WorkloadError
from torchstone.records import Dim
from torchstone.workload.dims import parse_dim

__all__ = ["Directive", "TensorArgument", "directives"]

GRAMMAR = "write '# torchstone: check Net(), x=f32[B, 3, 32, 32]'"

_START = re.compile(r"#\s*torchstone:\s*check\b\s*(.*)\Z", re.DOTALL)
_RANGE = re.compile(r"""("[^"]*"|'[^']*')|(?<![\w.])(\d+)\s*\.\.\s*(\d+)""")
_SHORT = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "bool": "bool",
    "c64": "complex64",
}
_DTYPES = {**_SHORT, **{name: name for name in _SHORT.values()}}
_SIZE_NODES = (ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Name, ast.Load, ast.Constant)


class TensorArgument(NamedTuple):
    """An argument that is a tensor."""

    dtype: str
    """torch's name of its dtype."""
    sizes: tuple[str, ...]
    """Its sizes as expressions: ``("B", "3", "2*S")``."""


class Directive(NamedTuple):
    """One comment, read."""

    line: int
    """Where it begins, 1-based."""
    model: str
    """The expression that makes the model."""
    positional: tuple[object, ...]
    """Arguments by position: :class:`TensorArgument`, or a plain value."""
    keywords: dict[str, object]
    """Arguments by name."""
    dims: tuple[Dim, ...]
    """Dims with a stated range."""

    @property
    def names(self) -> tuple[str, ...]:
        """The dims of all shapes, in order of appearance."""
        found: dict[str, None] = {}
        for argument in (*self.positional, *self.keywords.values()):
            if isinstance(argument, TensorArgument):
                for size in argument.sizes:
                    found.update(dict.fromkeys(_names(ast.parse(size, mode="eval"))))
        return tuple(found)


def directives(path: Path, text: str) -> tuple[Directive, ...]:
    """The directives in a file's comments.

    :param path: the file, for messages.
    :param text: its content, which must be valid Python.
    :raises WorkloadError: where one does not follow the grammar, with its line.
    """
    return tuple(_parse(path, line, given) for line, given in _comments(text))


def _comments(text: str) -> list[tuple[int, str]]:
    """Line and text of each directive, lines that go on joined."""
    found: list[tuple[int, str]] = []
    goes_on_at = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if start := _START.match(token.string):
            found.append((token.start[0], start[1]))
        elif found and token.start[0] == goes_on_at:
            line, given = found.pop()
            found.append((line, f"{given} {token.string.lstrip('# ')}"))
        else:
            continue
        goes_on_at = token.start[0] + 1 if _goes_on(found[-1][1]) else 0
    return found


def _goes_on(text: str) -> bool:
    return text.rstrip().endswith(",") or any(text.count(a) > text.count(b) for a, b in ("()", "[]"))


def _parse(path: Path, line: int, text: str) -> Directive:
    def refuse(what: str, hint: str = GRAMMAR) -> WorkloadError:
        return WorkloadError(f"check directive: {what}", where=path, line=line, hint=hint)

    try:
        call = ast.parse(f"_({_RANGE.sub(_quoted, text)})", mode="eval").body
    except SyntaxError as error:
        raise refuse(f"{text.strip()!r} does not parse: {error.msg}") from None
    if not isinstance(call, ast.Call) or not call.args:
        raise refuse("it names no model")
    model, *rest = call.args
    try:
        positional = tuple(_argument(node) for node in rest)
        named = {k.arg: k.value for k in call.keywords if k.arg is not None}
        tensors = {n: t for n, v in named.items() if (t := _tensor(v)) is not None}
        directive = Directive(line, ast.unparse(model), positional, dict(tensors), ())
        dims = tuple(parse_dim(n, _range(v)) for n, v in named.items() if n in directive.names)
        plain = {n: _plain(v) for n, v in named.items() if n not in (*tensors, *directive.names)}
    except InputError as error:
        raise refuse(error.what, error.hint or GRAMMAR) from None
    keywords = {n: {**tensors, **plain}[n] for n in named if n in tensors or n in plain}
    return directive._replace(keywords=keywords, dims=dims)


def _quoted(match: re.Match[str]) -> str:
    """``1..64`` as text, which Python can read; what is text stays."""
    return match[1] or f"'{match[2]}..{match[3]}'"


def _argument(node: ast.expr) -> object:
    tensor = _tensor(node)
    return _plain(node) if tensor is None else tensor


def _tensor(node: ast.expr) -> TensorArgument | None:
    """The tensor that ``f32[B, 3]`` stands for; None where it is no such thing."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)):
        return None
    if node.value.id not in _DTYPES:
        raise WorkloadError(f"{node.value.id!r} is no dtype", hint=f"known are {', '.join(_SHORT)}")
    sizes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for size in sizes:
        if not all(isinstance(part, _SIZE_NODES) for part in ast.walk(size)) or not _whole(size):
            what = f"{ast.unparse(size)!r} is no size"
            raise WorkloadError(what, hint="a size is a number, a dim, or +, -, *, // of these")
    return TensorArgument(_DTYPES[node.value.id], tuple(ast.unparse(size) for size in sizes))


def _whole(size: ast.expr) -> bool:
    numbers = [part.value for part in ast.walk(size) if isinstance(part, ast.Constant)]
    return all(type(number) is int and number >= 0 for number in numbers)


def _plain(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        what = f"{ast.unparse(node)!r} is neither a tensor, a plain value nor the range of a dim"
        raise WorkloadError(what, hint="a tensor is dtype[sizes]: f32[B, 3]") from None


def _range(node: ast.expr) -> str | int:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int):
        return node.value
    return ast.unparse(node)


def _names(tree: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
