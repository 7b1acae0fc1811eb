"""What the public KernelBench suite gave: per problem, per level, with the raw samples."""

from __future__ import annotations

import statistics
from typing import Literal

from torchstone.records.base import Record
from torchstone.records.environment import Environment
from torchstone.records.evidence import Relation
from torchstone.records.inventory import Peaks

__all__ = [
    "BenchColumn",
    "BenchOurs",
    "BenchProblem",
    "BenchProof",
    "BenchRoofline",
    "BenchRun",
    "ColumnStatus",
    "LevelSummary",
    "ProblemOutcome",
]

ColumnStatus = Literal[
    "timed", "ran", "wrong", "unverifiable", "unfit", "invalid", "crashed", "timed_out"
]
"""What became of a column.

``timed``: it ran and was timed. ``ran``: it ran, and was not timed, since others were clearly faster.
``wrong``: a candidate that no contract allows. ``unverifiable``: right and wrong cannot be told apart.
``unfit``: it is not for this problem or device. ``invalid``: it could not be built. ``crashed``: its
process died. ``timed_out``: it did not answer.
"""

ProblemOutcome = Literal["judged", "degenerate", "unverifiable", "failed"]
"""What became of a problem.

``judged``: right and wrong can be told. ``degenerate``: its output does not depend on its input, so
nothing is won by it. ``unverifiable``: there is no float64 reference, and the baseline is kept.
``failed``: the problem itself cannot be run here.
"""


class BenchProof(Record, frozen=True, kw_only=True):
    """Whether a column keeps to one contract."""

    contract: float
    """Bound of the relative error, and of each element's, absolute and relative."""
    proved: bool
    """Whether it does on every case."""
    by: Literal["bound", "eager", ""]
    """``bound``: within the contract. ``eager``: on some case only by being no worse than eager there,
    which is itself beyond the contract."""
    text: str = ""
    """What speaks against it: one sentence."""


class BenchColumn(Record, frozen=True, kw_only=True):
    """One way to run a problem, and what came of it."""

    name: str
    """Of the column or candidate."""
    candidate: bool
    """Whether it may be promoted."""
    status: ColumnStatus
    """What became of it."""
    text: str = ""
    """Why, unless timed."""
    note: str = ""
    """What it was made of: rules that fired, products that were converted."""
    cold_s: float | None = None
    """Seconds of building it and calling it once, nothing cached; None where something was."""
    warm_s: float | None = None
    """The same with what was compiled before in the caches on disk."""
    prove_s: float = 0.0
    """Seconds of judging it."""
    race: tuple[float, ...] = ()
    """Seconds of one call, in the rounds that chose the finalists."""
    seconds: tuple[float, ...] = ()
    """Seconds of one call in the final rounds; samples of the same position are adjacent in time."""
    suite_trials: int = 0
    """Trials by the suite's protocol."""
    suite_passed: int = 0
    """How many of them were within the suite's tolerance of eager."""
    relative: float | None = None
    """Largest relative error against float64; None where not known or not finite."""
    proofs: tuple[BenchProof, ...] = ()
    """One a contract; none for what was not judged against float64."""

    @property
    def time(self) -> float | None:
        """Median seconds of one call in the final rounds, else in the race."""
        samples = self.seconds or self.race
        return statistics.median(samples) if samples else None

    def keeps(self, contract: float) -> bool:
        """Whether it is proved under a contract."""
        return any(p.contract == contract and p.proved for p in self.proofs)


class BenchOurs(Record, frozen=True, kw_only=True):
    """What we would run under one contract."""

    contract: float
    """The contract."""
    choice: str
    """The candidate promoted, or ``KEEP_BASELINE``."""
    reason: str
    """Why: one sentence."""
    ratio: float = 1.0
    """Time of ``against`` over ours: above 1 is faster; 1 where the baseline is kept."""
    low: float = 1.0
    """Lower end of its bootstrap interval."""
    high: float = 1.0
    """Upper end."""
    relation: Relation | None = None
    """Of the fastest proved candidate to the baseline; None where none was compared."""
    strong_ratio: float | None = None
    """Time of the strong baseline over ours; None where that was not timed."""

    @property
    def promoted(self) -> bool:
        """Whether a candidate is."""
        return self.choice != "KEEP_BASELINE"


class BenchRoofline(Record, frozen=True, kw_only=True):
    """The least that a problem asks of the machine."""

    bytes: int
    """Each input and used parameter once, each output once."""
    flops: float
    """Of products, and one an element for what passes over elements."""
    memory_s: float
    """The bytes over the copy bandwidth of this run."""
    compute_s: float
    """The FLOPs over the peak of their dtypes, as measured in this run."""

    @property
    def memory_bound(self) -> bool:
        """Whether moving takes longer than computing, at best."""
        return self.memory_s > self.compute_s


