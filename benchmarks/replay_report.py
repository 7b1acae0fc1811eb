"""What is made of replayed searches: costs of a success, curves over budgets, and whether one is better.

See ``replay.py``, which makes the searches.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from torchstone.errors import InputError

Cost = tuple[int, float, float]
"""Measurements; simulated seconds, a search's own computing included; the same without it."""
SHARE = 0.02
"""Within this of the best counts as found."""
BUDGETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
UNITS = ("measurements", "seconds", "seconds, own computing left out")


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One search: after each measurement, how far off the config is that it would name, and when."""

    table: str
    who: str
    seed: int
    excess: list[float]
    """The named config's true time over the table's best, less 1; one a measurement; 99 before the
    first."""
    at_s: list[float]
    """Simulated seconds, own computing included."""
    spent: Cost
    """What it took to be within :data:`SHARE` for the first time, or else all that it spent."""
    hit: bool
    """Whether it ever was."""


Searches = dict[str, dict[str, list[Trace]]]
"""By who searched, then by table."""


def by_who(traces: Sequence[Trace]) -> Searches:
    """Sort searches.

    :raises InputError: where somebody did not search what another did, as often.
    """
    made: Searches = {}
    for trace in traces:
        made.setdefault(trace.who, {}).setdefault(trace.table, []).append(trace)
    counts = {who: {t: len(made[who][t]) for t in sorted(made[who])} for who in made}
    for (one, has), (other, those) in itertools.pairwise(counts.items()):
        if has != those:
            differ = sorted(t for t in {*has, *those} if has.get(t) != those.get(t))
            raise InputError(f"{one} and {other} did not search the same tables as often: {differ}")
    return {who: {t: made[who][t] for t in sorted(made[who])} for who in made}


def expected(traces: Sequence[Trace], unit: int, picks: Any = None) -> Any:
    """What one success costs: all that was spent until success or the end, over successes.

    The expected running time of COCO (Hansen et al., Optimization Methods and Software 36, 2021).

    :param unit: place in :data:`UNITS`.
    :param picks: rows of places among the searches, for a bootstrap: one figure a row. A row without
        a success is taken to have one at its end.
    """
    spent, hit = np.array([t.spent[unit] for t in traces]), np.array([t.hit for t in traces])
    if picks is None:
        return spent.sum() / hit.sum() if hit.any() else math.inf
    return spent[picks].sum(1) / np.maximum(hit[picks].sum(1), 1)


def ratio(ours: dict[str, list[Trace]], theirs: dict[str, list[Trace]], unit: int) -> str:
    """What a success costs us over what it costs them: pooled, with an interval; how often little."""
    each = {t: (expected(ours[t], unit), expected(theirs[t], unit)) for t in ours}
    both = [t for t, pair in each.items() if all(map(math.isfinite, pair))]
    ratios = [a / b if math.isfinite(a) else math.inf for a, b in each.values()]
    half, quarter = (sum(r <= bound for r in ratios) for bound in (0.5, 0.25))
    text = f"{UNITS[unit]}: "
    if both:
        rng = np.random.default_rng(0)
        logs = np.zeros(1000)
        for t in both:
            a, b = (
                expected(who[t], unit, rng.integers(len(who[t]), size=(len(logs), len(who[t]))))
                for who in (ours, theirs)
            )
            logs += np.log(a / b) / len(both)
        low, high = np.exp(np.percentile(logs, (2.5, 97.5)))
        middle = math.exp(statistics.fmean(math.log(each[t][0] / each[t][1]) for t in both))
        text += f"geometric mean {middle:.3f} [{low:.3f}, {high:.3f}] of {len(both)} tables, "
    text += f"median {statistics.median(ratios):.2f}, "
    text += f"at most a half on {half}, a quarter on {quarter} of {len(ratios)}"
    for name, place in (("we", 0), ("they", 1)):
        never = [t for t, pair in each.items() if math.isinf(pair[place])]
        text += f"; {name} never on {', '.join(never)}" if never else ""
    return text


def curves(searches: dict[str, list[Trace]]) -> Any:
    """After 1, 2, ... measurements: share found, mean log of time over best, and their variances.

    Tables count alike. Where a search has stopped, its config stays. Shape ``(2, 2, BUDGETS[-1])``:
    which figure; the figure or its variance; after how many.
    """
    figures = []
    for traces in searches.values():
        size = BUDGETS[-1]
        e = np.array([(t.excess + t.excess[-1:] * size)[:size] for t in traces])
        both = np.stack([e <= SHARE, np.minimum(np.log1p(e), 2.0)])
        figures.append(np.stack([both.mean(1), both.var(1) / max(len(traces) - 1, 1)], axis=1))
    mean = np.mean(figures, axis=0)
    mean[:, 1] /= len(figures)
    return mean


def compared(ours: Any, theirs: Any) -> str:
    """Whether one's curves are nowhere below another's, from the least budget on."""
    gain = np.stack([ours[0, 0] - theirs[0, 0], theirs[1, 0] - ours[1, 0]])[:, BUDGETS[0] - 1 :]
    error = np.sqrt(ours[:, 1] + theirs[:, 1])[:, BUDGETS[0] - 1 :]
    text = []
    for name, one, deviation in zip(("share", "log regret"), gain, error, strict=True):
        at, good = int(one.argmin()), int((one >= 0).sum())
        text.append(
            f"{name}: as good or better after {good} of the {len(one)} from {BUDGETS[0]} on, "
            f"at worst by {one[at]:+.4f} (standard error {deviation[at]:.4f}) after {at + BUDGETS[0]}"
        )
    reaches = np.flatnonzero(ours[0, 0] >= theirs[0, 0, -1])
    after = f"after {reaches[0] + 1}" if len(reaches) else "never"
    return "; ".join([*text, f"reaches the share that Helion ends with {after}"])


def report(traces: Sequence[Trace]) -> str:
    """What is printed."""
    searches = by_who(traces)
    lines = ["to be within 2% of the best: expected measurements (median where it was) / seconds, found"]
    lines.append(f"{'':34s}" + "".join(f"{who:>32s}" for who in searches))
    for table in next(iter(searches.values())):
        cells = []
        for found in (searches[who][table] for who in searches):
            hits = [t.spent[0] for t in found if t.hit]
            usual = f"({statistics.median(hits):.0f})" if hits else "(-)"
            text = f"{expected(found, 0):.0f} {usual} /{expected(found, 1):6.0f} s"
            cells.append(f"{text:>25s} {len(hits):3d}/{len(found)}")
        lines.append(f"{table.removesuffix('.json.gz'):34s}" + " ".join(f"{c:>31s}" for c in cells))
    all_curves = {who: curves(searches[who]) for who in searches}
    lines.append("share within 2% / mean log of time over best, each table counting the same")
    for who, ((share, _), (regret, _)) in all_curves.items():
        cells = [f"{n}: {share[n - 1]:.2f}/{regret[n - 1]:.3f}" for n in BUDGETS]
        lines.append(f"{who:14s} " + "  ".join(cells))
    for who in (w for w in searches if "helion" in searches and w != "helion"):
        lines.append(f"{who} over Helion, cost of a success [95% interval over seeds]")
        lines += ["  " + ratio(searches[who], searches["helion"], unit) for unit in range(len(UNITS))]
        lines.append("  " + compared(all_curves[who], all_curves["helion"]))
    return "\n".join(lines)
