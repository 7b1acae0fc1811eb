"""A tuning on a terminal: while it is going on, and what it came to.

:class:`LiveTuning` is a watcher of the search loop; :func:`render` is the end of it. The page
(:mod:`torchstone.report.html.tuning`) has everything.
"""

from __future__ import annotations

import atexit
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchstone.records.tuning import Config, Measurement, Status, Tuning
from torchstone.report import format as fmt
from torchstone.report import tune_words as words

__all__ = ["Goal", "LiveTuning", "render"]

_EVERY_S = 10.0
"""Between summaries where the console is no terminal."""
_SILENT_S = 3.0
"""After which a terminal says how long nothing was measured."""
_NAMES = 10
"""Columns of what a line is about."""
_STYLES = {"PROMOTE": "bold green", "KEEP_BASELINE": "bold", "HOLD": "bold yellow"}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is tuned, as far as it is known beforehand."""

    name: str
    """Of what is tuned."""
    budget_s: float | None = None
    """Seconds that the search may take."""
    most: int | None = None
    """Measurements that it may take."""


@dataclass(frozen=True)
class _State:
    """What the display shows; replaced as a whole, since another thread draws it."""

    default: Config | None = None
    floor_s: float | None = None
    known: int = 0
    counts: Counter[Status] = field(default_factory=Counter)
    best: Measurement | None = None
    default_s: float | None = None
    seconds: float = 0.0
    told_at: float = 0.0
    gain_left: float | None = None
    note: str = ""


class LiveTuning:
    """A search as a few lines that stay in place; one line for each new best where there is no terminal.

    Call it with each measurement, and ``done`` at the end, any number of times.

    :param console: where to; standard error if not given, so that a pipe gets the answer alone.
    :param clock: monotonic seconds.
    """

    def __init__(
        self,
        goal: Goal,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._goal = goal
        self._console = Console(stderr=True) if console is None else console
        self._clock = clock
        self._state = _State(told_at=clock(), note="preparing inputs, reference and processes")
        self._summed_at = 0.0
        self._over = False
        self._live: Live | None = None
        if self._console.is_terminal:
            # an exception that skips done() must not leave the cursor hidden
            atexit.register(self.done)
            self._live = Live(console=self._console, get_renderable=self._lines, refresh_per_second=4)
            self._live.start()

    def begin(self, default: Config, floor_s: float | None, known: Sequence[Measurement]) -> None:
        """The search begins.

        :param default: what speed-ups are told against, once it is measured.
        :param floor_s: seconds below which no config can be, by the roofline.
        :param known: what the cache knows already.
        """
        best = words.best_so_far(known)
        same = (m.time for m in known if words.key(m.config) == words.key(default))
        self._state = _State(
            default=default,
            floor_s=floor_s,
            known=len(known),
            best=best[-1][1] if best else None,
            default_s=next((t for t in same if t is not None), None),
            told_at=self._clock(),
        )
        if known and self._live is None:
            self._print(f"{fmt.duration(0):>8}  {len(known)} known from the cache, best {self._best()}")

    def __call__(self, found: Measurement, seconds: float, gain_left: float | None) -> None:
        """A config was measured.

        :param seconds: since the search began.
        :param gain_left: how much faster than the best the optimum is expected to be, a ratio, if the
            searcher can say.
        """
        old, found_s = self._state, found.time
        best_s = None if old.best is None else old.best.time
        better = found_s is not None and (best_s is None or found_s < best_s)
        default = old.default is not None and words.key(found.config) == words.key(old.default)
        self._state = replace(
            old,
            counts=old.counts + Counter([found.status]),
            best=found if better else old.best,
            default_s=found_s if default else old.default_s,
            seconds=seconds,
            told_at=self._clock(),
            gain_left=old.gain_left if gain_left is None else gain_left,
            note="",
        )
        if self._live is None:
            self._plain(better)

    def stage(self, text: str) -> None:
        """Something other than the search begins: ``the finals``."""
        seconds, told_at = self._now(), self._clock()
        self._state = replace(self._state, seconds=seconds, told_at=told_at, note=text)
        if self._live is None:
            self._print(f"{fmt.duration(seconds):>8}  {text}")
        else:
            self._live.refresh()

    def done(self) -> None:
        """The search is over or was interrupted: leave the lines as they stand, restore the terminal."""
        if self._live is not None:
            self._over = True
            self._live.stop()
            self._live = None
            atexit.unregister(self.done)

    def _now(self) -> float:
        return self._state.seconds + self._clock() - self._state.told_at

    def _plain(self, better: bool) -> None:
        state = self._state
        at = f"{fmt.duration(state.seconds):>8}  "
        if better and state.best is not None:
            self._print(f"{at}best {self._best()}  {words.config(state.best.config)}")
        if state.seconds - self._summed_at >= _EVERY_S:
            self._summed_at = state.seconds
            self._print(f"{at}{self._measured()}; {self._ahead()}")

    def _print(self, text: str) -> None:
        self._console.print(Text(fmt.clean(text)), soft_wrap=True)

    def _best(self) -> str:
        state = self._state
        if state.best is None or state.best.time is None:
            return "nothing is right yet"
        told = [fmt.seconds(state.best.time)]
        if (share := words.of_floor(state.floor_s, state.best.time)) is not None:
            told.append(f"{fmt.percent(share)} of the roofline")
        if state.default_s:
            told.append(f"{fmt.ratio(state.default_s / state.best.time)} against the default")
        return ", ".join(told)

    def _measured(self) -> str:
        counts, known = self._state.counts, self._state.known
        of = "" if self._goal.most is None else f" of at most {self._goal.most}"
        told = f"{counts.total()}{of} measured ({words.counted(counts)})" if counts else "none yet"
        return f"{told}, {fmt.count(known)} known from the cache" if known else told

    def _ahead(self) -> str:
        """The time that is left, and what may still be gained."""
        now, budget_s, gain = self._now(), self._goal.budget_s, self._state.gain_left
        left = f"{fmt.duration(now)}{'' if self._over else ' so far'}"
        if budget_s is not None and not self._over and not self._state.note:
            left = f"{fmt.duration(budget_s - now)} left" if now < budget_s else "its time is spent"
        return left if gain is None else f"{left}, gain still expected {fmt.percent(max(0.0, gain - 1))}"

    def _lines(self) -> RenderableType:
        state = self._state
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(no_wrap=True, overflow="ellipsis")
        rows = [("tuning", self._goal.name)]
        if state.default is not None:
            rows.append(("best", self._best()))
        if state.best is not None:
            rows.append(("", words.config(state.best.config)))
        if state.default is not None:
            rows += [("measured", self._measured()), ("time", self._ahead())]
        since_s = self._clock() - state.told_at
        if not self._over and (state.note or since_s > _SILENT_S):
            note = state.note or "since the last measurement"
            rows.append(("now", f"{note}: {fmt.duration(since_s)}"))
        for name, text in rows:
            style = "bold" if name == "best" else ""
            grid.add_row(name, Text(fmt.clean(words.cut(text)), style=style, overflow="ellipsis"))
        return grid


# --- what it came to ------------------------------------------------------------------------------


def render(
    found: Tuning, console: Console, files: Mapping[str, str] | None = None, use: str | None = None
) -> None:
    """Print what a tuning came to; plain text where the console is no terminal.

    :param files: what was written where: ``{"report": ".../report.html"}``.
    :param use: Python that uses the config; see :func:`torchstone.report.tune_words.snippet`.
    """
    title = f"{found.decision}: {words.headline(found)}"
    console.print(Text(title, style=_STYLES[found.decision], overflow="fold"))
    for name, text in _facts(found):
        told = Text(words.cut(text, 600), overflow="fold")
        for i, line in enumerate(told.wrap(console, max(20, console.width - _NAMES - 2))):
            line.rstrip()
            beside = Text(f"  {'' if i else name:<{_NAMES}}", style="dim")
            console.print(beside + line, soft_wrap=True)
    console.print()
    for name, path in (files or {}).items():
        # a path is copied from here, and so is code: neither is broken by a wrap of ours
        console.print(Text(f"{fmt.clean(name)}: {fmt.clean(path)}"), soft_wrap=True)
    if use is not None:
        console.print()
        console.print(Text(fmt.clean(use)), soft_wrap=True)


def _facts(found: Tuning) -> Iterator[tuple[str, str]]:
    """Lines, each with what it is about."""
    sizes = " ".join(f"{name}={size}" for name, size in found.key.sizes.items())
    yield (
        "kernel",
        f"{words.cut(found.key.kernel, 80)}{' ' if sizes else ''}{sizes} on {found.key.device}",
    )
    if found.decision == "HOLD":
        yield "why", found.text
    else:
        yield "config", words.config(found.config)
    yield from _times(found)
    yield "searched", f"{fmt.count(len(found.measurements))} configs: {words.tally(found.measurements)}"
    if found.known:
        yield "", f"{fmt.count(found.known)} of them known from the cache"
    if found.siblings:
        yield "", f"learned from {fmt.count(found.siblings)} rows of other sizes, devices or versions"
    for failure in words.failures(found.measurements):
        text, _, config = failure.texts[0]
        number, others = len(failure.texts), ""
        if number > 1:
            others = f", and {number - 1} other reason{'s' if number > 2 else ''}"
        said = f"{failure.number} {failure.status.replace('_', ' ')}: "
        said += words.cut(text or words.MEANINGS[failure.status], 160)
        yield "failed", f"{said}{others} ({_config(config)})"
    for entry in found.finals.entries:
        if entry.label == "finalist" and entry.status not in ("timed", "dropped"):
            told = f"{entry.status.replace('_', ' ')}: {words.cut(entry.text, 160)}"
            yield "finals", f"a finalist is {told} ({_config(entry.config)})"
    left = words.regret(found)
    yield "stopped", f"{found.stop_text} ({found.stop}){f'; {left}' if left else ''}"
    yield from (("problem", text) for text in found.problems)


def _config(of: Config) -> str:
    return words.cut(words.config(of), 160)


def _times(found: Tuning) -> Iterator[tuple[str, str]]:
    chosen_s, default_s = words.choice_s(found), words.default_s(found)
    if chosen_s is not None:
        told = f"{fmt.seconds(chosen_s)} a call"
        if (share := words.of_floor(found.floor_s, chosen_s)) is not None:
            told += f", {fmt.percent(share)} of the roofline"
        if found.decision == "PROMOTE" and default_s is not None:
            told += f"; the default takes {fmt.seconds(default_s)}"
        yield "time", told
    won = words.chosen(found)
    if won is not None:
        told = f"{fmt.ratio(won.ratio)} {fmt.interval(won.low, won.high)} over the default"
        yield "speed-up", f"{told}; the control shows {fmt.percent(won.noise)} of noise"
    elif found.comparisons:
        best = max(found.comparisons, key=lambda c: c.ratio)
        told = f"{fmt.ratio(best.ratio)} {fmt.interval(best.low, best.high)} over the default"
        yield "speed-up", f"the quickest other: {told} ({best.relation.lower()})"
