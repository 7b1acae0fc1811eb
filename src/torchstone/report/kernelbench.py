"""A run over the public KernelBench suite: while it goes on, on a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchstone.records.kernelbench import (
    BenchColumn,
    BenchOurs,
    BenchProblem,
    BenchRun,
    LevelSummary,
)
from torchstone.report import format as fmt

__all__ = ["Progress", "clean", "markdown", "render"]

_STYLES = {"failed": "bold yellow", "degenerate": "dim", "unverifiable": "yellow"}


def clean(run: BenchRun) -> bool:
    """Whether every problem could be run, and whatever is promoted is right."""
    whole = [level for level in run.levels if level.half == "all"]
    return all(not level.failed and level.correct == level.counted for level in whole)


class Progress:
    """One line for each problem that is done, with the rate and the time that is left."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, found: BenchProblem, done: int, total: int, seconds: float) -> None:
        """A result is known.

        :param done: problems that this run has done.
        :param total: of how many.
        :param seconds: since it began.
        """
        a_minute = 60 * done / max(seconds, 1e-9)
        left = fmt.duration((total - done) * seconds / done)
        rate = f"{done}/{total}  {fmt.significant(a_minute, 2)} a minute, {left} left"
        line = Text(f"{found.key:>6}  {found.name.removesuffix('.py')[:38]:<38}  ")
        line.append(f"{_headline(found):<34}", style=_STYLES.get(found.outcome, ""))
        line.append(f"  {rate}", style="dim")
        self._console.print(line, soft_wrap=True, highlight=False)


def render(run: BenchRun, console: Console, folder: Path) -> None:
    """The figures by level, the worst ten, and where the rest is."""
    table = Table(title=_title(run), title_justify="left", box=None, pad_edge=False)
    shown = [i for i, heading in enumerate(_LEVEL_HEADINGS) if heading not in _ON_PAPER]
    for i in shown:
        table.add_column(_LEVEL_HEADINGS[i], justify="left" if i < 2 else "right", no_wrap=True)
    for row in _level_rows(run):
        table.add_row(*(row[i] for i in shown))
    console.print(table)
    for line in _remarks(run):
        console.print(Text(line), soft_wrap=True)
    console.print(f"results  {folder / 'results.json'}", soft_wrap=True, highlight=False)
    console.print(f"table    {folder / 'results.md'}", soft_wrap=True, highlight=False)


def markdown(run: BenchRun) -> str:
    """The whole run as Markdown: figures by level, each problem, and what limits the worst ten."""
    parts = [f"# KernelBench: {_title(run)}", "", f"`{run.command}`", "", *_facts(run), ""]
    parts += ["## By level", "", *_table(_LEVEL_HEADINGS, list(_level_rows(run))), ""]
    parts += [f"- {line}" for line in _remarks(run)]
    parts += ["", "## By problem", "", _LEGEND, ""]
    parts += _table(_headings(run), [_problem_row(run, p) for p in run.problems])
    parts += ["", "## What limits the worst ten", ""]
    parts += [f"- {line}" for line in _limits(run)] or ["- nothing was counted"]
    return "\n".join(parts) + "\n"


_LEGEND = (
    "Times are medians of one call. A ratio is `torch.compile`'s time over ours, with its bootstrap "
    "interval; *kept* is the baseline, at 1. *Strong* is the time of the strong baseline, and the ratio "
    "of that to ours under the loosest contract. *Suite* counts the suite's own trials that ours "
    "passes: they hold it against eager. *Roofline* is the larger of the least time of moving and of "
    "computing, *bandwidth* the least bytes over ours, as a share of the copy bandwidth."
)

_LEVEL_HEADINGS = (
    "level",
    "contract",
    "right",
    "ours",
    "kept",
    "geomean",
    "median",
    "least",
    "fast_1",
    "fast_2",
    "strong",
    "bandwidth",
    "cold",
    "warm",
)


_EXCESSIVE = 10.0
_ON_PAPER = ("kept", "least", "cold", "warm")  # a terminal has 80 columns


def _title(run: BenchRun) -> str:
    packages = run.environment.packages
    torch = f"torch {packages.get('torch', 'unknown')}"
    return f"{len(run.problems)} problems on {run.device or 'an unknown device'}, {torch}, {run.dtype}"


def _facts(run: BenchRun) -> Iterator[str]:
    here = run.environment
    packages = ", ".join(
        f"{n} {here.packages[n]}" for n in ("torch", "triton", "numpy") if n in here.packages
    )
    yield f"- {here.platform}, {here.cpu}, {here.cores} cores; Python {here.python}, {packages}"
    took = f"{run.measured} problems in {fmt.duration(run.seconds)}, {run.jobs} jobs"
    yield f"- started {run.started_at}; {took}"
    if run.copy_bytes_per_s is not None:
        yield f"- copy bandwidth {fmt.si(run.copy_bytes_per_s)}B/s"
    if run.peaks is not None:
        rates = ", ".join(f"{n} {fmt.si(r)}FLOP/s" for n, r in run.peaks.flops_per_s.items())
        yield f"- largest products: {rates}"
    drawn = (
        "the suite's very values"
        if run.inputs_on == "cpu"
        else "the suite's seeds, the device's generator"
    )
    yield f"- inputs: {drawn}; the suite's tolerance: {run.tolerance:g}"


