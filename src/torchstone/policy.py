"""The policy: what a candidate must keep, and what it is chosen for."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from torchstone.errors import PolicyError
from torchstone.records import Record

__all__ = ["Policy"]

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class Policy(Record, frozen=True, kw_only=True):
    """Constraints and objective of a run; every field has a default that is safe."""

    objective: Literal["latency", "p99", "throughput", "cost"] = "latency"
    """What the promoted candidate is the best at, among those that meet every constraint."""
    max_relative_error: NotNegative = 1e-2
    """Error budget of lossy recipes: worst relative Frobenius error against the float64 reference.
    Recipes that only reassociate are held to the bound of their dtype, whatever this says."""
    max_metric_drop: NotNegative = 0.01
    """Largest drop of the holdout metric; the upper end of its 95% interval must lie below."""
    min_speedup: Positive = 1.0
    """The lower end of the speed-up's interval must reach this, as well as clear the noise."""
    p99_s: Positive | None = None
    """Largest p99 latency under load, seconds, at the highest rate that the baseline sustains."""
    slo_s: Positive | None = None
    """Latency objective that goodput counts by; p99_s where not given."""
    max_peak_memory_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Largest peak resident memory of a candidate's process."""
    max_compile_s: Positive | None = None
    """Longest build that may be promoted, seconds."""
    max_recompiles: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Most graphs that the recorded traffic may make a lazy compiler build."""
    dollars_per_hour: Positive | None = None
    """Price of this machine."""
    calls: Positive | None = None
    """Expected calls; a candidate that would not earn its build time back by then is not promoted."""
    search_s: Positive = 1800.0
    """Time for building and verifying candidates; what is left untried is said."""
    build_s: Positive = 600.0
    """Time limit of one candidate's build, seconds."""
    call_s: Positive = 120.0
    """Time limit of one call, seconds."""
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Memory limit of a candidate's process; half of the machine's where not given."""
    rounds: Annotated[int, msgspec.Meta(ge=5)] = 60
    """Most interleaved rounds of the benchmark, where its time allows so many."""
    bench_s: Positive = 60.0
    """Time for the interleaved benchmark, seconds; rounds are cut, never below 5."""
    load_s: NotNegative = 5.0
    """Seconds of open-loop load for each finalist and rate; 0 leaves it out."""
    load_rates: tuple[Positive, ...] = (0.3, 0.6, 0.9)
    """Offered rates, as fractions of the baseline's capacity."""
    finalists: Annotated[int, msgspec.Meta(ge=1)] = 3
    """How many candidates beside the baseline go into the load test."""

    def __post_init__(self) -> None:
        if self.p99_s is not None and self.slo_s is not None and self.slo_s > self.p99_s:
            raise PolicyError(
                f"slo_s = {self.slo_s:g} is above p99_s = {self.p99_s:g}",
                hint="the objective that goodput counts by cannot be looser than the p99 constraint",
            )
