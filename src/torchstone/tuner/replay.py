"""Recorded tables: every config of a space measured once, so that searches can be compared on a CPU.

A table says what each config gave: raw samples, seconds of compilation, or why there is no time. It is
kept as JSON, gzipped.
"""

from __future__ import annotations

import gzip
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from torchstone.errors import InputError
from torchstone.records import Record
from torchstone.records.tuning import Measurement, MeasurePolicy, Status, Value
from torchstone.tuner.search.base import History, Problem, Proposal
from torchstone.tuner.space import Choice, Knob, Only, Space, key_of

__all__ = [
    "ReplayMeasurer",
    "Row",
    "Table",
    "features_of",
    "problem_of",
    "read",
    "space_of",
    "write",
]


class Row(Record, frozen=True, kw_only=True):
    """What one config gave when the table was made."""

    values: tuple[Value, ...]
    """The config: one value a knob, in the order of :attr:`Table.knobs`."""
    status: Status = "timed"
    """``timed``, or why there is no time."""
    seconds: tuple[float, ...] = ()
    """Raw samples of one call; empty unless timed."""
    compile_s: float = 0.0
    """Seconds that one core took to compile it."""
    text: str = ""
    """What went wrong, unless timed."""
    facts: dict[str, float] = {}  # noqa: RUF012  msgspec copies it
    """What the compiler said: ``registers``, ``spills``, ``shared_bytes``."""

    @property
    def time(self) -> float | None:
        """Median of the samples: what the config is worth."""
        return statistics.median(self.seconds) if self.seconds else None


class Table(Record, frozen=True, kw_only=True):
    """One kernel, at one size, on one device: all configs of its space."""

    kernel: str
    """Its name."""
    device: str
    """The device's name: ``NVIDIA H200``."""
    sizes: dict[str, int]
    """The problem's sizes."""
    knobs: dict[str, tuple[Value, ...]]
    """Values of each knob, in their natural order."""
    rows: tuple[Row, ...]
    """One a valid config; what is not here could not be asked for."""
    default: dict[str, Value] | None = None
    """The config that the kernel's author would use untuned, if known."""
    floor_s: float | None = None
    """Seconds below which no config can be: the roofline."""
    device_facts: dict[str, float] = {}  # noqa: RUF012  msgspec copies it
    """Figures of the device: ``multiprocessors``, ``l2_bytes``, ``bandwidth`` (bytes a second), ..."""

    @property
    def name(self) -> str:
        """``kernel/size x size/device``."""
        sizes = "x".join(str(s) for s in self.sizes.values())
        return "/".join(part for part in (self.kernel, sizes, self.device) if part)

    @property
    def best(self) -> Row:
        """The quickest."""
        return min((r for r in self.rows if r.seconds), key=lambda r: statistics.median(r.seconds))

    def config(self, row: Row) -> dict[str, Value]:
        """A row's config by name."""
        return dict(zip(self.knobs, row.values, strict=True))


