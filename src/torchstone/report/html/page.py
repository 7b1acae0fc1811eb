"""The page as a whole: its head, and the order of its sections."""

from __future__ import annotations

from importlib import resources

from torchstone.report import format as fmt
from torchstone.report import words
from torchstone.report.collect import Report
from torchstone.report.html import evidence, measured, verdict
from torchstone.report.html.markup import Html, element, join, text

__all__ = ["render"]

_SECTIONS = (
    measured.ladder,
    measured.latency,
    measured.load,
    measured.costs,
    evidence.failures,
    evidence.cases,
    evidence.reproduce,
    evidence.capture,
    evidence.environment,
)
"""Below the verdict, in this order; one that has nothing to show is left out."""


def render(report: Report) -> str:
    """The report as one HTML document, to be written as UTF-8.

    It holds everything it needs: no script, nothing fetched. Everything that came from the user or
    from an engine is escaped.
    """
    name = report.header.workload.name
    title = f"{fmt.clean(words.headline(report))} - {fmt.clean(name)}"
    style = resources.files("torchstone.report.html").joinpath("style.css").read_text(encoding="utf-8")
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="color-scheme" content="light dark">'),
            element("title", title),
            element("style", Html(style)),
        ]
    )
    top = element(
        "header",
        element("strong", "Torchstone"),
        element("span", name),
        element("time", _when(report.header.started_at), datetime=report.header.started_at),
    )
    main = element("main", verdict.section(report), *(section(report) for section in _SECTIONS))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{text(top)}{main}</body></html>\n'


def _when(started_at: str) -> str:
    """``2026-11-30T14:01:22+00:00`` as ``2026-11-30 14:01 UTC``."""
    return f"{started_at[:10]} {started_at[11:16]} UTC"