class BenchProblem(Record, frozen=True, kw_only=True):
    """One problem's result."""

    level: int
    """Its level."""
    number: int
    """Its number in the level."""
    name: str
    """Its file's name."""
    digest: str
    """SHA-256 of the file."""
    outcome: ProblemOutcome
    """What became of it."""
    text: str = ""
    """Why, unless judged."""
    against: str = ""
    """What ratios are told against: ``compile``, or ``eager`` where that does not compile."""
    noise: float | None = None
    """Half-width of what two labels of the same callable differed by, as a ratio above 1."""
    columns: tuple[BenchColumn, ...] = ()
    """All that was tried."""
    ours: tuple[BenchOurs, ...] = ()
    """One a contract."""
    strong: str | None = None
    """The fastest column of the strong baseline."""
    roofline: BenchRoofline | None = None
    """The least that it asks of the machine, if its operations could be counted."""
    eager_relative: float | None = None
    """Eager's own largest relative error against float64 on the suite's inputs."""
    optimize_cold_s: float | None = None
    """Seconds of building the baseline and all candidates with as many lanes as there are cores, nothing
    cached, then proving and timing them; None where something was cached."""
    optimize_warm_s: float | None = None
    """The same with what was compiled in the caches on disk, one build after the other."""
    seconds: float = 0.0
    """Seconds that it kept the process that times, everything included."""

    @property
    def key(self) -> str:
        """``level/number``."""
        return f"{self.level}/{self.number}"

    def column(self, name: str) -> BenchColumn | None:
        """The column of that name."""
        return next((c for c in self.columns if c.name == name), None)

    def under(self, contract: float) -> BenchOurs | None:
        """Ours under a contract."""
        return next((o for o in self.ours if o.contract == contract), None)

    @property
    def bandwidth_share(self) -> float | None:
        """Least bytes over the copy bandwidth, over the time of ours under the strictest contract."""
        best = self.best_s
        if self.roofline is None or best is None or not self.roofline.memory_bound:
            return None
        return self.roofline.memory_s / best

    @property
    def best_s(self) -> float | None:
        """Median seconds of ours under the strictest contract; the baseline's where that is kept."""
        if not self.ours:
            return None
        name = self.ours[0].choice if self.ours[0].promoted else self.against
        found = self.column(name)
        return None if found is None else found.time


class ContractSummary(Record, frozen=True, kw_only=True):
    """Ours under one contract, over some problems."""

    contract: float
    """The contract."""
    promoted: int
    """Problems with a candidate promoted."""
    kept: int
    """Problems that keep the baseline."""
    geomean: float | None
    """Geometric mean of the ratios, kept baselines counting 1."""
    median: float | None
    """Their median."""
    least: float | None
    """The least of them."""
    fast_1: float | None
    """Share of problems that are right and more than 1x as fast as the baseline."""
    fast_2: float | None
    """The same for 2x."""
    strong_geomean: float | None
    """Geometric mean of the ratios to the strong baseline, where that was timed."""
    strong_timed: int
    """Problems where it was."""


class LevelSummary(Record, frozen=True, kw_only=True):
    """Figures of one level."""

    level: int
    """The level."""
    half: Literal["all", "even", "odd"]
    """Which problems: all, those for development, or those for the final measurement."""
    problems: int
    """Problems with a result, degenerate and failed ones included."""
    counted: int
    """Those that the figures are of: judged, and unverifiable ones, which count as kept baselines."""
    correct: int
    """Of these, those whose answer is right: a proved candidate, or the baseline itself."""
    degenerate: tuple[str, ...]
    """Those whose output does not depend on the input."""
    failed: tuple[str, ...]
    """Those that could not be run."""
    unverifiable: tuple[str, ...]
    """Those without a reference."""
    contracts: tuple[ContractSummary, ...]
    """One a contract."""
    memory_bound: int
    """Problems whose bytes take longer than their FLOPs."""
    bandwidth_median: float | None
    """Median share of the copy bandwidth that ours reaches on them."""
    optimize_cold_s: float | None
    """Median seconds of optimizing one problem, nothing cached."""
    optimize_warm_s: float | None
    """The same with warm caches."""


class BenchRun(Record, frozen=True, kw_only=True):
    """A run over the suite, or over a part of it: the evidence."""

    command: str
    """What was asked."""
    environment: Environment
    """Where it was measured."""
    device: str
    """Name of the device."""
    dtype: str
    """Of parameters and floating-point inputs."""
    inputs_on: str
    """Whose generator drew parameters and inputs: ``cpu`` gives the suite's very values."""
    tolerance: float
    """The suite's, for this dtype."""
    started_at: str
    """ISO 8601, UTC."""
    seconds: float
    """Of this run; what earlier runs into the same folder found is not in it."""
    measured: int
    """Problems that this run measured; the others were known."""
    jobs: int
    """Processes that compiled."""
    peaks: Peaks | None
    """What the device does at best."""
    copy_bytes_per_s: float | None
    """Bytes read and written a second by a large copy."""
    problems: tuple[BenchProblem, ...]
    """By level and number."""
    levels: tuple[LevelSummary, ...]
    """Figures by level, all problems and both halves."""
    worst: tuple[str, ...]
    """The ten counted problems with the least ratio under the strictest contract, worst first."""
    damaged: tuple[str, ...] = ()
    """Results that were found damaged, and redone."""
