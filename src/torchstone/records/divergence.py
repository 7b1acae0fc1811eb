"""Where two ways of computing a model first part."""

from __future__ import annotations

from typing import Literal

from torchstone.records.base import Record

__all__ = ["Divergence", "OperandStats", "Origin", "Site"]


class Origin(Record, frozen=True, kw_only=True):
    """Where an operation comes from."""

    file: str | None = None
    """The user's source file."""
    line: int | None = None
    """Its line, 1-based."""
    text: str = ""
    """The source line."""
    module: str = ""
    """Path of the submodule that ran it: ``layers.3.attention``; empty for the model itself."""


class Site(Record, frozen=True, kw_only=True):
    """One operation of one of the two sides."""

    op: str
    """Its name: ``aten.sub.Tensor``."""
    code: str
    """The call, with its literals: ``aten.sub.Tensor(x, y)``."""
    origin: Origin
    """Where it comes from."""


class OperandStats(Record, frozen=True, kw_only=True):
    """Statistics of one tensor that goes into the operations at fault."""

    name: str
    """``x0``, ``x1``, ..., as in the codes and in the reproduction; the parameter's path where it is
    one."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """Its torch dtype without prefix."""
    low: float | None
    """Smallest finite value; None where there is none."""
    high: float | None
    """Largest finite value."""
    mean: float | None
    """Mean of the finite values."""
    rms: float | None
    """Their root mean square."""
    non_finite: int = 0
    """Elements that are infinite or NaN."""


class Divergence(Record, frozen=True, kw_only=True, tag="divergence"):
    """What :mod:`torchstone.diff` found: the first operation whose error its inputs do not explain."""

    a: str
    """What is taken as right: ``float64``, a recipe, a file."""
    b: str
    """What is examined."""
    kind: Literal["OP", "FUSED", "MODULE", "STRUCTURE", "NONE", "UNKNOWN"]
    """``OP``: one operation gives other numbers. ``FUSED``: operations that an engine compiles together.
    ``MODULE``: several operations that stand for several others. ``STRUCTURE``: operations that only
    one side has. ``NONE``: no divergence beyond rounding. ``UNKNOWN``: it was not found; ``text`` says
    why."""
    text: str
    """One sentence."""
    ops: tuple[Site, ...] = ()
    """What B does there, first operation first."""
    instead_of: tuple[Site, ...] = ()
    """What A does there."""
    operands: tuple[OperandStats, ...] = ()
    """What goes into it, in B."""
    local_error: float | None = None
    """Relative error of B's result against A's operations in float64 on B's own operands."""
    eager_error: float | None = None
    """Error of A's operations there in B's number format: what rounding explains."""
    bound: float | None = None
    """What the local error was held to."""
    global_error: float | None = None
    """Relative error of the model's result in which it ends; None where not finite or not known."""
    case: str = ""
    """The verification case that it was looked for on; empty for inputs given otherwise."""
    compared: int = 0
    """Operations of B that were found right before or beside it; for an engine, parts compiled."""
    reproduction: str | None = None
    """Python file that shows it on its own: ``python FILE`` exits with 1 while it diverges."""
    reproduced: bool | None = None
    """Whether that file was run and did show it; None where it was not run."""
    notes: tuple[str, ...] = ()
    """What is worth knowing: values kept as samples only, ..."""
