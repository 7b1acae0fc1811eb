"""The frame of every page: its head, its style, and the line on top."""

from __future__ import annotations

from importlib import resources

from torchstone.report.html.markup import Html, element, join, text

__all__ = ["document"]


def document(title: str, name: str, started_at: str, main: Html) -> str:
    """One HTML document, to be written as UTF-8, that holds everything it needs.

    :param name: of the workload, for the line on top.
    :param started_at: UTC, ISO 8601.
    :param main: the ``main`` element.
    """
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
        element("time", f"{started_at[:10]} {started_at[11:16]} UTC", datetime=started_at),
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{text(top)}{main}</body></html>\n'
