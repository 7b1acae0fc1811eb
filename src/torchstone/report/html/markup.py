"""Small pieces of HTML. Everything of type :class:`str` is text and gets escaped; what is already
markup is :class:`Html`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from torchstone.report import format as fmt

__all__ = ["Cell", "Html", "code", "details", "element", "facts", "join", "section", "table", "text"]


class Html(str):
    """Markup that is safe to put into the page as it is."""

    __slots__ = ()


Cell: TypeAlias = str | Html


def text(value: Cell) -> Html:
    """Escape text from outside, without control characters; leave markup as it is."""
    return value if isinstance(value, Html) else Html(html.escape(fmt.clean(value), quote=True))


def join(parts: Iterable[Cell], between: str = "") -> Html:
    """Parts one after the other, each escaped unless it is markup."""
    return Html(between.join(text(part) for part in parts))


def element(tag: str, /, *content: Cell, **attributes: str | float | None) -> Html:
    """``<tag ...>content</tag>``: ``class_`` is ``class``, ``aria_label`` is ``aria-label``.

    Attributes that are None are left out.
    """
    given = "".join(
        f' {name.strip("_").replace("_", "-")}="{text(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{given}>{join(content)}</{tag}>")


def code(value: str) -> Html:
    """A recipe, command or code, which may break anywhere sensible."""
    return element("code", value)


def section(name: str, title: str, *content: Cell, lead: str = "") -> Html:
    """A part of the page under a heading of the second level; empty where it has no content."""
    if not any(content):
        return Html("")
    intro = element("p", lead, class_="lead") if lead else Html("")
    heading = element("h2", title, id=f"{name}-title")
    return element("section", heading, intro, *content, id=name, aria_labelledby=f"{name}-title")


def details(summary: Cell, *content: Cell, class_: str | None = None) -> Html:
    """Something to unfold."""
    return element("details", element("summary", summary), *content, class_=class_)


def facts(pairs: Mapping[str, Cell]) -> Html:
    """Names and values, as a description list."""
    return element(
        "dl",
        *(element("div", element("dt", name), element("dd", value)) for name, value in pairs.items()),
        class_="facts",
    )


def table(
    caption: Cell, columns: Sequence[Cell], rows: Iterable[Sequence[Cell]], class_: str = ""
) -> Html:
    """A data table whose first column names the row; on a narrow screen each row becomes a card.

    The roles are spelled out because a card layout takes a table's own away in some browsers.
    """
    head = (element("th", name, scope="col", role="columnheader") for name in columns)
    return element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head, role="row"), role="rowgroup"),
        element("tbody", *(_row(columns, row) for row in rows), role="rowgroup"),
        role="table",
        class_=class_ or None,
    )


def _row(columns: Sequence[Cell], row: Sequence[Cell]) -> Html:
    named = element("th", row[0], scope="row", role="rowheader")
    rest = (
        element("td", cell, role="cell", data_label=None if isinstance(name, Html) else name)
        for name, cell in zip(columns[1:], row[1:], strict=True)
    )
    return element("tr", named, *rest, role="row")
