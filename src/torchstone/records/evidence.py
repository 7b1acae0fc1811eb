"""What the stages of a run find out, in the order of the stages."""

from __future__ import annotations

from typing import Literal

from torchstone.records.base import Record
from torchstone.records.divergence import Divergence
from torchstone.records.rewrites import Rewrites
from torchstone.records.verdict import CaseErrors, ReferenceErrors, Verdict

__all__ = [
    "Absent",
    "Build",
    "Capture",
    "Comparison",
    "Decision",
    "Entry",
    "LoadResult",
    "MetricResult",
    "Reason",
    "Relation",
    "Samples",
    "VerdictEntry",
]


class Absent(Record, frozen=True, kw_only=True):
    """Why an engine cannot be used here."""

    engine: str
    """The engine step's name."""
    why: str
    """What is missing."""
    hint: str | None = None
    """The command that installs it."""


class Capture(Record, frozen=True, kw_only=True, tag="capture"):
    """How the model was captured."""

    mode: Literal["export", "dynamo"]
    """``export``: one whole graph; ``dynamo``: regions, since export refused."""
    program: str | None
    """SHA-256 of the exported program's file; None for regions."""
    seconds: float
    """Time it took."""
    nodes: int = 0
    """Operations in the graph (in all graphs, for regions)."""
    graphs: int = 1
    """Number of graphs."""
    breaks: tuple[str, ...] = ()
    """Each graph break: reason and the user's source line."""
    refused: str | None = None
    """Why export refused, in one line, where it did."""
    traced: bool = False
    """Whether the graph is the light tracer's, which export then only had to prove."""
    trace_refused: str | None = None
    """Why the light tracer refused, in one line with the user's source line, where it did."""
    narrowed: tuple[str, ...] = ()
    """Ranges that export narrowed or fixed, each as text: ``B: 1..64 -> 2..64``."""
    output_spec: str | None = None
    """Serialized pytree of the outputs."""
    parameters: int = 0
    """Number of parameters."""


class Build(Record, frozen=True, kw_only=True, tag="build"):
    """Build report of one candidate."""

    recipe: str
    """The recipe's text form."""
    seconds: float
    """From the factory's module to a callable, weights loaded; compile time included."""
    first_call_s: float
    """First call on the example inputs, which includes compilation for lazy engines."""
    peak_memory_bytes: int
    """Peak resident memory of the process that built it."""
    artifact: str | None
    """Folder of the engine's files inside the run, if the engine writes any."""
    files: tuple[str, ...] = ()
    """Files in that folder without which it cannot be loaded, relative to it."""
    recompiles: int | None = None
    """Graphs compiled over the recorded traffic, where the engine compiles lazily."""
    notes: tuple[str, ...] = ()
    """What the backend wants known."""
    rewrites: Rewrites | None = None
    """The firing log, where the recipe rewrites the program."""
    log: str = ""
    """The last lines that the build printed."""


class VerdictEntry(Record, frozen=True, kw_only=True, tag="verdict"):
    """The verdict on one candidate."""

    recipe: str
    """The recipe's text form."""
    verdict: Verdict
    """What was found."""
    cases: tuple[CaseErrors, ...] = ()
    """The evidence, case by case."""


class MetricResult(Record, frozen=True, kw_only=True, tag="metric"):
    """The user's metric on the labelled holdout, candidate against eager."""

    recipe: str
    """The recipe's text form."""
    name: str
    """The metric's name."""
    value: float
    """The candidate's."""
    baseline: float
    """Eager's."""
    drop: float
    """``baseline - value``: positive is worse."""
    drop_low: float
    """Lower end of its 95% paired bootstrap interval."""
    drop_high: float
    """Upper end."""
    examples: int
    """Labelled examples."""


class Samples(Record, frozen=True, kw_only=True, tag="samples"):
    """Raw times of one candidate in one interleaved session; never collapsed to one number."""

    session: str
    """Identifies the interleaved session; only samples of one session are compared."""
    recipe: str
    """The recipe's text form."""
    label: str
    """``candidate``, ``baseline``, or ``baseline-again`` for the A/A control."""
    rounds: tuple[tuple[float, ...], ...]
    """Seconds a call, per round, in the order they ran; round i of every label is adjacent in time."""
    order: tuple[int, ...]
    """Position of this label within each part of each round: labels take turns part by part."""
    sizes: tuple[dict[str, int], ...]
    """Sizes of the requests that one round replays, in order."""
    warmup: tuple[float, ...]
    """Warm-up calls, seconds, kept for the record."""
    steady: bool
    """Whether times had stopped falling when the rounds began."""


Relation = Literal["FASTER", "SLOWER", "SAME", "UNCLEAR"]


class Comparison(Record, frozen=True, kw_only=True, tag="comparison"):
    """How much faster a candidate is than the baseline of its session."""

    session: str
    """The interleaved session."""
    recipe: str
    """The candidate."""
    against: str
    """The baseline's recipe, or another peer's."""
    ratio: float
    """Baseline time over candidate time: above 1 is faster."""
    low: float
    """Lower end of the bootstrap interval of the ratio."""
    high: float
    """Upper end."""
    confidence: float
    """Of the interval."""
    noise: float
    """Half-width, as a ratio above 1, of what A/A shows in the same session: 0.01 is one per cent."""
    relation: Relation
    """FASTER only if the whole interval clears the noise."""
    candidate_s: float
    """Median seconds a call of the candidate."""
    against_s: float
    """Median seconds a call of what it is compared with."""


class LoadResult(Record, frozen=True, kw_only=True, tag="load"):
    """One candidate under open-loop Poisson load at one rate."""

    recipe: str
    """The recipe's text form."""
    rate: float
    """Offered requests a second."""
    requests: int
    """Requests sent."""
    errors: int
    """Requests that failed."""
    achieved: float
    """Requests completed a second."""
    quantiles_s: dict[str, float | None]
    """``p50 p90 p95 p99 p999`` -> latency from scheduled arrival, seconds; None: too few requests."""
    slo_s: float | None
    """The latency objective that goodput counts by."""
    goodput: float | None
    """Requests a second answered within the objective."""
    latencies_s: tuple[float, ...]
    """Every latency, in order of arrival."""
    cost_per_million: float | None = None
    """Policy currency (dollars) per million requests at the candidate's capacity."""
    break_even_calls: float | None = None
    """Calls after which the extra build time is earned back; None if never."""


class Reason(Record, frozen=True, kw_only=True):
    """Why the gate decided as it did."""

    code: str
    """Stable code, see :mod:`torchstone.gate`."""
    text: str
    """One sentence."""
    recipe: str | None = None
    """The candidate that it speaks of."""


class Decision(Record, frozen=True, kw_only=True, tag="decision"):
    """What the gate decided."""

    kind: Literal["PROMOTE", "KEEP_BASELINE", "HOLD"]
    """The decision."""
    recipe: str
    """What to run: the promoted recipe, or the baseline."""
    reasons: tuple[Reason, ...]
    """Why, most important first."""


Entry = (
    Capture
    | ReferenceErrors
    | Build
    | VerdictEntry
    | MetricResult
    | Samples
    | Comparison
    | LoadResult
    | Decision
    | Divergence
)
"""Everything that a run appends."""
