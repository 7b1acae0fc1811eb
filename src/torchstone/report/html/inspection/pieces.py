"""What several sections of the page share: failures, source lines, shares, figures."""

from __future__ import annotations

from collections.abc import Iterable

from torchstone.records import Inspection, PartName, Refusal
from torchstone.report import format as fmt
from torchstone.report import inspect_words as words
from torchstone.report.html.markup import Cell, Html, code, details, element, join, section

__all__ = [
    "bullets",
    "failed",
    "figure",
    "fine",
    "flow",
    "log",
    "refusal",
    "share",
    "snippet",
    "source",
    "strip_head",
    "tick",
    "who",
]

_LOG_LINES = 60
_LOG_WIDTH = 400


def failed(found: Inspection, name: PartName, id_: str) -> Html:
    """The section of a part that failed: why, and the end of its log; empty where it did not."""
    part = words.part(found, name)
    if part is None or part.failed is None:
        return Html("")
    content = [element("p", f"This was {words.reason(part)}")]
    if part.log:
        content.append(log(part.log))
    return section(id_, words.PARTS[name], *content)


def log(printed: str) -> Html:
    """The end of what a process printed, folded."""
    lines = fmt.clean(printed).rstrip("\n").split("\n")
    shown = (line if len(line) <= _LOG_WIDTH else f"{line[:_LOG_WIDTH]} ..." for line in lines)
    cut = [*shown][-_LOG_LINES:]
    summary = f"Log, {words.plural(len(lines), 'line')}"
    if len(lines) > _LOG_LINES:
        summary = f"Log, last {_LOG_LINES} of {len(lines)} lines (the JSON has them all)"
    return details(summary, element("pre", "\n".join(cut), tabindex=0))


def source(file: str | None, line: int | None, text: str | None) -> Html:
    """A line of the user's source, with its place over it; empty where nothing is known."""
    if not file and not text:
        return Html("")
    place = element("span", words.place(file, line), class_="place", title=file) if file else ""
    quoted = element("code", text) if text else ""
    return element("p", place, " ", quoted, class_="source")


def snippet(text: str) -> Html:
    """Code to write; empty where there is none."""
    return element("pre", element("code", text), class_="snippet") if text else Html("")


def share(value: float | None) -> Cell:
    """A share of the whole as a bar beside its figure; a dash where there is none."""
    if value is None:
        return fmt.DASH
    width = f"{round(100 * max(0.0, min(1.0, value)), 1)}%"
    bar = element("rect", width=width, height="100%", class_="block")
    drawn = element("svg", bar, width="100%", height=8, aria_hidden="true")
    return element("div", drawn, element("span", fmt.percent(value)), class_="share")


def who(name: Cell, status: str = "") -> Html:
    """What a row of a drawing is about, with more under it."""
    named = element("span", name, class_="name")
    return element("div", named, element("span", status, class_="status"), class_="who")


def figure(main: str, rest: str = "") -> Html:
    """A figure with what belongs to it under it."""
    return element("div", element("b", main), " ", element("span", rest), class_="figure")


def strip_head(axis: Html) -> Html:
    """The head of a list of strips: their axis."""
    return element("li", element("span"), axis, element("span"), class_="strip head")


def tick(seconds: float) -> str:
    """A time on an axis: ``20 ms`` where a figure would say ``20.0 ms``."""
    number, unit = fmt.seconds(seconds).split(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def fine(text: Cell) -> Html:
    """A remark; empty where there is none."""
    return element("p", text, class_="fine") if text else Html("")


def flow(*content: Cell) -> Html:
    """A paragraph; empty where all of it is."""
    return element("p", *content) if any(content) else Html("")


def bullets(items: Iterable[Cell]) -> Html:
    """Sentences one under the other; empty where there is none."""
    listed = [element("li", item) for item in items]
    return element("ul", *listed, class_="reasons") if listed else Html("")


def refusal(found: Refusal, title: Cell) -> Html:
    """An error of torch in plain words, with the line, the bound to state and the fix."""
    line = found.where
    said = [
        element("h3", title, element("span", _axes(found), class_="status")),
        element("p", found.text),
        source(line.file, line.line, line.text) if line is not None else "",
        flow("Condition: ", code(found.expression)) if found.expression else "",
        flow("State: ", code(found.bound)) if found.bound else "",
        flow(found.fix),
        snippet(found.code_to_write),
        details("In torch's words", element("pre", found.raw, tabindex=0)) if found.raw else "",
    ]
    return element("article", *said, class_="failure")


def _axes(found: Refusal) -> Html:
    told = (f"{a.dim or 'a fixed size'}: axis {a.axis} of {a.input}" for a in found.axes)
    return join(told, ", ")
