"""What a search for the fastest config of a kernel, or of a model, has found."""

from __future__ import annotations

import statistics
from typing import Literal

import msgspec

from torchstone.records.base import Record
from torchstone.records.evidence import Comparison

__all__ = [
    "Config",
    "Final",
    "Finals",
    "MeasurePolicy",
    "Measurement",
    "Status",
    "Tuning",
    "TuningKey",
    "Value",
    "key_of",
]

Value = bool | int | float | str | tuple[int, ...]
"""The value of a knob; a permutation is a tuple."""

Config = dict[str, Value]
"""One value for each knob, by name."""

Status = Literal["timed", "dropped", "wrong", "unverifiable", "crashed", "timed_out", "invalid"]
"""What became of a config.

``timed``: right, and timed. ``dropped``: right, and so much slower than the best that timing stopped
early. ``wrong``: it does not compute what the reference does. ``unverifiable``: right and wrong cannot
be told apart. ``crashed``: its process died. ``timed_out``: it did not answer. ``invalid``: it could not
be built.
"""


class Measurement(Record, frozen=True, kw_only=True):
    """What one config gave."""

    config: Config
    """The config."""
    status: Status
    """What became of it."""
    seconds: tuple[float, ...] = ()
    """Raw samples of one call; empty unless ``timed`` or ``dropped``."""
    compile_s: float = 0.0
    """Seconds that building it took."""
    measure_s: float = 0.0
    """Seconds that proving and timing it took."""
    relative: float | None = None
    """Largest relative error against float64, if it was proved or found wrong."""
    text: str = ""
    """What went wrong: one sentence."""
    facts: dict[str, float] = {}  # noqa: RUF012  msgspec copies it
    """What the compiler said: ``registers``, ``spills``, ``shared_bytes``."""
    proposer: str = ""
    """What asked for it: ``random``, ``expected-improvement``, ``prior``, ``neighbour``, ``llm``, ..."""

    @property
    def time(self) -> float | None:
        """Median seconds of one call; None if it has none, or is not known to be right."""
        usable = self.seconds and self.status in ("timed", "dropped")
        return statistics.median(self.seconds) if usable else None


class MeasurePolicy(Record, frozen=True, kw_only=True):
    """How configs are measured; another policy gives other figures, so it is part of the key."""

    samples: int = 12
    """Samples of a config that is not dropped."""
    race: int = 3
    """Samples after which a config may be dropped."""
    race_factor: float = 1.3
    """It is dropped if the least of them is beyond this factor of the best config's median."""
    build_s: float = 120.0
    """Limit of one build, seconds."""
    call_s: float = 20.0
    """Limit of proving and timing one config, seconds."""
    flush: bool = True
    """Whether each sample starts with none of the inputs in the last-level cache of a GPU."""
    rounds: int = 30
    """Interleaved rounds of the finals."""
    finalists: int = 4
    """Configs in the finals, beside the default and the control."""


class TuningKey(Record, frozen=True, kw_only=True):
    """What a measurement is of. Rows of the same key may be reused; rows of a near one are priors."""

    kernel: str
    """Its name."""
    space: str
    """Digest of the space: knobs and their values."""
    source: str
    """Digest of what is built from: the functions' source, lowered where the compiler can say."""
    sizes: dict[str, int]
    """The problem's sizes."""
    signature: tuple[str, ...]
    """One an input: dtype, shape, strides, whether its address is a multiple of 16."""
    device: str
    """Name of the device, or of the processor with its number of threads."""
    versions: dict[str, str]
    """Driver, torch, the compiler."""
    policy: str
    """Digest of the :class:`MeasurePolicy` and of the numerics class."""


class Final(Record, frozen=True, kw_only=True):
    """One config of the finals."""

    config: Config
    """The config."""
    label: str
    """``default``, ``finalist``, or ``control``: the leading config once more, built anew."""
    status: Status
    """What became of it; held-out inputs and odd sizes are included."""
    seconds: tuple[float, ...] = ()
    """One sample a round; rounds are interleaved, so samples of one round are paired."""
    relative: float | None = None
    """Largest relative error against float64, over all inputs."""
    text: str = ""
    """What went wrong."""


class Finals(Record, frozen=True, kw_only=True):
    """The best configs and the default, proved on held-out inputs and timed side by side."""

    entries: tuple[Final, ...]
    """All that took part."""
    cases: tuple[str, ...] = ()
    """On what they were proved."""


class Tuning(Record, frozen=True, kw_only=True):
    """One search, from its question to its answer: the evidence."""

    key: TuningKey
    """What was tuned, where."""
    searcher: str
    """Text form of the searcher with its hyperparameters."""
    seed: int
    """Of everything random."""
    budget_s: float | None = None
    """Seconds that the search might take."""
    budget_measurements: int | None = None
    """Measurements that it might take."""
    origin: str = ""
    """Where the tunable comes from, as ``torchstone tune`` takes it; empty where that is not known."""
    started_at: str
    """ISO 8601, UTC."""
    seconds: float
    """The whole search, finals included."""
    measurements: tuple[Measurement, ...]
    """Every config that the search was told of, in order; those known beforehand come first."""
    known: int
    """How many of them came from the cache."""
    siblings: int
    """Rows of other sizes, devices or versions that the searcher learned from."""
    siblings_allowed: bool = True
    """Whether it was to learn from any."""
    stop: str
    """Code of why the search ended."""
    stop_text: str
    """The same in words."""
    regret: float | None
    """How much faster than the best found the optimum is expected to be, a ratio."""
    floor_s: float | None
    """Seconds below which no config can be, by the roofline."""
    finals: Finals
    """The best configs and the default, proved on held-out inputs and timed side by side."""
    comparisons: tuple[Comparison, ...]
    """Each finalist against the default; ``recipe`` is the config's text form."""
    decision: Literal["PROMOTE", "KEEP_BASELINE", "HOLD"]
    """PROMOTE: a config is right and faster than the default. KEEP_BASELINE: none is. HOLD: the default
    itself could not be proved, or its time is not known."""
    config: Config
    """What to use: the winner, or the default."""
    text: str
    """The decision in one sentence."""
    problems: tuple[str, ...] = ()
    """What was found damaged, or could not be used."""


def key_of(config: Config) -> str:
    """A config's one text form: JSON with sorted names."""
    return msgspec.json.encode(config, order="deterministic").decode()
