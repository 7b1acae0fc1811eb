"""The page as a whole: its head, and the order of its sections."""

from __future__ import annotations

from torchstone.records import Inspection
from torchstone.report import format as fmt
from torchstone.report import inspect_headline as headline
from torchstone.report.html.document import document
from torchstone.report.html.inspection import compiler, machine, rest, shapes, top, work
from torchstone.report.html.markup import element

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
    title = f"{fmt.clean(headline.summary(found)[0])} - inspection"
    main = element("main", *(section(found) for section in _SECTIONS), class_="inspection")
    return document(title, found.workload.name, found.started_at, main)
