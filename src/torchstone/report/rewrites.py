"""Firing logs in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from torchstone.records.rewrites import Declined, Explanation, Firing
from torchstone.report import format as fmt

__all__ = ["render", "summary"]


def render(found: Explanation, console: Console) -> None:
    """Print an explanation."""
    if found.refused is not None:
        console.print(f"{found.workload}: no program to rewrite: {found.refused}", markup=False)
        return
    log = found.rewrites
    before, after = found.nodes
    console.print(
        f"{found.workload}: rewrites that pay: {len(log.fired)}; constants computed ahead: "
        f"{log.folded}; operations: {before} before, {after} after",
        markup=False,
        soft_wrap=True,
    )
    if log.fired:
        console.print(_fired(log.fired))
    if log.declined:
        console.print(_declined(log.declined))
    if not log.fired:
        return
    console.print(
        "Times are estimates of the roofline unless marked measured. Nothing is proved here: "
        f"torchstone run tries the recipe inductor + {found.recipe} and proves it.",
        markup=False,
        soft_wrap=True,
    )


def summary(fired: Sequence[Firing]) -> str:
    """The rules that fired, each with how often: ``sum_of_linear x2, relu_of_relu``."""
    counts: dict[str, int] = {}
    for one in fired:
        counts[one.rule] = counts.get(one.rule, 0) + 1
    return ", ".join(name if n == 1 else f"{name} x{n}" for name, n in counts.items())


def _fired(fired: Sequence[Firing]) -> Table:
    table = Table(
        "rule", "family", "class", "at", "before", "after", title="fired", title_justify="left"
    )
    for one in fired:
        at = one.source or fmt.clean(" ".join(one.at))
        mark = " measured" if one.measured else ""
        after = f"{fmt.duration(one.after_s)}{mark}"
        table.add_row(one.rule, one.family, one.numerics, at, fmt.duration(one.before_s), after)
    return table


def _declined(declined: Sequence[Declined]) -> Table:
    table = Table("rule", "at", "why not", title="declined", title_justify="left")
    for one in declined:
        table.add_row(one.rule, one.at, fmt.clean(one.why))
    return table
