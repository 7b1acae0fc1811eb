"""The page as a whole: the order of its sections."""

from __future__ import annotations

from torchstone.report import format as fmt
from torchstone.report import words
from torchstone.report.collect import Report
from torchstone.report.html import evidence, measured, rewritten, verdict
from torchstone.report.html.document import document
from torchstone.report.html.markup import element

__all__ = ["render"]

_SECTIONS = (
    measured.ladder,
    measured.latency,
    measured.load,
    measured.costs,
    rewritten.rewrites,
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
    main = element("main", verdict.section(report), *(section(report) for section in _SECTIONS))
    return document(title, name, report.header.started_at, main)
