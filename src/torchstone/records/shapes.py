"""What is found out about dynamic shapes: refusals, ladders, contracts."""

from __future__ import annotations

from typing import Literal

import msgspec

from torchstone.records.base import Record

__all__ = [
    "Attempt",
    "Axis",
    "Clause",
    "DimContract",
    "LadderStudy",
    "Outcome",
    "Probe",
    "Refusal",
    "RefusalCode",
    "Rung",
    "ShapeContract",
    "SourceLine",
    "Trial",
]


class SourceLine(Record, frozen=True, kw_only=True):
    """A line of the user's code."""

    file: str
    """Path of the file, as Python knows it."""
    line: int
    """Line number, 1-based."""
    text: str
    """The line, stripped; empty where the source cannot be read."""
    function: str = ""
    """The function that it is in."""


class Axis(Record, frozen=True, kw_only=True):
    """One dimension of one input."""

    input: str
    """The input's name; torch's own name of it where the workload is not known."""
    axis: int
    """Position in the shape, from 0."""
    dim: str | None = None
    """The size as the workload names it (``B``, ``5*B``); None where it is fixed or not known."""


RefusalCode = Literal[
    "VALUE_BRANCH",
    "VALUE_AS_INTEGER",
    "SIZE_BRANCH",
    "SIZE_AS_INTEGER",
    "OUTPUT_SIZE_BRANCH",
    "OUTPUT_SIZE_UNKNOWN",
    "RANGE_NARROWED",
    "SIZE_FIXED",
    "SIZES_TIED",
    "SIZE_OUT_OF_BOUNDS",
    "SIZES_ASSUMED_EQUAL",
    "PROGRAM_REFUSES",
    "CHECK_FAILED",
    "SHAPES_DISAGREE",
    "RANGES_CONFLICT",
    "NO_FAKE_KERNEL",
    "LEAVES_TORCH",
    "RECOMPILE_LIMIT",
    "UNSUPPORTED",
    "RAISES",
]


class Refusal(Record, frozen=True, kw_only=True, tag="refusal"):
    """An error of torch's capture, compiler or program in plain words."""

    code: RefusalCode
    """What kind of refusal it is."""
    text: str
    """One sentence: what torch could not do, and why."""
    where: SourceLine | None
    """The user's line that caused it; None where neither the error nor the trace tells."""
    axes: tuple[Axis, ...] = ()
    """The dimensions that it speaks of."""
    expression: str | None = None
    """The condition, with names of dims instead of torch's symbols: ``S > 128``."""
    bound: str | None = None
    """What to state about the dims so that this does not arise: ``B >= 2``, ``S <= 128``."""
    fix: str = ""
    """What to do, one or two sentences."""
    code_to_write: str = ""
    """The fix as code."""
    raw: str = ""
    """Type and first line of the error itself."""


Rung = Literal["unbacked", "unbacked-2", "backed", "automatic"]
"""How sizes of one dim are compiled: unbacked from 1; unbacked from 2 with graphs of their own for sizes
0 and 1; backed (``mark_dynamic``, which does the same and may guard); whatever torch makes of it."""


class Trial(Record, frozen=True, kw_only=True):
    """One combination of sizes, run compiled and eagerly."""

    sizes: dict[str, int]
    """Size of every named dim."""
    relative: float | None
    """Largest absolute difference from eager over eager's largest magnitude; None where it has none."""
    graphs: int
    """Graphs compiled for it."""
    seconds: float
    """Time of the call, compilation included."""


