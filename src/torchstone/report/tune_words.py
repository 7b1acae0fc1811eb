"""What a tuning found, in figures and sentences for terminal and page; all functions are pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, get_args

import msgspec

from torchstone.records import Comparison
from torchstone.records.tuning import Config, Final, Measurement, Status, Tuning, Value
from torchstone.report import format as fmt

__all__ = [
    "MEANINGS",
    "Failure",
    "Knob",
    "Use",
    "best_so_far",
    "choice_s",
    "chosen",
    "config",
    "counted",
    "cut",
    "default_of",
    "default_s",
    "failures",
    "headline",
    "key",
    "knobs",
    "of_floor",
    "regret",
    "snippet",
    "tally",
    "value",
]

MEANINGS: dict[Status, str] = {
    "timed": "right, and timed",
    "dropped": "right, and so slow that timing stopped early",
    "wrong": "does not compute what the reference does",
    "unverifiable": "right and wrong cannot be told apart",
    "crashed": "its process died",
    "timed_out": "gave no answer in time",
    "invalid": "could not be built",
}
"""What each status says of a config."""

_WORDS = 300


class Failure(NamedTuple):
    """Configs that failed in one way."""

    status: Status
    number: int
    """How many."""
    texts: tuple[tuple[str, int, Config], ...]
    """What was said, how often, and of which config first; the most frequent first."""


class Use(NamedTuple):
    """What a knob gave at one value."""

    value: Value
    times: tuple[float, ...]
    """Median seconds of each config that is right."""
    failed: int
    """How many gave no time."""


class Knob(NamedTuple):
    """What one knob did."""

    name: str
    share: float | None
    """Share of the variance of log time that its value alone explains, 0 to 1, adjusted for the number
    of values as adjusted R squared is; None where there are too few times to say."""
    uses: tuple[Use, ...]
    """By value, in order."""


def key(of: Config) -> str:
    """A config's one text form, as :attr:`Comparison.recipe` has it."""
    return msgspec.json.encode(of, order="deterministic").decode()


def value(of: Value) -> str:
    """A knob's value: ``64``, ``True``, ``row``, ``(1, 0)``."""
    return of if isinstance(of, str) and of.strip() else repr(of)


def config(of: Config) -> str:
    """A config on one line: ``M=64, N=128, order=(1, 0)``."""
    return ", ".join(f"{name}={value(one)}" for name, one in of.items())


def cut(text: str, most: int = _WORDS) -> str:
    """The text on one line, without control characters, shortened if need be."""
    line = " ".join(fmt.clean(text[: 8 * most]).split())
    return line if len(line) <= most else f"{line[: most - 4]} ..."


def headline(found: Tuning) -> str:
    """The decision in a sentence without a full stop."""
    if found.decision == "PROMOTE":
        won = chosen(found)
        times = "faster than" if won is None else f"{fmt.ratio(won.ratio)} as fast as"
        return f"{times} the default config, proved right"
    if found.decision == "KEEP_BASELINE":
        return "Keep the default config: nothing else is proved both right and faster"
    return "No config can be recommended"


def chosen(found: Tuning) -> Comparison | None:
    """The winner against the default; None where there is no winner."""
    if found.decision != "PROMOTE":
        return None
    return next((c for c in found.comparisons if c.recipe == key(found.config)), None)


def default_of(found: Tuning) -> Final | None:
    """The default config, in the finals."""
    return next((f for f in found.finals.entries if f.label == "default"), None)


def default_s(found: Tuning) -> float | None:
    """Median seconds of the default: from the finals, else from the search."""
    entry = default_of(found)
    if entry is None:
        return None
    if entry.status == "timed" and entry.seconds:
        return statistics.median(entry.seconds)
    same = (m.time for m in found.measurements if key(m.config) == key(entry.config))
    return next((t for t in same if t is not None), None)


def choice_s(found: Tuning) -> float | None:
    """Median seconds, in the finals, of what is to be used."""
    timed = (
        f for f in found.finals.entries if f.label != "control" and f.status == "timed" and f.seconds
    )
    entry = next((f for f in timed if key(f.config) == key(found.config)), None)
    return None if entry is None else statistics.median(entry.seconds)


def of_floor(floor_s: float | None, seconds: float | None) -> float | None:
    """Share of the roofline that a time reaches: 1 is no slower than can be."""
    return floor_s / seconds if floor_s and seconds else None


