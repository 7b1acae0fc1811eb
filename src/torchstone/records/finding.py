"""What ``torchstone check`` says of the shapes in a file."""

from __future__ import annotations

from typing import Literal

import msgspec

from torchstone.records.base import Record

__all__ = [
    "CheckReport",
    "CheckedEntry",
    "FileCheck",
    "Finding",
    "Operand",
    "Place",
    "Prover",
    "SymbolicRun",
]

Prover = Literal["pyrefly", "symbolic"]
"""A checker: Pyrefly reads the code, symbolic execution runs it on tensors without values."""


class Place(Record, frozen=True, kw_only=True):
    """A stretch of source; lines and columns count from 1."""

    file: str
    """The file, as it was given."""
    line: int
    """First line."""
    column: int = 1
    """First column."""
    end_line: int
    """Last line."""
    end_column: int | None = None
    """Column after the last character; None where it is not known."""


class Operand(Record, frozen=True, kw_only=True):
    """A tensor that went into an operation."""

    dtype: str
    """Its torch dtype without the prefix."""
    shape: tuple[int | str, ...]
    """Its sizes: numbers, and expressions of named dims (``"3*S"``)."""


class Finding(Record, frozen=True, kw_only=True):
    """Something wrong, once, whoever found it."""

    kind: Literal["shape", "type", "could-not-run"]
    """A shape error; an error of another kind of type (with ``--all`` only); or an entry that could not
    be executed, which says nothing of its shapes and fails nothing."""
    rule: str
    """What was broken: the operation (``linear``, ``cat``), or Pyrefly's name of the error."""
    message: str
    """One sentence: what is wrong, with the sizes that do not fit."""
    place: Place
    """The user's own line."""
    proved_by: tuple[Prover, ...]
    """Who found it: one checker, or both."""
    operands: tuple[Operand, ...] = ()
    """The tensors of the failing operation, as symbolic execution saw them."""
    path: str | None = None
    """Where in the model: ``encoder.layers.1.mlp.fc2``; None outside of modules."""
    entry: str | None = None
    """What was executed: ``Net(width=64)``."""
    sizes: dict[str, int] = msgspec.field(default_factory=dict)
    """Sizes of the named dims at which it fails; empty where it does not depend on them."""
    within: str | None = None
    """Deepest line outside of torch, ``file:line``, where that is not in the checked file."""


class CheckedEntry(Record, frozen=True, kw_only=True):
    """One thing that was executed."""

    name: str
    """The model as it is made: ``Net(width=64)``, ``build()``."""
    how: Literal["workload", "directive", "factory", "class"]
    """What said how to call it: torchstone.toml, a comment, a pair of functions, or its first layer."""
    line: int
    """The line that says so."""
    status: Literal["clean", "failed", "not-run"]
    """What came of it."""
    dims: tuple[str, ...] = ()
    """Named dims that were symbolic."""
    operations: int = 0
    """Torch operations in one forward."""
    notes: tuple[str, ...] = ()
    """What the sizes must be for it to run; what was assumed."""


class SymbolicRun(Record, frozen=True, kw_only=True):
    """What symbolic execution saw of one file."""

    entries: tuple[CheckedEntry, ...] = ()
    """What was executed."""
    findings: tuple[Finding, ...] = ()
    """What failed."""
    executed: tuple[int, ...] = ()
    """Lines of the file that began and, in every run, went well."""
    unreached: tuple[int, ...] = ()
    """Lines of the functions on the way to a failure that come after it and were not reached."""
    notes: tuple[str, ...] = ()
    """What could not be looked at, and why."""


class FileCheck(Record, frozen=True, kw_only=True):
    """All that was found in one file."""

    file: str
    """The file, as it was given."""
    findings: tuple[Finding, ...] = ()
    """What is wrong."""
    refuted: tuple[Finding, ...] = ()
    """What Pyrefly reported of lines that ran well on all inputs tried: false alarms."""
    held: tuple[Finding, ...] = ()
    """What Pyrefly reported of lines that a failure kept from being reached."""
    entries: tuple[CheckedEntry, ...] = ()
    """What was executed."""
    notes: tuple[str, ...] = ()
    """What could not be looked at, and why."""


class CheckReport(Record, frozen=True, kw_only=True):
    """The answer of ``torchstone check --format json``."""

    files: tuple[FileCheck, ...]
    """One a file, in the order given."""
    checkers: tuple[Prover, ...]
    """Who looked."""
    seconds: float
    """Wall time."""
    notes: tuple[str, ...] = ()
    """What holds for all files: a checker that is not installed."""

    @property
    def passed(self) -> bool:
        """Whether no file has an error; an entry that could not be executed is none."""
        return not any(f.kind != "could-not-run" for file in self.files for f in file.findings)
