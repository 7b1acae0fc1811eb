"""From what torch raised while it traced to one sentence and the line of the user's code."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from torchstone.capture.tracer.sizes import Site

__all__ = ["of", "one_line", "site_of"]

_PACKAGE = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)

_SENTENCES = (
    (
        "DataDependentOutputException",
        "Python needs the value of a tensor here (a branch, .item(), int())",
    ),
    (
        "GuardOnDataDependentSymNode",
        "Python needs the value of a tensor here (a branch, .item(), int())",
    ),
    (
        "DynamicOutputShapeException",
        "the size of a result depends on values here (nonzero, a mask as index)",
    ),
    ("UnsupportedOperatorException", "this operation has no rule for shapes (no fake kernel)"),
)
"""Exception to reason, for those whose own text speaks of torch's insides."""


def of(error: BaseException) -> tuple[str, Site | None]:
    """The reason, and the innermost line of the user's own code on the error's way."""
    kind = type(error).__name__
    return dict(_SENTENCES).get(kind, one_line(error)), site_of(error)


def one_line(error: BaseException) -> str:
    """An exception as one line: its type and the first line that says something."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    text = next((line for line in lines if line), "")
    return f"{type(error).__name__}: {text}"[:400].rstrip(": ")


def site_of(error: BaseException) -> Site | None:
    """The innermost line that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_PACKAGE, _TORCH, "<")):
            return Site(frame.filename, frame.lineno or 0, frame.name)
    return None
