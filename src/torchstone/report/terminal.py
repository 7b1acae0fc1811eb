"""The report on a terminal: verdict, reasons, candidates, failures, files."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torchstone.report import divergence, words
from torchstone.report import format as fmt
from torchstone.report.collect import Report, Row

__all__ = ["render"]

_WIDE = 110
"""Columns from which on speed, error and status stand on one line each."""

_STYLES = {"promoted": "bold green", "baseline": "bold", "verified": "", "wrong": "red"}
_PLAIN_COLUMNS = ("speed-up", "error")


def render(report: Report, console: Console, files: Mapping[str, str] | None = None) -> None:
    """Print the report; plain text where the console is no terminal, never wider than it.

    :param files: what was written where: ``{"report": ".../report.html", "bundle": ...}``.
    """
    style = "bold green" if words.promoted(report) else "bold"
    console.print(Text(fmt.clean(words.headline(report)), style=style, overflow="fold"))
    for text in _reasons(report):
        _indented(console, text)
    console.print()
    console.print(_table(report, wide=console.width >= _WIDE))
    for row in words.failed(report):
        _failure(row, console)
    if files:
        console.print()
        for name, path in files.items():
            # a path is copied from here, so it is never broken by a wrap of ours
            console.print(Text(f"{fmt.clean(name)}: {fmt.clean(path)}"), soft_wrap=True)


def _reasons(report: Report) -> list[str]:
    if report.decision is None:
        return [f"to go on: {words.resume(report)}"]
    return [
        (f"{', '.join(recipes)}: {text} ({code})" if recipes else f"{text} ({code})")
        for recipes, text, code in words.reasons(report.decision)
    ]


def _indented(console: Console, text: str) -> None:
    console.print(Padding(Text(fmt.clean(text), overflow="fold"), (0, 0, 0, 2), expand=False))


def _table(report: Report, *, wide: bool) -> Table:
    rate = words.top_rate(report)
    columns = [_figures(row, rate, wide=wide) for row in report.rows]
    shown = [name for name in columns[0] if any(c[name] != fmt.DASH for c in columns)]
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, int(wide), 0, 0), show_edge=False, header_style="bold"
    )
    table.add_column("candidate", overflow="fold", min_width=12)
    if wide:
        table.add_column("status", no_wrap=True)
    for name in shown:
        table.add_column(name, no_wrap=True, justify="left" if name in _PLAIN_COLUMNS else "right")
    for row, figures in zip(report.rows, columns, strict=True):
        cells = [*_names(row, wide=wide), *(figures[name] for name in shown)]
        table.add_row(
            *(Text(cell, overflow="fold") for cell in cells), style=_STYLES.get(row.status, "dim")
        )
    if rate is not None:
        table.caption = f"p99 under open-loop load of {fmt.rate(rate)}"
        table.caption_justify = "left"
    return table


def _names(row: Row, *, wide: bool) -> list[str]:
    name = fmt.clean(row.recipe)
    return [name, row.status] if wide else [name.replace(" + ", "\n+ ") + f"\n  {row.status}"]


def _figures(row: Row, rate: float | None, *, wide: bool) -> dict[str, str]:
    """Column -> cell; a column in which every cell is a dash is left out of the table."""
    loaded = next((result for result in row.load if result.rate == rate), None)
    return {
        "speed-up": _speed(row, wide=wide),
        "error": _error(row, wide=wide),
        "drop": fmt.maybe(words.drop, row.metric),
        "build": fmt.seconds(row.build.seconds) if row.build else fmt.DASH,
        "memory": fmt.size(row.build.peak_memory_bytes) if row.build else fmt.DASH,
        "p99": fmt.maybe(fmt.seconds, loaded.quantiles_s.get("p99")) if loaded else fmt.DASH,
    }


def _speed(row: Row, *, wide: bool) -> str:
    c = row.comparison
    if c is None:
        return "1x" if row.status == "baseline" else fmt.DASH
    between = " " if wide else "\n"
    # FASTER and SLOWER can be read off the figures, these two cannot
    word = f"\n{words.speed(c)}" if c.relation in ("SAME", "UNCLEAR") else ""
    return f"{fmt.ratio(c.ratio)}{between}{fmt.interval(c.low, c.high)}{word}"


def _error(row: Row, *, wide: bool) -> str:
    found = words.errors(row.verdict.verdict) if row.verdict else None
    if found is None:
        return fmt.DASH
    return f"{fmt.error(found[0])}{' ' if wide else chr(10)}of {fmt.error(found[1])}"


def _failure(row: Row, console: Console) -> None:
    if row.verdict is None:
        return
    verdict = row.verdict.verdict
    console.print()
    console.print(Text(f"{fmt.clean(row.recipe)}: {row.status}", style="bold", overflow="fold"))
    _indented(console, words.reason(verdict))
    if row.divergence is not None:
        _indented(console, divergence.headline(row.divergence))
        for line in divergence.lines(row.divergence):
            _indented(console, f"  {line}")
    if found := words.hint(verdict):
        _indented(console, f"hint: {found}")