def _level_rows(run: BenchRun) -> Iterator[tuple[str, ...]]:
    for level in run.levels:
        name = f"{level.level}" if level.half == "all" else f"{level.level} {level.half}"
        for i, one in enumerate(level.contracts):
            yield (
                name if i == 0 else "",
                f"{one.contract:.0e}",
                f"{level.correct}/{level.counted}" if i == 0 else "",
                str(one.promoted),
                str(one.kept),
                fmt.maybe(fmt.ratio, one.geomean),
                fmt.maybe(fmt.ratio, one.median),
                fmt.maybe(fmt.ratio, one.least),
                fmt.maybe(fmt.percent, one.fast_1),
                fmt.maybe(fmt.percent, one.fast_2),
                fmt.maybe(fmt.ratio, one.strong_geomean),
                fmt.maybe(fmt.percent, level.bandwidth_median) if i == 0 else "",
                fmt.maybe(fmt.seconds, level.optimize_cold_s) if i == 0 else "",
                fmt.maybe(fmt.seconds, level.optimize_warm_s) if i == 0 else "",
            )


def _remarks(run: BenchRun) -> Iterator[str]:
    for level in run.levels:
        if level.half == "all":
            yield from _of_level(run, level)
    by_eager = [p.key for p in run.problems if _beside_eager(p)]
    if by_eager:
        yield f"right by being no worse than eager, itself beyond the contract: {', '.join(by_eager)}"
    excessive = [p.key for p in run.problems if p.outcome == "judged" and _excessive(p)]
    if excessive:
        yield f"more than {_EXCESSIVE:g}x as fast as eager (the suite flags it): {', '.join(excessive)}"
    yield from run.damaged


def _of_level(run: BenchRun, level: LevelSummary) -> Iterator[str]:
    for words, keys in (
        ("output does not depend on the input", level.degenerate),
        ("no float64 reference, baseline kept", level.unverifiable),
    ):
        if keys:
            yield f"level {level.level}, {words}: {', '.join(keys)}"
    for key in level.failed:
        found = next(p for p in run.problems if p.key == key)
        yield f"{key} cannot be run: {fmt.clean(found.text)}"


def _excessive(problem: BenchProblem) -> bool:
    eager = problem.column("eager")
    if eager is None or eager.time is None or problem.best_s is None:
        return False
    return eager.time > _EXCESSIVE * problem.best_s


def _beside_eager(problem: BenchProblem) -> bool:
    chosen = ((problem.column(one.choice), one.contract) for one in problem.ours if one.promoted)
    return any(
        proof.contract == contract and proof.by == "eager"
        for column, contract in chosen
        if column is not None
        for proof in column.proofs
    )


def _headings(run: BenchRun) -> tuple[str, ...]:
    contracts = [f"ours {o.contract:.0e}" for p in run.problems[:1] for o in p.ours]
    return (
        "problem",
        "outcome",
        "eager",
        "compile",
        "strong",
        *(contracts or ["ours"]),
        "suite",
        "roofline",
        "bandwidth",
        "eager's error",
    )


def _problem_row(run: BenchRun, problem: BenchProblem) -> tuple[str, ...]:
    width = len(_headings(run))
    first = (f"{problem.key} {problem.name.removesuffix('.py')}", problem.outcome)
    if problem.outcome == "failed":
        return (*first, fmt.clean(problem.text)[:120], *[""] * (width - 3))
    strong = problem.column(problem.strong) if problem.strong else None
    last = problem.ours[-1].strong_ratio if problem.ours else None
    beside = "" if last is None else f" ({fmt.ratio(last)})"
    best = problem.ours[0] if problem.ours else None
    chosen = None if best is None or not best.promoted else problem.column(best.choice)
    roof = problem.roofline
    ours = [_cell(one) for one in problem.ours]
    return (
        *first,
        _time(problem.column("eager")),
        _time(problem.column("compile")),
        f"{_time(strong)}{beside}",
        *ours,
        *[""] * (width - 9 - len(ours)),
        "" if chosen is None else f"{chosen.suite_passed}/{chosen.suite_trials}",
        "" if roof is None else fmt.seconds(max(roof.memory_s, roof.compute_s)),
        fmt.maybe(fmt.percent, problem.bandwidth_share),
        fmt.maybe(fmt.error, problem.eager_relative),
    )


def _cell(one: BenchOurs) -> str:
    if not one.promoted:
        return "kept"
    return f"{fmt.ratio(one.ratio)} {fmt.interval(one.low, one.high)} {one.choice}"


def _time(column: BenchColumn | None) -> str:
    if column is None:
        return fmt.DASH
    return column.status if column.time is None else fmt.seconds(column.time)


def _headline(found: BenchProblem) -> str:
    if found.outcome in ("failed", "unverifiable", "degenerate"):
        return found.outcome
    ours = [f"{fmt.ratio(o.ratio)} {o.choice}" if o.promoted else "kept" for o in found.ours]
    return " | ".join(dict.fromkeys(ours))


def _limits(run: BenchRun) -> Iterator[str]:
    """For each of the worst ten: what ours is, what limits it, and what became of the candidates."""
    for key in run.worst:
        problem = next(p for p in run.problems if p.key == key)
        ours = problem.ours[0]
        roof = problem.roofline
        limit = "its operations could not be counted"
        if roof is not None:
            bound = "moving its bytes" if roof.memory_bound else "computing"
            least = max(roof.memory_s, roof.compute_s)
            limit = f"{bound} takes {fmt.seconds(least)} at least"
            if problem.best_s is not None:
                limit = f"{limit}, and ours {fmt.seconds(problem.best_s)}"
        yield f"{key} {fmt.ratio(ours.ratio)}: {fmt.clean(ours.reason)}; {limit}. {_became(problem)}"


def _became(problem: BenchProblem) -> str:
    def one(column: BenchColumn) -> str:
        if column.status in ("timed", "ran"):
            return _time(column)
        return f"{column.status}, {fmt.clean(column.text)[:160]}"

    return "; ".join(f"{c.name}: {one(c)}" for c in problem.columns if c.candidate)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{'|'.join('---' for _ in headings)}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
