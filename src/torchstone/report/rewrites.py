"""Firing logs in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from torchstone.records.rewrites import Declined, Explanation, Firing
from torchstone.report import format as fmt

__all__ = ["render"]


def render(found: Explanation, console: Console) -> None:
    """Print an explanation."""
    if found.refused is not None:
        _say(console, f"{found.workload}: no program to rewrite: {found.refused}")
        return
    log = found.rewrites
    before, after = found.nodes
    _say(
        console,
        f"{found.workload}: {before} operations, {after} after {len(log.fired)} rewrites and "
        f"{log.folded} constants computed ahead; time saved: about {fmt.percent(log.saved)}",
    )
    if log.fired:
        console.print(_fired(log.fired))
    if log.declined:
        console.print(_declined(log.declined))
    if log.fired:
        _say(
            console,
            "Times are estimates of the roofline unless marked measured. Nothing is proved here: "
            f"torchstone run tries the recipe inductor + {found.recipe} where that saves time, "
            "and proves it.",
        )


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _fired(fired: Sequence[Firing]) -> Table:
    """One row a rule."""
    table = _table("fired", "rule", "class", "times", "first at", "before", "after")
    for rule in dict.fromkeys(one.rule for one in fired):
        same = [one for one in fired if one.rule == rule]
        first = same[0].source or fmt.clean(" ".join(same[0].at))
        before, after = (sum(getattr(one, n) for one in same) for n in ("before_s", "after_s"))
        mark = " measured" if same[0].measured else ""
        table.add_row(
            rule,
            same[0].numerics,
            str(len(same)),
            first,
            fmt.seconds(before),
            f"{fmt.seconds(after)}{mark}",
        )
    return table


def _declined(declined: Sequence[Declined]) -> Table:
    table = _table("declined", "rule", "at", "why not")
    for one in {(d.rule, d.at): d for d in declined}.values():
        table.add_row(one.rule, one.at, fmt.clean(one.why))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
