"""An inspection on a terminal, in about sixty lines of 80 columns, and as JSON.

The page (:mod:`torchstone.report.html.inspection`) has everything; here stands what is read first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torchstone.records import (
    Break,
    Capturing,
    Clause,
    Inspection,
    LadderStudy,
    OpUse,
    PartName,
    RecompileStudy,
    ShapeContract,
)
from torchstone.report import format as fmt
from torchstone.report import inspect_headline as top
from torchstone.report import inspect_words as words

__all__ = ["from_json", "render", "to_json"]

_OPS = 8
_MODULES = 5
_BREAKS = 5
_STORMS = 8
_CLAUSES = 10

Lines: TypeAlias = Iterator[str | Table]


def to_json(found: Inspection) -> bytes:
    """The inspection as the file beside its page holds it, indented."""
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"


def from_json(data: bytes | str) -> Inspection:
    """Read :func:`to_json` back, strictly.

    :raises msgspec.ValidationError: where the data is not an inspection of this version.
    """
    return msgspec.json.decode(data, type=Inspection)


def render(found: Inspection, console: Console) -> None:
    """Print an inspection; plain text where the console is no terminal, never wider than it."""
    first, *rest = top.summary(found)
    _line(console, first, style="bold")
    for text in rest:
        _line(console, text)
    for text in top.headline(found)[1 + len(rest) :]:
        _line(console, f"- {text}", indent=2)
    for title, lines in _sections(found):
        for number, line in enumerate(lines):
            if isinstance(line, Table):
                console.print(Padding(line, (0, 0, 0, 2), expand=False))
            elif number == 0:
                _line(console, f"{title}: {line}", bold=len(title) + 1)
            else:
                _line(console, line, indent=2)


def _line(console: Console, text: str, *, indent: int = 0, style: str = "", bold: int = 0) -> None:
    """A line; what it wraps to stands two columns further right.

    :param bold: characters at the start that are a title.
    """
    told = Text(fmt.clean(" ".join(text.split())), style=style, overflow="fold")
    told.stylize("bold", 0, bold)
    for i, one in enumerate(told.wrap(console, max(20, console.width - indent - 2))):
        one.rstrip()
        console.print(Padding(one, (0, 0, 0, indent + (2 if i else 0)), expand=False))


def _sections(found: Inspection) -> Iterator[tuple[str, Sequence[str | Table]]]:
    """Titles with what stands under them, of what was asked for; a failure is told once a part."""
    told: set[PartName] = set()
    for name, title, make in _TITLES:
        part = words.part(found, name)
        if part is None:
            continue
        lines = [*make(found)]
        if part.failed is not None and name not in told:
            lines.insert(0, words.reason(part))
        told.add(name)
        if lines:
            yield title, lines
    yield "took", [words.took(found)]


# --- capture, time, modules -----------------------------------------------------------------------


def _capture(found: Inspection) -> Lines:
    capture = found.capture
    if capture is None:
        return
    yield (
        f"{words.captured(capture)}, {words.plural(capture.nodes, 'operation')}, "
        f"in {fmt.seconds(capture.seconds)}"
    )
    yield from words.refused(capture)
    yield from (f"narrowed: {line}" for line in capture.narrowed)


def _time(found: Inspection) -> Lines:
    inventory = found.inventory
    if inventory is None:
        return
    times, profile = inventory.example, inventory.profile
    steady = "" if times.steady else ", still falling"
    outside = f"; {fmt.percent(profile.outside)} of it outside operations" if profile else ""
    yield (
        f"{fmt.seconds(times.median_s)} a call (p90 {fmt.seconds(times.p90_s)}{steady}), "
        f"the first {fmt.seconds(inventory.first_call_s)}{outside}; {words.bounds(inventory)}"
    )
    if inventory.ops:
        yield _op_table(inventory.ops)


def _op_table(ops: Sequence[OpUse]) -> Table:
    counted = f" ({_OPS} of {len(ops)})" if len(ops) > _OPS else ""
    table = _table(f"operation{counted}", "calls", "FLOP", "moved", "time", "share", "of best")
    for op in ops[:_OPS]:
        table.add_row(
            Text(fmt.clean(op.op), overflow="fold"),
            fmt.count(op.work.calls),
            fmt.si(op.work.flops + op.work.other_flops) if words.computes(op) else fmt.DASH,
            fmt.size(op.work.bytes) if op.work.bytes else fmt.DASH,
            fmt.maybe(fmt.seconds, op.seconds),
            fmt.maybe(fmt.percent, op.share),
            words.best(op),
        )
    return table


def _modules(found: Inspection) -> Lines:
    if found.inventory is None:
        return
    groups = words.module_groups(found.inventory.modules)[:_MODULES]
    whole = next((m.total_seconds for m in found.inventory.modules if m.depth == 0), None)
    if groups:
        table = _table("module", "parameters", "FLOP", "time", "share")
        for group in groups:
            table.add_row(*_module_cells(group, whole))
        yield table


def _module_cells(group: words.ModuleGroup, whole: float | None) -> list[Text | str]:
    share = group.seconds / whole if whole and group.seconds is not None else None
    times = f" x{group.number}" if group.number > 1 else ""
    return [
        Text(fmt.clean(f"{group.path} ({group.kind}{times})"), overflow="fold"),
        fmt.si(group.parameters) if group.parameters else fmt.DASH,
        fmt.si(group.flops) if group.flops else fmt.DASH,
        fmt.maybe(fmt.seconds, group.seconds),
        fmt.maybe(fmt.percent, share),
    ]


def _table(first: str, *figures: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, overflow="fold", min_width=12)
    for name in figures:
        table.add_column(name, no_wrap=True, justify="right")
    return table


# --- traffic, engines -----------------------------------------------------------------------------


def _traffic(found: Inspection) -> Lines:
    inventory = found.inventory
    if inventory is None or not inventory.traffic.recorded:
        return
    mix = inventory.traffic
    yield f"{words.requests(mix)}; {words.served(inventory)}"
    for dim in mix.dims:
        told = ", ".join(f"{name} {size}" for name, size in dim.quantiles.items())
        yield f"{dim.name}: {told}; padded to the largest, {fmt.percent(dim.padding_waste)} is padding"


def _engines(found: Inspection) -> Lines:
    for coverage in found.inventory.coverage if found.inventory else ():
        yield f"{coverage.engine}: {words.coverage(coverage)}"


# --- breaks and recompiles ------------------------------------------------------------------------


def _breaks(found: Inspection) -> Lines:
    study = found.breaks
    if study is None:
        return
    if study.refused is not None:
        yield study.refused
        return
    for one in study.breaks[:_BREAKS]:
        yield _break(one)
    if len(study.breaks) > _BREAKS:
        yield f"and {len(study.breaks) - _BREAKS} more"
    if study.plain is not None:
        yield f"as it is: {_capturing(study.plain)}"
    if study.nested is not None:
        yield f"nested: {_capturing(study.nested)}"
    yield f"recipe: {study.recipe}. {study.why}"


def _break(one: Break) -> str:
    cost = "" if one.outside_s is None else f"{fmt.seconds(one.outside_s)} a call; "
    return f"{words.file_line(one.file, one.line, one.text)}: {cost}{one.reason} {one.edit}"


def _capturing(way: Capturing) -> str:
    return (
        f"{words.plural(way.graphs, 'graph')}, {words.plural(way.breaks, 'break')}, captured in "
        f"{fmt.seconds(way.capture_s)}, {fmt.seconds(way.steady_s)} a call"
    )


def _recompiles(found: Inspection) -> Lines:
    study = found.recompiles
    if found.stale is not None:
        yield f"WRONG ANSWER at compiled call {found.stale.call}: {found.stale.fix}"
    if study is None:
        return
    if study.refused is not None:
        yield study.refused
        return
    yield words.compiled(study)
    yield from _storms(study)
    if study.tried:
        yield "tried " + "; ".join(f"{fix.name}: {words.tried(fix)}" for fix in study.tried)


def _storms(study: RecompileStudy) -> Iterator[str]:
    for storm, failure in [*words.storms(study)][:_STORMS]:
        at = f" ({words.place(failure.file, failure.line)})" if failure and failure.file else ""
        yield f"{storm.count}x {words.caused(storm)}{at}: {storm.code or storm.fix}"
    if len(study.storms) > _STORMS:
        yield f"and {len(study.storms) - _STORMS} more causes"


# --- shapes ---------------------------------------------------------------------------------------


def _contract(found: Inspection) -> Lines:
    contract = found.contract
    if contract is None:
        return
    yield from _held(contract)
    listed = words.clauses(contract)
    yield from (_clause(c) for c in listed[:_CLAUSES])
    if len(listed) > _CLAUSES:
        yield f"and {len(listed) - _CLAUSES} more conditions"
    if contract.subject == "none":
        for refusal in [*contract.refusals.values()][:1]:
            at = f" ({words.line_of(refusal.where)})" if refusal.where is not None else ""
            yield f"export: {refusal.text}{at} {refusal.fix}"


def _held(contract: ShapeContract) -> Iterator[str]:
    if contract.dims:
        held = ", ".join(f"{d.dim} in {d.low}..{d.high}" for d in contract.dims)
        sound = "every declared size holds: " if contract.sound else f"{words.subject(contract)}: "
        yield f"{sound}{held}"
    elif contract.subject == "none":
        yield "there is no one graph for any range"
    else:
        yield "all sizes are fixed"


def _clause(clause: Clause) -> str:
    at = words.line_of(clause.where)
    needed = f" needed by {at}" if at else f", known by {words.PROOFS[clause.proof]}"
    silent = "; else a wrong answer without a word" if clause.silent else ""
    return f"{clause.text}{needed}{silent}"


def _ladder(found: Inspection) -> Lines:
    study = found.ladder
    if study is None:
        return
    if not study.chosen:
        yield study.why or "nothing was chosen"
        return
    yield f"{words.rungs(study.chosen)}: {_graphs(study)}"
    for tried in study.attempts:
        if tried.failed is not None:
            at = tried.failed.where
            why = tried.failed.text if at is None else f"at {words.line_of(at)}"
            yield f"{words.rungs(tried.rungs)} fell {why}"
        elif tried.wrong is not None:
            yield f"{words.rungs(tried.rungs)}: {words.attempt(tried)}"


def _graphs(study: LadderStudy) -> str:
    chosen = next((a for a in study.attempts if a.rungs == study.chosen), None)
    facts = []
    if chosen is not None:
        facts.append(words.plural(chosen.graphs, "graph"))
        if chosen.against_backed is not None:
            facts.append(f"{fmt.ratio(chosen.against_backed)} the time of backed")
    if study.graphs_without is not None:
        facts.append(f"{words.plural(study.graphs_without, 'graph')} if nothing is said")
    return ", ".join(facts) or "nothing was measured"


_TITLES: tuple[tuple[PartName, str, Callable[[Inspection], Lines]], ...] = (
    ("capture", "capture", _capture),
    ("inventory", "time", _time),
    ("inventory", "modules", _modules),
    ("inventory", "traffic", _traffic),
    ("inventory", "engines", _engines),
    ("breaks", "graph breaks", _breaks),
    ("recompiles", "recompiles", _recompiles),
    ("contract", "sizes", _contract),
    ("ladder", "dynamic sizes", _ladder),
)
"""Sections in order: the part that each needs, its title, and what stands under it."""