def write(table: Table, path: Path) -> None:
    """Write a table; the same table gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(msgspec.json.encode(table), mtime=0))


def read(path: Path) -> Table:
    """Read one of our tables.

    :raises InputError: where it is damaged or of another form.
    """
    try:
        return msgspec.json.decode(gzip.decompress(path.read_bytes()), type=Table)
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise InputError(f"not a table of measurements: {error}", where=path) from None


def space_of(table: Table) -> Space:
    """The table's space: every config that has a row.

    A knob that has one value wherever an earlier one has certain values does not matter there.
    """
    known = {row.values for row in table.rows}
    default = table.default or {}
    knobs: dict[str, Knob] = {n: Choice(v, default.get(n)) for n, v in table.knobs.items()}
    for place, name in enumerate(table.knobs):
        for earlier in list(table.knobs)[:place]:
            only = _only(table, earlier, name)
            if only is not None and _holds(table, Space({**knobs, name: only})):
                knobs[name] = only
                break
    return Space(knobs, valid=(lambda config: tuple(config.values()) in known,))


def _only(table: Table, earlier: str, name: str) -> Only | None:
    """That ``name`` matters only for some values of ``earlier``, if that is how it looks."""
    at, to = list(table.knobs).index(earlier), list(table.knobs).index(name)
    seen: dict[Value, set[Value]] = {v: set() for v in table.knobs[earlier]}
    for row in table.rows:
        seen[row.values[at]].add(row.values[to])
    fixed = {next(iter(found)) for found in seen.values() if len(found) == 1}
    among = tuple(v for v, found in seen.items() if len(found) > 1)
    if len(fixed) != 1 or not among:
        return None
    return Only(Choice(table.knobs[name], fixed.pop()), earlier, among)


def _holds(table: Table, space: Space) -> bool:
    return all(space.why_not(table.config(row)) is None for row in table.rows)


def problem_of(table: Table, siblings: Sequence[Table] = (), lanes: int = 8) -> Problem:
    """The search that a table answers.

    :param siblings: tables of the same kernel at other sizes or on other devices: priors.
    """
    histories = tuple(
        History(tuple(_measured(t, r, r.seconds) for r in t.rows), features_of(t), t.floor_s)
        for t in siblings
    )
    return Problem(space_of(table), features_of(table), table.floor_s, histories, lanes)


def features_of(table: Table) -> dict[str, float]:
    """What a model is told of the table's sizes and device."""
    return {**{k: float(v) for k, v in table.sizes.items()}, **table.device_facts}


class ReplayMeasurer:
    """Answers from a table, in simulated seconds.

    A batch is compiled on ``lanes`` cores while one device times what is ready. A config costs its own
    recorded compile time, then its samples, each after a flush of the cache; racing drops it early.

    :param seed: of the samples drawn, with replacement, from those recorded.
    """

    overhead_s = 2e-3
    """Seconds of copying, comparing and launching, a config."""
    flush_s = 1e-4
    """Seconds of emptying the device's cache, before a timed call."""
    untimed = 6
    """Calls that prove a config and warm it up."""

    def __init__(
        self, table: Table, seed: int, lanes: int = 8, policy: MeasurePolicy | None = None
    ) -> None:
        self._rows = {key_of(table.config(row)): row for row in table.rows}
        self._table = table
        self._rng = np.random.default_rng([seed, 1])
        self._policy = policy or MeasurePolicy()
        self._lanes = [0.0] * lanes
        self._now = 0.0

    def now(self) -> float:
        """Simulated seconds."""
        return self._now

    def spend(self, seconds: float) -> None:
        """Let time pass: what choosing costs is measured outside, and added."""
        self._now += seconds

    def measure(self, proposals: Sequence[Proposal], best_s: float | None) -> Iterator[Measurement]:
        """Look each config up; see :class:`~torchstone.tuner.driver.Measurer`."""
        self._lanes = [max(self._now, free) for free in self._lanes]
        ready = []
        for proposal in proposals:
            row = self._rows[key_of(proposal.config)]
            lane = self._lanes.index(min(self._lanes))
            self._lanes[lane] += row.compile_s
            ready.append((self._lanes[lane], proposal, row))
        for built_at, proposal, row in sorted(ready, key=lambda r: r[0]):
            seconds, status = self._samples(row, best_s)
            calls = sum(seconds) + self.flush_s * len(seconds) + self.untimed * (row.time or 0.0)
            spent = self.overhead_s + calls if seconds else 0.0
            self._now = max(self._now, built_at) + spent
            yield msgspec.structs.replace(
                _measured(self._table, row, seconds),
                status=status,
                measure_s=spent,
                proposer=proposal.by,
            )

    def _samples(self, row: Row, best_s: float | None) -> tuple[tuple[float, ...], Status]:
        if not row.seconds:
            return (), row.status
        drawn = self._rng.choice(row.seconds, self._policy.samples).tolist()
        early = drawn[: self._policy.race]
        if best_s is not None and min(early) > self._policy.race_factor * best_s:
            return tuple(early), "dropped"
        return tuple(drawn), "timed"


def _measured(table: Table, row: Row, seconds: Sequence[float]) -> Measurement:
    return Measurement(
        config=table.config(row),
        status=row.status,
        seconds=tuple(seconds),
        compile_s=row.compile_s,
        text=row.text,
        facts=row.facts,
    )
