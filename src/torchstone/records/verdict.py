"""Cases, errors and what they lead to: failures and verdicts."""

from __future__ import annotations

from typing import Literal

import msgspec

from torchstone.records.base import Record

__all__ = [
    "Case",
    "CaseErrors",
    "Crashed",
    "Failure",
    "NotTried",
    "OutputErrors",
    "ReferenceErrors",
    "TimedOut",
    "Unsupported",
    "Unverifiable",
    "Verdict",
    "Verified",
    "Wrong",
]


class Crashed(Record, frozen=True, kw_only=True, tag="crashed"):
    """The candidate's process died, or raised."""

    stage: str
    """What it was doing: ``build``, ``verify:CASE``, ``bench``, ``load``."""
    kind: Literal["signal", "exit", "exception", "memory"]
    """How: killed by a signal, ``os._exit``, a Python exception, or over the memory limit."""
    text: str
    """One line: signal name, exit code, or the exception's type and message."""
    log: str
    """The last lines that it printed, traceback included."""


class TimedOut(Record, frozen=True, kw_only=True, tag="timed_out"):
    """The candidate did not answer within its limit and was killed."""

    stage: str
    """What it was doing."""
    limit_s: float
    """The limit."""
    log: str
    """The last lines that it printed."""


class Unsupported(Record, frozen=True, kw_only=True, tag="unsupported"):
    """The engine is absent here, or says that it cannot do this model."""

    text: str
    """Why."""
    hint: str | None = None
    """The command that installs it, where that would help."""


class NotTried(Record, frozen=True, kw_only=True, tag="not_tried"):
    """The search time was spent before this candidate's turn."""

    text: str
    """Why."""


class OutputErrors(Record, frozen=True, kw_only=True):
    """Errors of one output against the float64 reference."""

    output: str
    """Path of the output in the model's result: ``[0]``, ``.logits``."""
    relative: float | None
    """Frobenius norm of the error over the reference's. 0 for two zeros; None where not finite."""
    worst: float | None
    """Largest absolute error of an element, over the larger of that element's magnitude in the reference
    and the reference's root mean square. None as above."""
    worst_index: tuple[int, ...] = ()
    """Where that element is."""
    sqnr_db: float | None = None
    """Signal to quantization-noise ratio, decibels; None where the error is zero or not finite."""
    non_finite: int = 0
    """Elements that are not finite where the reference is, the other way round, or of another sign."""
    mismatched: int = 0
    """For integer and boolean outputs: elements that differ."""
    elements: int = 0
    """Number of elements."""
    shape_or_dtype: str | None = None
    """What is wrong with the output's shape or dtype, if anything."""
    dtype: str = ""
    """The output's torch dtype without its prefix; empty for what is no tensor."""
    typical: float | None = None
    """Root mean square of the elements' errors without the worst one, in the unit of ``worst``."""
    rms: float | None = None
    """Root mean square of the reference."""
    error_rms: float | None = None
    """Root mean square of the error."""
    differing: int = 0
    """Elements that are not equal to eager's own."""


class Case(Record, frozen=True, kw_only=True):
    """One verification input, as a description from which the same tensors are made anywhere."""

    name: str
    """Unique in a run: ``ends-low``, ``odd``, ``values-tiny``."""
    kind: Literal["example", "traffic", "dims", "values", "layout", "protocol"]
    """What it probes."""
    sizes: dict[str, int]
    """Size of every named dim."""
    values: str = "random"
    """How floats are filled: ``example``, ``random``, ``zeros``, ``ties``, ``large``, ``tiny``, ..."""
    layout: Literal["contiguous", "strided", "offset"] = "contiguous"
    """How input tensors lie in memory."""
    protocol: Literal["once", "repeat", "hold", "mutate", "perturb"] = "once"
    """How the callable is driven: once; twice on the same input; first result held over a second
    call; input overwritten after the call; module state changed between calls."""
    scalars: dict[str, float] = msgspec.field(default_factory=dict)
    """Values of scalar inputs."""
    seed: int = 0
    """Seed of the values."""


class ReferenceErrors(Record, frozen=True, kw_only=True, tag="reference"):
    """Eager's own error against the float64 reference, on one case."""

    case: Case
    """The case."""
    errors: tuple[OutputErrors, ...]
    """One an output."""
    problem: str | None = None
    """Why the case gives no reference (the model itself raises there, or is not deterministic)."""
    independent: tuple[str, ...] = ()
    """Outputs that are the same, to the bit, for two different inputs."""


class CaseErrors(Record, frozen=True, kw_only=True):
    """A candidate's errors on one case."""

    case: str
    """The case's name."""
    errors: tuple[OutputErrors, ...]
    """One an output."""
    problem: str | None = None
    """A protocol failure (held result overwritten, not repeatable), or the exception it raised."""


class Verified(Record, frozen=True, kw_only=True, tag="verified"):
    """Right on every case that could be judged."""

    cases: int
    """Cases judged."""
    worst_case: str
    """Name of the case with the largest relative error."""
    relative: float
    """That error: worst relative Frobenius error over all cases and outputs."""
    eager_relative: float
    """Eager's own worst error over the same cases."""
    bound: float
    """The bound that it was held to."""
    notes: tuple[str, ...] = ()
    """What is worth knowing: closer to float64 than eager, output does not depend on the input, ..."""


class Wrong(Record, frozen=True, kw_only=True, tag="wrong"):
    """Wrong on at least one case."""

    reason: Literal[
        "ERROR_ABOVE_BOUND",
        "ELEMENT_ABOVE_BOUND",
        "NON_FINITE",
        "INTEGER_MISMATCH",
        "SHAPE_OR_DTYPE",
        "NOT_REPEATABLE",
        "RESULT_OVERWRITTEN",
        "ALIASES_INPUT",
        "MUTATION_DIFFERS",
        "STALE_STATE",
        "RAISES",
        "METRIC_DROP",
    ]
    """Reason code."""
    text: str
    """One sentence that a person understands, with the figures."""
    case: str
    """Where it was seen."""
    failed: tuple[str, ...]
    """Names of all the cases that failed."""
    relative: float | None
    """Worst relative error over the judged cases; None where not finite."""
    bound: float
    """The bound that it was held to."""


class Unverifiable(Record, frozen=True, kw_only=True, tag="unverifiable"):
    """No case can tell right from wrong, or a case that matters cannot."""

    text: str
    """Why: eager is itself far from float64, or the model is not deterministic."""
    case: str
    """Where it was seen."""


Failure = Crashed | TimedOut | Unsupported | NotTried
Verdict = Verified | Wrong | Unverifiable | Crashed | TimedOut | Unsupported | NotTried
