"""How the model is captured, where its time goes, and what the engines make of its operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchstone.records import Capture, Coverage, Inspection, LineUse, ModuleUse, OpUse
from torchstone.report import format as fmt
from torchstone.report import inspect_words as words
from torchstone.report.html.inspection.pieces import bullets, failed, fine, share, source
from torchstone.report.html.markup import Cell, Html, code, details, element, facts, join, section, table

__all__ = ["NUMBERED", "capture", "engines", "time"]

NUMBERED = 9
"""Operations that have a number, here and on the roofline."""
_OPS = 16
_NANOSECOND = 1e-9
_CHILDREN = 16
_OPEN = 2
"""Modules down to this depth are not folded."""
_MAIN = 0.8
"""Share of the module above from which on one is not folded either, at any depth."""


# --- capture --------------------------------------------------------------------------------------


def capture(found: Inspection) -> Html:
    """Whether and how the model becomes one graph."""
    one = found.capture
    if one is None:
        return failed(found, "capture", "capture")
    lists = []
    for title, lines in (
        ("Ranges that export narrowed", one.narrowed),
        ("Graph breaks, as Dynamo tells them", one.breaks),
    ):
        if lines:
            items = (element("li", element("code", words.short(line))) for line in lines)
            lists += [element("h3", title), element("ul", *items)]
    return section("capture", "How it is captured", facts(dict(_captured(one))), *lists)


def _captured(one: Capture) -> Iterator[tuple[str, Cell]]:
    yield "As", words.captured(one)
    if one.trace_refused:
        yield "The light tracer refused", words.short(one.trace_refused)
    if one.refused:
        yield "torch.export refused", words.short(one.refused)
    yield "Operations", fmt.count(one.nodes)
    yield "Took", fmt.seconds(one.seconds)


# --- time -----------------------------------------------------------------------------------------


def time(found: Inspection) -> Html:
    """Operations, source lines and modules by time, and what stands out."""
    inventory = found.inventory
    if inventory is None:
        return failed(found, "inventory", "time")
    profile = inventory.profile
    lead = "Work is counted from shapes on the example inputs; times are of its profiled calls."
    if profile is not None:
        lead += (
            f" A profiled call takes {fmt.seconds(profile.seconds)}, of which "
            f"{fmt.percent(profile.outside)} is outside any operation, in Python and dispatch."
        )
    return section(
        "time",
        words.PARTS["inventory"],
        bullets(f"{note[:1].upper()}{note[1:]}." for note in inventory.notes),
        *_op_tables(inventory.ops),
        _lines(profile.lines) if profile is not None and profile.lines else "",
        _modules(inventory.modules),
        lead=lead,
    )


def _op_tables(ops: Sequence[OpUse]) -> Iterator[Html]:
    if not ops:
        return
    columns = ["Operation", "Calls", "FLOP", "Moved", "Time", "Share", "At best", "Of best"]
    rows = [_op(op, number) for number, op in enumerate(ops, 1)]
    yield table("Operations, the slowest first", columns, rows[:_OPS], class_="figures ops")
    if rows[_OPS:]:
        rest = sum(op.share or 0.0 for op in ops[_OPS:])
        summary = f"{words.plural(len(rows) - _OPS, 'more operation')}, {fmt.percent(rest)} of the time"
        yield details(summary, table("The others", columns, rows[_OPS:], class_="figures ops"))
    yield fine(
        "FLOP counts a multiply and an add as two, and element-wise work at one an element. Moved is "
        "what every operation reads and writes if nothing stays in a cache. At best is the least time "
        "by this machine's measured peaks."
    )


def _op(op: OpUse, number: int) -> list[Cell]:
    badge = element("span", str(number), class_="badge") if number <= NUMBERED else ""
    flops = op.work.flops + op.work.other_flops
    return [
        element("span", badge, code(op.op), class_="op"),
        fmt.count(op.work.calls),
        "not known" if op.counted == "uncounted" else fmt.si(flops) if flops else fmt.DASH,
        fmt.size(op.work.bytes) if op.work.bytes else fmt.DASH,
        fmt.maybe(fmt.seconds, op.seconds),
        share(op.share),
        _least(op.bound_s),
        words.best(op),
    ]


def _least(seconds: float | None) -> str:
    if not seconds:
        return fmt.DASH
    return fmt.seconds(seconds) if seconds >= _NANOSECOND else "under 1 ns"


def _lines(lines: Sequence[LineUse]) -> Html:
    rows = [
        (
            source(one.file, one.line, one.text),
            fmt.count(one.calls),
            fmt.seconds(one.seconds),
            share(one.share),
        )
        for one in lines
    ]
    return table("Lines of the source", ["Line", "Operations", "Time", "Share"], rows, class_="lines")


# --- modules --------------------------------------------------------------------------------------


class _Node(NamedTuple):
    use: ModuleUse
    children: list[_Node]

    @property
    def seconds(self) -> float | None:
        """While it runs; of its submodules, where it only holds them."""
        own = self.use.total_seconds
        if own or not self.children:
            return own
        below = [c.seconds for c in self.children]
        return sum(s for s in below if s is not None) if any(s is not None for s in below) else own

    @property
    def flops(self) -> float:
        own = self.use.total.flops + self.use.total.other_flops
        return own or sum(c.flops for c in self.children)


def _modules(modules: Sequence[ModuleUse]) -> Html:
    """The tree of submodules, the largest first, folded from the third level on."""
    roots = _tree(modules)
    if not any(root.children for root in roots):
        return Html("")
    whole = max((root.seconds or 0.0 for root in roots), default=0.0)
    head = element(
        "div",
        element("span", "Module", class_="name"),
        *(element("span", name) for name in ("Parameters", "FLOP", "Time", "Share")),
        class_="node head",
        aria_hidden="true",
    )
    tree = element("div", head, *(_node(root, whole, main=True) for root in roots), class_="tree")
    return join([element("h3", "Modules"), tree])


def _tree(modules: Sequence[ModuleUse]) -> list[_Node]:
    nodes: dict[str, _Node] = {}
    roots: list[_Node] = []
    for use in modules:
        node = nodes[use.path] = _Node(use, [])
        above = nodes.get(use.path.rpartition(".")[0]) if use.path else None
        (roots if above is None or above is node else above.children).append(node)
    return roots


def _node(node: _Node, whole: float, *, main: bool) -> Html:
    """A module and all below it.

    :param main: whether it, and each that it is in, takes most of the one above it.
    """
    row = _cells(node, whole)
    if not node.children:
        return element("div", *row, class_="node leaf")
    ordered = sorted(
        node.children, key=lambda n: (-(n.seconds or 0.0), -n.flops, -n.use.total_parameters)
    )
    inside = [_node(c, whole, main=main and _most(c, node)) for c in ordered[:_CHILDREN]]
    rest = len(ordered) - len(inside)
    if rest:
        inside.append(element("p", f"and {rest} more, each no larger", class_="fine"))
    summary = element("summary", *row, class_="node")
    opened = "" if main or node.use.depth < _OPEN else None
    return element("details", summary, element("div", *inside, class_="under"), open=opened)


def _most(node: _Node, above: _Node) -> bool:
    own, whole = (node.seconds, above.seconds) if above.seconds else (node.flops, above.flops)
    return (own or 0.0) >= _MAIN * (whole or 0.0) > 0


def _cells(node: _Node, whole: float) -> list[Html]:
    name = node.use.path.rpartition(".")[2] or "the model"
    part = node.seconds / whole if whole and node.seconds is not None else None
    figures = (
        fmt.si(node.use.total_parameters) if node.use.total_parameters else fmt.DASH,
        fmt.si(node.flops) if node.flops else fmt.DASH,
        fmt.maybe(fmt.seconds, node.seconds),
    )
    return [
        element("span", code(name), " ", element("span", node.use.kind, class_="status"), class_="name"),
        *(element("span", figure) for figure in figures),
        element("span", share(part)),
    ]


# --- engines --------------------------------------------------------------------------------------


def engines(found: Inspection) -> Html:
    """What each engine has an implementation for."""
    if found.inventory is None or not found.inventory.coverage:
        return Html("")
    columns = ["Engine", "Operations", "Its own", "Falls back", "Missing", "Remarks"]
    rows = [_engine(one) for one in found.inventory.coverage]
    return section(
        "engines",
        "What the engines cover",
        table("Operations that each engine has", columns, rows, class_="engines"),
        lead="Counted in the form that each engine is given. A fallback runs in ATen's own kernels, "
        "which cannot be fused; what is missing the engine cannot run.",
    )


def _engine(one: Coverage) -> list[Cell]:
    if one.absent is not None:
        hint = (" To have it: ", code(one.absent.hint)) if one.absent.hint else ()
        why = join([f"Not installed: {one.absent.why}.", *hint])
        return [code(one.engine), *[fmt.DASH] * 4, why]
    counted = "" if one.source == "program" else "of a call in eager"
    remarks = [
        counted,
        f"falls back for {words.ops(one.fallbacks)}" if one.fallbacks else "",
        f"lacks {words.ops(one.missing)}" if one.missing else "",
        one.text or "",
    ]
    return [
        code(one.engine),
        fmt.count(one.operations),
        fmt.maybe(fmt.count, one.translated),
        fmt.count(sum(c.count for c in one.fallbacks)),
        fmt.count(sum(c.count for c in one.missing)),
        "; ".join(filter(None, remarks)) or fmt.DASH,
    ]