def best_so_far(measurements: Sequence[Measurement]) -> list[tuple[int, Measurement]]:
    """Each measurement, by its number from 1, that was quicker than all before."""
    best, found = math.inf, []
    for number, one in enumerate(measurements, 1):
        if one.time is not None and one.time < best:
            best = one.time
            found.append((number, one))
    return found


def tally(measurements: Iterable[Measurement]) -> str:
    """``71 timed, 8 dropped, 2 wrong``."""
    return counted(Counter(m.status for m in measurements))


def counted(statuses: Mapping[Status, int]) -> str:
    """The same of how many there are of each status."""
    of: tuple[Status, ...] = get_args(Status)
    told = (f"{fmt.count(n)} {s.replace('_', ' ')}" for s in of if (n := statuses.get(s, 0)))
    return ", ".join(told) or "nothing was measured"


def failures(measurements: Iterable[Measurement]) -> tuple[Failure, ...]:
    """What failed, by status; the most frequent first."""
    by: dict[Status, dict[str, list[Config]]] = {}
    for one in measurements:
        if one.status not in ("timed", "dropped"):
            by.setdefault(one.status, {}).setdefault(one.text, []).append(one.config)
    found = [
        Failure(
            status,
            sum(map(len, texts.values())),
            tuple(
                (text, len(configs), configs[0])
                for text, configs in sorted(texts.items(), key=lambda t: -len(t[1]))
            ),
        )
        for status, texts in by.items()
    ]
    return tuple(sorted(found, key=lambda f: -f.number))


def regret(found: Tuning) -> str | None:
    """How much is left to find, in words; None where nothing is known."""
    if found.regret is None:
        return None
    if found.stop == "NEAR_ROOFLINE":
        return f"no config can be more than {fmt.ratio(found.regret)} as fast as the best found"
    if found.regret <= 1.0005:
        return "nothing quicker is expected to exist"
    return f"the optimum is expected to be {fmt.percent(found.regret - 1)} faster than the best found"


def snippet(found: Tuning, of: str = "tunable", module: str | None = None) -> str:
    """Python that uses the config.

    :param of: what gives the tunable in its module: ``tunable``, ``kernel.tunable()``.
    :param module: what to import it from; a comment says so where it is not known.
    """
    known = f"from {module} import {of.partition('.')[0]}"
    first = known if module else f"# {of}: what {cut(found.key.kernel, 60)} was tuned from"
    return f"{first}\ncall = {of}.build({found.config!r})\noutput = call(*inputs)"


def knobs(measurements: Sequence[Measurement]) -> tuple[Knob, ...]:
    """What each knob did, the one that explains most of the time first."""
    names = list(dict.fromkeys(name for m in measurements for name in m.config))
    found = [_knob(name, [m for m in measurements if name in m.config]) for name in names]
    return tuple(sorted(found, key=lambda k: -1.0 if k.share is None else k.share, reverse=True))


def _knob(name: str, measurements: Sequence[Measurement]) -> Knob:
    groups: dict[str, list[Measurement]] = {}
    for one in measurements:
        groups.setdefault(repr(one.config[name]), []).append(one)  # True is not 1
    uses = []
    for members in groups.values():
        times = tuple(t for m in members if (t := m.time) is not None)
        uses.append(Use(members[0].config[name], times, len(members) - len(times)))
    return Knob(name, _share(uses), tuple(sorted(uses, key=lambda u: _place(u.value))))


def _place(of: Value) -> tuple[int, float, str]:
    return (1, 0.0, repr(of)) if isinstance(of, str | tuple) else (0, float(of), type(of).__name__)


def _share(uses: Sequence[Use]) -> float | None:
    """Adjusted share of variance between groups (one-way analysis of variance) of log time."""
    groups = [[math.log(t) for t in u.times if t > 0] for u in uses]
    groups = [g for g in groups if g]
    every = [v for g in groups for v in g]
    if len(groups) < 2:
        return 0.0 if every else None
    if len(every) <= len(groups):
        return None
    total = statistics.variance(every)
    within = sum(statistics.pvariance(g) * len(g) for g in groups) / (len(every) - len(groups))
    return max(0.0, 1 - within / total) if total > 0 else 0.0
