"""What a graph break means: Dynamo's words to plain ones, and what stands around it. Pure; no torch.

The patterns are of the texts of ``torch._dynamo`` (2.13), whose kinds of break are listed in its
``graph_break_registry.json``. The edits for constructs around a break were each tried: what is said to
help did, and ``for i in range(len(blocks))``, ``enumerate``, ``tuple(blocks)``, ``nn.Sequential`` and a
method of its own around the loop did not.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from torchstone.records import Limit
from torchstone.records.compiles import LimitKind

__all__ = ["KINDS", "Told", "limits", "told"]

_OWN_FRAME = sys.version_info < (3, 12)  # since PEP 709 a comprehension is part of its function


class Told(NamedTuple):
    """A break in plain words."""

    kind: str
    """One of :data:`KINDS`, or ``OTHER``."""
    reason: str
    """Why the graph ends, in one sentence."""
    edit: str
    """What removes it."""
    raw: str
    """Dynamo's kind of break and what it met."""


class _Kind(NamedTuple):
    name: str
    pattern: str
    """Of Dynamo's kind, explanation and context; a group is what ``{what}`` stands for."""
    reason: str
    edit: str


_RAW = 300
_WRAP = "@torch.library.custom_op('mine::name', mutates_args=())"

KINDS: tuple[_Kind, ...] = (
    _Kind(
        "PRINT",
        r"builtin operator `(print)`",
        "print() writes to the terminal, which a graph cannot do.",
        "Remove it, or let it run after the graph: "
        "torch._dynamo.config.reorderable_logging_functions.add(print)",
    ),
    _Kind(
        "WARNING",
        r"`_warnings\.warn`|module: _warnings,",
        "warnings.warn() writes to the terminal, which a graph cannot do.",
        "Remove it, or let it run after the graph: "
        "torch._dynamo.config.reorderable_logging_functions.add(warnings.warn)",
    ),
    _Kind(
        "LOGGING",
        r"logging\.Logger method|<Logger |LoggingLoggerVariable",
        "A logger writes to its handlers, which a graph cannot do.",
        "Remove it, or leave it out when compiled: "
        "torch._dynamo.config.ignore_logging_functions.add(logger.METHOD)",
    ),
    _Kind(
        "NUMPY_RANDOM",
        r"(?s)_local_scalar_dense.*\bnp(?:umpy)?\.random",
        "A number drawn by NumPy becomes a tensor's value, and is needed as a Python number.",
        "Draw it with torch: torch.rand(())",
    ),
    _Kind(
        "ITEM",
        r"Tensor\.item\(\)|_local_scalar_dense|Tensor\.__(?:int|float|bool|index)__",
        "A tensor's value is needed as a Python number, which only running the graph so far can give.",
        "Keep it a tensor (x * v holds for a tensor v of no axes), or set "
        "torch._dynamo.config.capture_scalar_outputs = True",
    ),
    _Kind(
        "TOLIST",
        r"Tensor\.tolist\(\)",
        "A tensor's values are needed as a Python list, which only running the graph so far can give.",
        "Keep them a tensor and index it with tensors.",
    ),
    _Kind(
        "DATA_BRANCH",
        r"Data-dependent branching",
        "Python branches on a tensor's value, which only running the graph so far can give.",
        "Compute both and choose, torch.where(condition, a, b), or give torch.cond both as functions.",
    ),
    _Kind(
        "DATA_ASSERT",
        r"Data-dependent assertion",
        "An assertion looks at a tensor's value.",
        "Use torch._assert_async(condition), or leave it out when serving.",
    ),
    _Kind(
        "DYNAMIC_SIZE",
        r"(?s)Dynamic shape operator.*?Operator `([\w.]+)`",
        "The size of the result of {what} depends on values.",
        "Keep the size: torch.where(mask, x, 0) rather than x[mask]; or set "
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True",
    ),
    _Kind(
        "ASKED_FOR",
        r"torch\._dynamo\.graph_break\(\)",
        "The code asks for a break: torch._dynamo.graph_break().",
        "Remove the call.",
    ),
    _Kind(
        "DISABLED",
        r"torch\.compiler\.disable",
        "The function is marked with torch.compiler.disable.",
        "Remove the mark, or make the function a torch.library.custom_op, which a graph can hold.",
    ),
    _Kind(
        "RNN",
        r"wrap RNN, GRU, or LSTM",
        "Dynamo does not trace nn.RNN, nn.GRU and nn.LSTM.",
        "Set torch._dynamo.config.allow_rnn = True",
    ),
    _Kind(
        "CLOCK",
        r"builtin `(time\.\w+)",
        "{what}() reads the clock, which a graph cannot do.",
        "Take the time outside of the model.",
    ),
    _Kind(
        "PYTHON_RANDOM",
        r"builtin `[^`]*\b(Random\.\w+|random\.\w+)",
        "A number is drawn by Python's random, which a graph cannot do.",
        "Draw it with torch: torch.rand(())",
    ),
    _Kind(
        "COPY",
        r"copy\.deepcopy a tensor",
        "copy.deepcopy() of a tensor is not traced.",
        "Use x.clone().",
    ),
    _Kind(
        "CONTEXT",
        r"enter a `([\w.]+)` context manager",
        "The context manager {what} is not one that Dynamo knows.",
        "Enter it outside of the model.",
    ),
    _Kind(
        "RAISES",
        r"raised exception ([\w.]+\(.*?\))\s*(?:\n|$)|Observed exception",
        "The code raises {what}.",
        "Check the inputs outside of the model, or use torch._check.",
    ),
    _Kind(
        "GENERATOR",
        r"Attempt to trace generator",
        "The compiled function is a generator.",
        "Compile a plain function that calls it.",
    ),
    _Kind(
        "SKIPPED",
        r"trace the (?:Python )?builtin `([^`]+?)\.?`|qualname: ([\w.]+)",
        "{what} is compiled C code or marked as not to be traced, so Dynamo cannot look into it.",
        f"Call it outside of the model, replace it by torch operations, or wrap it: {_WRAP}",
    ),
    _Kind(
        "BUILTIN",
        r"builtin operator `([^`]+)`",
        "Dynamo does not know the builtin {what} for these arguments.",
        "Call it outside of the model, or replace it by torch operations.",
    ),
    _Kind(
        "METHOD",
        r"trace method `([^`]+)` of class `([^`]+)`",
        "Dynamo does not know the method {what}.",
        f"Call it outside of the model, or wrap it: {_WRAP}",
    ),
)
"""The kinds of break that are known, the first that matches counts."""

