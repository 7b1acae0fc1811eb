"""What was rewritten: for each candidate whose recipe rewrites the program, the rules that fired."""

from __future__ import annotations

from torchstone.records.rewrites import Firing, Rewrites
from torchstone.report import format as fmt
from torchstone.report.collect import Report
from torchstone.report.html.markup import Cell, Html, code, details, element, join, section, table

__all__ = ["rewrites"]


def rewrites(report: Report) -> Html:
    """A table for each candidate that was rewritten; nothing where none was."""
    logs = ((row.recipe, row.build.rewrites) for row in report.rows if row.build is not None)
    return section(
        "rewrites",
        "What was rewritten",
        *(_log(recipe, log) for recipe, log in logs if log is not None),
        lead="Each rule is an identity that is proved in float64 over random shapes; each candidate was "
        "verified as a whole. Seconds are estimates of the roofline unless marked measured.",
    )


def _log(recipe: str, log: Rewrites) -> Html:
    said = f"{len(log.fired)} rewritten, {log.folded} constants computed ahead"
    summary = join([code(recipe), " ", element("span", said, class_="fine")])
    columns = ["Rule", "Where", "Before", "After"]
    declined = [(code(d.rule), d.at, d.why) for d in log.declined]
    left = table("Matched, and left as it was", ["Rule", "Where", "Why"], declined, class_="prose")
    return details(
        summary,
        table(said, columns, [_row(one) for one in log.fired], class_="cases"),
        *([left] if declined else []),
    )


def _row(one: Firing) -> tuple[Cell, ...]:
    about = element("span", f"{one.family}, {one.numerics}", class_="fine")
    after = f"{fmt.seconds(one.after_s)}{' measured' if one.measured else ''}"
    at = one.source or " ".join(one.at)
    return join([code(one.rule), about]), at, fmt.seconds(one.before_s), after
