"""The page as a whole: its head, and the order of its sections."""

from __future__ import annotations

from importlib import resources

from torchstone.records import Inspection
from torchstone.report import format as fmt
from torchstone.report import inspect_headline as headline
from torchstone.report.html.inspection import compiler, machine, rest, shapes, top, work
from torchstone.report.html.markup import Html, element, join, text

__all__ = ["render"]

_SECTIONS = (
    top.section,
    work.capture,
    work.time,
    machine.roofline,
    machine.traffic,
    work.engines,
    compiler.breaks,
    compiler.recompiles,
    shapes.contract,
    shapes.ladder,
    rest.weights,
    rest.environment,
    rest.parts,
)
"""In this order; one whose part was not asked for is left out."""


def render(found: Inspection) -> str:
    """The inspection as one HTML document, to be written as UTF-8.

    It holds everything it needs: no script, nothing fetched. Everything that came from the user or
    from torch is escaped.
    """
    style = resources.files("torchstone.report.html").joinpath("style.css").read_text(encoding="utf-8")
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="color-scheme" content="light dark">'),
            element("title", f"{fmt.clean(headline.summary(found)[0])} - inspection"),
            element("style", Html(style)),
        ]
    )
    started = found.started_at
    header = element(
        "header",
        element("strong", "Torchstone"),
        element("span", found.workload.name),
        element("time", f"{started[:10]} {started[11:16]} UTC", datetime=started),
    )
    main = element("main", *(section(found) for section in _SECTIONS), class_="inspection")
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{text(header)}{main}</body></html>\n'
    )
