"""The records that flow from room to room, and that a run keeps as its evidence.

All are frozen :class:`msgspec.Struct` values: they compare by value, encode to JSON, decode strictly
(an unknown field is an error), and give the JSON schema of ``report.json``. Times are seconds, sizes
bytes, ratios plain numbers; formatting happens in ``report/`` only. A float that cannot be stated
(a relative error against a non-finite value) is ``None``, never NaN.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "Absent",
    "Arrival",
    "Build",
    "Capture",
    "Case",
    "CaseErrors",
    "Comparison",
    "Crashed",
    "Decision",
    "Dim",
    "Entry",
    "Environment",
    "Failure",
    "InputSpec",
    "LoadResult",
    "MetricResult",
    "NotTried",
    "OutputErrors",
    "Reason",
    "Record",
    "ReferenceErrors",
    "Relation",
    "RunHeader",
    "Samples",
    "ScalarSpec",
    "TensorSpec",
    "TimedOut",
    "Unsupported",
    "Unverifiable",
    "Verdict",
    "VerdictEntry",
    "Verified",
    "WorkloadSpec",
    "Wrong",
    "factor_and_dim",
]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all records; each also says ``kw_only=True``, which msgspec does not inherit."""


# --- workload -------------------------------------------------------------------------------------


class Dim(Record, frozen=True, kw_only=True):
    """A named dimension and the sizes it may take."""

    name: str
    """The name used in shapes: ``"B"``."""
    low: int
    """Smallest size, inclusive."""
    high: int
    """Largest size, inclusive."""
    multiple: int = 1
    """Every size is a multiple of this."""


class TensorSpec(Record, frozen=True, kw_only=True, tag="tensor"):
    """One tensor input."""

    name: str
    """The argument's name."""
    dtype: str
    """The torch dtype without its prefix: ``"float32"``."""
    shape: tuple[int | str, ...]
    """Fixed sizes, names of dims, and multiples of them (``"5*b"``); see :func:`factor_and_dim`."""
    low: float | None = None
    """Smallest value that the model must take, if stated or, for integers, as seen in the example."""
    high: float | None = None
    """Largest value, likewise."""


def factor_and_dim(size: str) -> tuple[int, str]:
    """What a named size stands for: ``"b"`` is (1, "b"), ``"5*b"`` is (5, "b")."""
    factor, _, name = size.rpartition("*")
    return (int(factor) if factor else 1), name.strip()


class ScalarSpec(Record, frozen=True, kw_only=True, tag="scalar"):
    """One Python number passed as an input."""

    name: str
    """The argument's name."""
    kind: Literal["int", "float", "bool"]
    """Its Python type."""
    low: float
    """Smallest value seen or stated."""
    high: float
    """Largest value seen or stated."""


InputSpec = TensorSpec | ScalarSpec


class Arrival(Record, frozen=True, kw_only=True):
    """One recorded request of the traffic."""

    sizes: dict[str, int]
    """Size of every named dim."""
    scalars: dict[str, float] = {}
    """Value of scalar inputs, by name."""
    at_s: float | None = None
    """Arrival time since the recording's start, seconds."""


class WorkloadSpec(Record, frozen=True, kw_only=True):
    """What can be said of a workload without running it."""

    name: str
    """Its name."""
    inputs: tuple[InputSpec, ...]
    """Positional inputs, in order."""
    dims: tuple[Dim, ...]
    """Named dims."""
    example_sizes: dict[str, int]
    """Size of each dim in the example inputs."""
    traffic: tuple[Arrival, ...]
    """Recorded requests; one of the example's sizes where none were recorded."""
    metric: str | None
    """Name of the metric on labelled holdout data, if there is one."""
    candidates: tuple[str, ...] = ()
    """Names of the user's own implementations, for ``custom(NAME)``."""
    perturbs: bool = False
    """Whether the user gave a function that changes module state between calls."""
    digest: str
    """SHA-256 of everything that defines the workload."""


# --- environment ----------------------------------------------------------------------------------


class Environment(Record, frozen=True, kw_only=True):
    """Where a measurement was made; records from environments that differ are not compared."""

    python: str
    """Python version."""
    platform: str
    """``sys.platform`` and machine: ``linux-x86_64``."""
    cpu: str
    """Model name of the processor."""
    isa: tuple[str, ...]
    """Instruction sets that kernels choose by (``avx2``, ``avx512_vnni``, ``amx_bf16``), sorted."""
    cores: int
    """Cores that this process may use."""
    threads: int
    """Intra-op threads that candidates ran with."""
    memory_bytes: int
    """Physical memory."""
    packages: dict[str, str]
    """Versions of the packages that can change an answer or a time; absent ones are left out."""
    devices: tuple[str, ...] = ()
    """Accelerators, by name."""


class RunHeader(Record, frozen=True, kw_only=True):
    """First record of a run: what was asked, of what, where."""

    format: int
    """Version of the record format."""
    workload: WorkloadSpec
    """The workload."""
    policy: dict[str, object]
    """The policy, as plain data (its type lives in :mod:`torchstone.policy`)."""
    recipes: tuple[str, ...]
    """Candidates asked for, baseline first."""
    environment: Environment
    """Where."""
    seed: int
    """Seed of everything random in the run."""
    origin: str | None
    """Argument that ``torchstone run`` was given, for the reproduce lines; None from Python."""
    started_at: str
    """UTC, ISO 8601."""


# --- failures and verdicts ------------------------------------------------------------------------


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
    scalars: dict[str, float] = {}
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


# --- what the stages record -----------------------------------------------------------------------


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
)
"""Everything that a run appends."""
