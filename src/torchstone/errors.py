"""The exceptions that Torchstone raises on misuse.

Expected failures (a candidate that crashes, is wrong, or is absent) are values, see
:mod:`torchstone.records`. What is raised is one of these, and each says what, where and what to do::

    TorchstoneError
    ├── InputError              the user's input is bad (exit code 2)
    │   ├── WorkloadError       torchstone.toml, the Python file beside it, or the objects passed
    │   ├── PolicyError         a constraint that cannot hold
    │   ├── CaptureError        a function that no single graph can stand for
    │   └── RecipeError         a recipe's text form
    ├── EnvironmentLacksError   something has to be installed first (exit code 3)
    ├── StoreError              a run directory that cannot be used
    └── BundleError             a bundle that is damaged, or foreign to this machine
        └── EnvelopeError       a call outside what the bundle was proven for
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "BundleError",
    "CaptureError",
    "EnvelopeError",
    "EnvironmentLacksError",
    "InputError",
    "PolicyError",
    "RecipeError",
    "StoreError",
    "TorchstoneError",
    "WorkloadError",
]


class TorchstoneError(Exception):
    """Base of all errors raised on purpose.

    :param what: what is wrong, one sentence.
    :param where: the file that it was found in, if any.
    :param line: its line, 1-based.
    :param hint: what to do about it.
    """

    exit_code = 2

    def __init__(
        self,
        what: str,
        *,
        where: str | Path | None = None,
        line: int | None = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.line = line
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        place = ""
        if self.where is not None:
            place = f"{self.where}:{self.line}: " if self.line is not None else f"{self.where}: "
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{place}{self.what}{hint}"


class InputError(TorchstoneError):
    """What the user gave cannot be used as it is."""


class WorkloadError(InputError):
    """The workload's description, its Python file, or what these return is wrong."""


class PolicyError(InputError):
    """A policy constraint is malformed or cannot hold."""


class CaptureError(InputError):
    """A function that no single graph can stand for, with the line at fault."""


class RecipeError(InputError):
    """A recipe's text form does not parse, or its steps do not go together."""


class EnvironmentLacksError(TorchstoneError):
    """The environment lacks a package, a tool or a device; the hint names the command that brings it."""

    exit_code = 3


class StoreError(TorchstoneError):
    """A run directory does not exist, is in use, or holds no usable run."""


class BundleError(TorchstoneError):
    """A bundle is incomplete, changed since it was written, or made for another kind of machine."""


class EnvelopeError(BundleError):
    """A call is outside the bundle's contract, and its fallback cannot answer it either."""