class Attempt(Record, frozen=True, kw_only=True):
    """One way to compile the model for its dynamic dims, tried on the declared ranges."""

    rungs: dict[str, Rung]
    """The rung of every dim."""
    trials: tuple[Trial, ...] = ()
    """What was run, in order, up to the first failure."""
    graphs: int = 0
    """Graphs compiled in all."""
    compile_s: float = 0.0
    """Time of the calls that compiled."""
    failed: Refusal | None = None
    """Why it cannot be used, where torch refused."""
    wrong: dict[str, int] | None = None
    """Sizes at which its answer is not eager's, where it answered."""
    unavailable: str | None = None
    """Why it was not tried."""
    median_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Steady-state seconds a call by sizes (``B=4 S=128``); empty where it was not measured."""
    against_backed: float | None = None
    """Geometric mean of its times over the backed ones, measured in turns; above 1 is slower."""


class LadderStudy(Record, frozen=True, kw_only=True, tag="ladder"):
    """Which rung of the ladder unbacked, unbacked from 2, backed, automatic holds for each dim."""

    backend: str
    """The ``torch.compile`` backend that it was tried with."""
    chosen: dict[str, Rung]
    """The rung of every dynamic dim; empty where there is none, or nothing compiles."""
    why: str
    """One or two sentences: what was chosen, and why the rungs above fell."""
    code: str
    """What to write for it."""
    attempts: tuple[Attempt, ...]
    """What was tried, in order; the backed and automatic rungs always are, for comparison."""
    graphs_without: int | None
    """Graphs that ``torch.compile`` makes of the same sizes if nothing is said."""
    seconds: float
    """Time it took."""
    not_tried: tuple[str, ...] = ()
    """What the time limit left out."""


Outcome = Literal["AGREES", "EAGER_RAISES", "REFUSES", "WRONG", "RAISES"]
"""Program against eager: the same; the model itself does not take the size; a guard says no; another
answer without a word; an error that is no guard's."""


class Probe(Record, frozen=True, kw_only=True):
    """One combination of sizes, run by the model and by the program."""

    sizes: dict[str, int]
    """Size of every named dim."""
    outcome: Outcome
    """What the program does."""
    unguarded: Outcome | None = None
    """Where it refuses: what the program would do if its guards were not asked, as in packages."""
    relative: float | None = None
    """Largest absolute difference from eager over eager's largest magnitude, where both answered."""
    refusal: Refusal | None = None
    """The program's error, or the model's own, explained."""


class Clause(Record, frozen=True, kw_only=True):
    """One condition on the sizes, beyond the declared ranges, that has to hold."""

    text: str
    """The condition: ``S % 8 == 0``, ``B != 1``, ``B == C``."""
    dims: tuple[str, ...]
    """Dims that it speaks of."""
    where: SourceLine | None
    """The user's line that causes it."""
    proof: Literal["guard", "sweep", "both"]
    """How it is known: a guard that the trace recorded, sizes at which the program failed, or both."""
    model: bool
    """Whether the model itself, run eagerly, needs it; if not, only the capture does."""
    silent: bool = False
    """Whether a program that checks no guards answers wrongly where it does not hold."""
    needless: bool = False
    """Whether the program without its guards is right wherever it was tried against the condition."""
    fix: str = ""
    """How to be rid of it, or how to declare it."""


class DimContract(Record, frozen=True, kw_only=True):
    """The sizes of one dim that the program holds for."""

    dim: str
    """The dim's name."""
    declared: str
    """The declared range: ``1..64``."""
    low: int
    """Smallest size that holds."""
    high: int
    """Largest."""
    text: str
    """The contract in words: ``S in 8..256, S % 8 == 0 needed by model.py:41 x.view(B, S // 8, 8)``."""
    clauses: tuple[Clause, ...] = ()
    """Conditions on this dim alone."""


class ShapeContract(Record, frozen=True, kw_only=True, tag="contract"):
    """For which sizes one captured program is the model."""

    subject: Literal["program", "automatic", "none"]
    """What was swept: the program given; one that export made where it may narrow the ranges as it
    likes (``Dim.AUTO``); none, since there is no program for any range."""
    dims: tuple[DimContract, ...]
    """One for each dynamic dim; none where there is no program."""
    ties: tuple[Clause, ...] = ()
    """Conditions between dims."""
    narrowed: tuple[str, ...] = ()
    """What of the declared ranges is lost, one line each: ``B: 1..64 -> 2..64``."""
    refusals: dict[str, Refusal] = msgspec.field(default_factory=dict)
    """Why export refused, by the way of asking: ``declared``, ``automatic``, ``dynamic``."""
    probes: tuple[Probe, ...] = ()
    """The sweep."""
    seconds: float = 0.0
    """Time it took."""
    not_tried: tuple[str, ...] = ()
    """What the time limit or the model left out."""

    @property
    def sound(self) -> bool:
        """Whether every declared size holds."""
        return not self.narrowed and not self.ties and self.subject != "none"
