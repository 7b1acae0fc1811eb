"""Which sizes hold: the contract of one program, and the ladder of ways to compile for all."""

from __future__ import annotations

from collections.abc import Iterator

from torchstone.records import (
    Attempt,
    Clause,
    DimContract,
    Inspection,
    LadderStudy,
    Probe,
    ShapeContract,
)
from torchstone.report import format as fmt
from torchstone.report import inspect_words as words
from torchstone.report.html.inspection.pieces import failed, fine, refusal, snippet, source
from torchstone.report.html.markup import Cell, Html, code, details, element, facts, join, section, table

__all__ = ["contract", "ladder"]

_ASKED = {
    "declared": "Export, with the declared ranges",
    "automatic": "Export, which may narrow as it likes (Dim.AUTO)",
    "dynamic": "Export, with Dim.DYNAMIC",
}
"""Ways of asking export."""


# --- the contract ---------------------------------------------------------------------------------


def contract(found: Inspection) -> Html:
    """The sizes that one graph holds for, each condition with its proof, and what refused."""
    one = found.contract
    if one is None:
        return failed(found, "contract", "contract")
    return section(
        "contract",
        words.PARTS["contract"],
        _free(one),
        *(_dim(dim) for dim in one.dims if dim.clauses),
        _ties(one),
        _lost(one),
        *(refusal(r, _ASKED.get(asked, asked)) for asked, r in one.refusals.items()),
        _probes(one),
        _left(one.not_tried),
        lead=_lead(one),
    )


def _lead(one: ShapeContract) -> str:
    swept = f" {words.swept(one)}." if one.probes else ""
    if one.subject == "none":
        return f"There is no one graph for any range.{swept}"
    if not one.dims:
        return f"All sizes are fixed.{swept}"
    if one.sound:
        return f"One graph holds for every declared size.{swept}"
    subject = words.subject(one)
    return f"{subject[:1].upper()}{subject[1:]} holds for less than the declared sizes.{swept}"


def _free(one: ShapeContract) -> Html:
    """Dims that hold as declared."""
    free: dict[str, Cell] = {
        dim.dim: f"{dim.low}..{dim.high}, as declared" for dim in one.dims if not dim.clauses
    }
    return facts(free) if free else Html("")


def _dim(dim: DimContract) -> Html:
    declared = element("span", f"declared {dim.declared}", class_="status")
    title = join([code(f"{dim.dim} in {dim.low}..{dim.high}"), " ", declared])
    return element("article", element("h3", title), *map(_clause, dim.clauses), class_="failure")


def _clause(clause: Clause) -> Html:
    who = "the model itself needs it" if clause.model else "only the capture needs it"
    facts_ = [f"known by {words.PROOFS[clause.proof]}", who]
    if clause.needless:
        facts_.append("the operations are right without it")
    silent = "Where it does not hold, a program without guards answers wrongly without a word."
    return element(
        "div",
        element("p", code(clause.text), " ", element("span", ", ".join(facts_), class_="status")),
        source(clause.where.file, clause.where.line, clause.where.text) if clause.where else "",
        element("p", silent, class_="bad") if clause.silent else "",
        fine(clause.fix),
        class_="clause",
    )


def _ties(one: ShapeContract) -> Html:
    if not one.ties:
        return Html("")
    return element("article", element("h3", "Between dims"), *map(_clause, one.ties), class_="failure")


def _lost(one: ShapeContract) -> Html:
    if not one.narrowed:
        return Html("")
    return fine(join(["Lost of the declared ranges: ", join(map(code, one.narrowed), "; ")]))


def _probes(one: ShapeContract) -> Html:
    if not one.probes:
        return Html("")
    columns = ["Sizes", "The program", "Without its guards", "Apart", "Why"]
    rows = [_probe(p) for p in one.probes]
    made = table("Program against the model in eager", columns, rows, class_="probes")
    return details(f"Every size that was tried ({len(rows)})", made)


def _probe(probe: Probe) -> list[Cell]:
    bad = probe.outcome in ("WRONG", "RAISES")
    outcome = element("span", words.OUTCOMES[probe.outcome], class_="bad" if bad else None)
    return [
        code(words.sizes(probe.sizes)),
        outcome,
        fmt.DASH if probe.unguarded is None else words.OUTCOMES[probe.unguarded],
        fmt.DASH if probe.relative is None else fmt.error(probe.relative),
        fmt.DASH if probe.refusal is None else probe.refusal.text,
    ]


def _left(not_tried: tuple[str, ...]) -> Html:
    if not not_tried:
        return Html("")
    items = element("ul", *(element("li", one) for one in not_tried))
    return details(f"Not tried ({len(not_tried)})", items)


# --- the ladder -----------------------------------------------------------------------------------


def ladder(found: Inspection) -> Html:
    """The ways to compile for dynamic sizes, which one was chosen, and the code for it."""
    study = found.ladder
    if study is None:
        return failed(found, "ladder", "ladder")
    attempts = [_attempt(study, one) for one in study.attempts]
    columns = ["Way", "Outcome", "Graphs", "Compiling", "A call", "Over backed"]
    return section(
        "ladder",
        words.PARTS["ladder"],
        facts(dict(_chosen(study))),
        snippet(study.code),
        table(f"What was tried, with backend {study.backend}", columns, attempts, class_="ladder")
        if attempts
        else "",
        _left(study.not_tried),
        lead="Unbacked sizes are unknown to the compiler, so one graph serves all; or all from 2, and 0 "
        "and 1 apart, in graphs of their own. Backed ones may guard, and always keep 0 and 1 apart. "
        "Which holds is found by trying.",
    )


def _chosen(study: LadderStudy) -> Iterator[tuple[str, Cell]]:
    yield "Chosen", words.rungs(study.chosen) if study.chosen else "none"
    if study.why:
        yield "Why", words.short(study.why)
    if study.graphs_without is not None:
        yield "Graphs if nothing is said", fmt.count(study.graphs_without)


def _attempt(study: LadderStudy, one: Attempt) -> list[Cell]:
    chosen = bool(study.chosen) and one.rungs == study.chosen
    name = element("span", words.rungs(one.rungs), class_="picked" if chosen else None)
    times = (f"{sizes}: {fmt.seconds(seconds)}" for sizes, seconds in one.median_s.items())
    tried = bool(one.trials)
    return [
        name,
        words.attempt(one),
        fmt.count(one.graphs) if tried else fmt.DASH,
        fmt.seconds(one.compile_s) if tried else fmt.DASH,
        join(element("span", told) for told in times) or fmt.DASH,
        fmt.maybe(fmt.ratio, one.against_backed),
    ]
