"""One list from two checkers. Pure.

The same bug is told once: a line that both complain of is proved by both. What Pyrefly says of a line
that ran well, on all inputs tried, is refuted: it reads types, and a type may be wider than what
happens (a ``ModuleList`` of unlike layers). What it says of a declared return type stays: the line may
run well and still give another shape than the one declared. What it says of lines that a failure kept
from being reached is held until that is mended, since most of it follows from the failure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from torchstone.records import FileCheck, Finding, SymbolicRun

__all__ = ["merge"]

_DECLARED = re.compile(r"declared return type `Tensor\[\[")
"""An error on a shape that the user declared, rather than on what an operation takes."""


def merge(file: str, read: Sequence[Finding], run: SymbolicRun | None) -> FileCheck:
    """What both found.

    :param file: the file's name for the user.
    :param read: Pyrefly's findings.
    :param run: what symbolic execution saw; None where it was not asked.
    """
    run = run or SymbolicRun()
    found = list(run.findings)
    refuted: list[Finding] = []
    held: list[Finding] = []
    for one in read:
        same = next((i for i, other in enumerate(found) if _same(one, other)), None)
        if same is not None:
            found[same] = msgspec.structs.replace(found[same], proved_by=("pyrefly", "symbolic"))
        elif one.kind == "shape" and _among(one, run.executed) and not _DECLARED.search(one.message):
            refuted.append(one)
        elif one.kind == "shape" and one.place.line in run.unreached:
            held.append(one)
        else:
            found.append(one)
    return FileCheck(
        file=file,
        findings=tuple(
            sorted(found, key=lambda f: (f.place.file != file, f.place.line, f.place.column))
        ),
        refuted=tuple(refuted),
        held=tuple(held),
        entries=run.entries,
        notes=run.notes,
    )


def _same(read: Finding, ran: Finding) -> bool:
    """Whether a finding of Pyrefly's is the failure that was executed: their lines overlap."""
    if "symbolic" not in ran.proved_by or ran.kind != "shape" or read.kind != "shape":
        return False
    a, b = read.place, ran.place
    return a.file == b.file and a.line <= b.end_line and b.line <= a.end_line


def _among(one: Finding, lines: Sequence[int]) -> bool:
    return any(one.place.line <= line <= one.place.end_line for line in lines)