_LOOP = "graph break in loop"
_EDITS: dict[LimitKind, str] = {
    "TRY": "Move the call out of the try block: Dynamo cannot resume inside one.",
    "GENERATOR": "Make the calls one by one in a plain function: Dynamo cannot resume in a generator.",
    "COMPREHENSION": "Write the calls out, [a(x), b(x)]: Dynamo cannot resume inside a comprehension.",
    "LOOP": "Write the calls out (a, b = self.blocks; x = b(a(x))), or let each make the next from a "
    "method of its own: Dynamo cannot resume inside a loop.",
}


def told(kind: str, text: str, source: str) -> Told:
    """Say a break in plain words.

    :param kind: Dynamo's name for this kind of break.
    :param text: its explanation, several lines.
    :param source: the user's source line.
    """
    name, explanation, context = _read(kind, text)
    searched = f"{name}\n{explanation}\n{context}\n{source}"
    raw = f"{name}: {context}" if context else name
    for known in KINDS:
        match = re.search(known.pattern, searched)
        if match is not None:
            what = ".".join(reversed([g for g in match.groups() if g])) or "the operation"
            return Told(known.name, known.reason.format(what=what), known.edit, raw[:_RAW])
    reason = explanation.partition("\n")[0] or f"{name}."
    edit = f"Move the statement out of the model, or wrap it: {_WRAP}"
    return Told("OTHER", reason, edit, raw[:_RAW])


def limits(frames: tuple[tuple[str, int, str], ...]) -> tuple[Limit, ...]:
    """Constructs around the given places from which Dynamo cannot resume.

    :param frames: file, line and function of each of the user's frames, outermost first.
    """
    found = [limit for file, line, function in frames for limit in _around(file, line, function)]
    return tuple({(limit.kind, limit.file, limit.line): limit for limit in found}.values())


def _read(kind: str, text: str) -> tuple[str, str, str]:
    """Dynamo's kind, explanation and context, of the break itself rather than of the loop around it."""
    if kind == _LOOP:
        head, _, rest = text.partition("Graph break encountered:")
        lines = [line.strip() for line in (rest or head).splitlines() if line.strip()]
        kind = lines[0] if lines else kind
        text = text.partition("*** While handling")[0]
    explanation = re.search(
        r"Explanation: (.+?)(?=\n\s*(?:Hint:|Developer debug context:)|\Z)", text, re.S
    )
    context = re.search(r"Developer debug context: (.+?)(?=\n\s*\n|\Z)", text, re.S)
    said = " ".join(explanation[1].split()) if explanation else ""
    return kind, said, " ".join(context[1].split()) if context else ""


def _around(file: str, line: int, function: str) -> Iterator[Limit]:
    nodes = _enclosing(file, line)
    starts = [
        i
        for i, n in enumerate(nodes)
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    inner = nodes[starts[-1] :] if starts else nodes
    if inner and isinstance(inner[0], ast.FunctionDef) and _yields(inner[0]):
        yield _limit("GENERATOR", file, inner[0].lineno)
    for node in inner:
        if isinstance(node, ast.Try) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0):
            yield _limit("TRY", file, node.lineno)
        elif isinstance(node, ast.For | ast.While | ast.AsyncFor) and line >= node.body[0].lineno:
            yield _limit("LOOP", file, node.lineno)
        elif _OWN_FRAME and isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):
            yield _limit("COMPREHENSION", file, node.lineno)
        elif isinstance(node, ast.GeneratorExp):
            yield _limit("GENERATOR", file, node.lineno)


def _enclosing(file: str, line: int) -> tuple[ast.AST, ...]:
    """Nodes of the file's syntax tree that contain the line, outermost first."""
    tree = _tree(file)
    if tree is None:
        return ()
    found: list[ast.AST] = []
    at: ast.AST | None = tree
    while at is not None:
        children = [c for c in ast.walk(at) if c is not at and _contains(c, line)]
        wide = [c for c in children if isinstance(c, _SCOPES)]
        at = min(wide, key=lambda c: (c.lineno, -(c.end_lineno or 0), c.col_offset), default=None)
        if at is not None:
            found.append(at)
    return tuple(found)


_SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Try, ast.For, ast.While, ast.AsyncFor,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip


def _contains(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= line <= last


def _yields(function: ast.FunctionDef) -> bool:
    """Whether it is a generator, not counting what is defined inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))
    return False


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    source = "".join(linecache.getlines(file))
    try:
        return ast.parse(source) if source else None
    except SyntaxError:  # not the source that runs
        return None


def _limit(kind: LimitKind, file: str, line: int) -> Limit:
    text = linecache.getline(file, line).strip()
    return Limit(kind=kind, file=file, line=line, text=text, edit=_EDITS[kind])
