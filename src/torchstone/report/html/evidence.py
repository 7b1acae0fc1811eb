"""The evidence: what failed, every verification case, how to make each row again, and where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchstone.records import Capture, Case, CaseErrors, OutputErrors, Wrong
from torchstone.report import divergence, words
from torchstone.report import format as fmt
from torchstone.report.collect import Report, Row
from torchstone.report.html.markup import Cell, Html, code, details, element, facts, join, section, table

__all__ = ["capture", "cases", "environment", "failures", "reproduce"]

_LOG_LINES = 60
_LOG_WIDTH = 400


# --- failures -------------------------------------------------------------------------------------


def failures(report: Report) -> Html:
    """Each candidate that failed, with its reason and the end of its log."""
    return section("failures", "What failed, and why", *map(_failure, words.failed(report)))


def _failure(row: Row) -> Html:
    if row.verdict is None:
        return Html("")
    verdict = row.verdict.verdict
    parts: list[Html] = [
        element("h3", code(row.recipe), element("span", row.status, class_="status")),
        element("p", words.reason(verdict)),
    ]
    if isinstance(verdict, Wrong):
        held = f"error {fmt.error(verdict.relative)}, allowed {fmt.error(verdict.bound)}"
        parts.append(element("p", f"{held}; failed in: {', '.join(verdict.failed)}", class_="fine"))
    if row.divergence is not None:
        parts.append(element("p", divergence.headline(row.divergence)))
        if facts_ := divergence.lines(row.divergence):
            parts.append(element("pre", "\n".join(map(fmt.clean, facts_)), tabindex=0))
    if hint := words.hint(verdict):
        parts.append(element("p", "To have it: ", code(hint)))
    if log := words.log_of(verdict):
        parts.append(_log(log))
    return element("article", *parts, class_="failure")


def _log(log: str) -> Html:
    lines = fmt.clean(log).rstrip("\n").split("\n")
    shown = [
        line if len(line) <= _LOG_WIDTH else line[:_LOG_WIDTH] + " ..." for line in lines[-_LOG_LINES:]
    ]
    summary = f"Log, {len(lines)} line{'s' if len(lines) != 1 else ''}"
    if len(lines) > _LOG_LINES:
        summary = f"Log, last {_LOG_LINES} of {len(lines)} lines (report.json has them all)"
    return details(summary, element("pre", "\n".join(shown), tabindex=0))


# --- verification cases ---------------------------------------------------------------------------


def cases(report: Report) -> Html:
    """Every verification case of every candidate, and the cases that could judge nothing."""
    known = {reference.case.name: reference.case for reference in report.references}
    eager = {reference.case.name: reference.errors for reference in report.references}
    tables = [_candidate(row, known, eager) for row in report.rows if row.verdict and row.verdict.cases]
    blind = [(r.case.name, r.problem) for r in report.references if r.problem is not None]
    if blind:
        listed = table("Inputs that give no reference", ["Case", "Why"], blind, class_="prose")
        tables.append(details(f"{len(blind)} without a reference", listed))
    return section(
        "cases",
        "What was checked",
        *tables,
        lead="Relative error of each candidate against the model in float64, beside that of eager "
        "PyTorch itself, on every input that was tried. Worst output of each case.",
    )


def _candidate(row: Row, known: dict[str, Case], eager: dict[str, tuple[OutputErrors, ...]]) -> Html:
    if row.verdict is None:
        return Html("")
    verdict = row.verdict.verdict
    failed = set(verdict.failed) if isinstance(verdict, Wrong) else set()
    rows = [
        (
            _case(errors, known.get(errors.case), errors.case in failed),
            _worst(errors.errors),
            _worst(eager.get(errors.case, ())),
        )
        for errors in row.verdict.cases
    ]
    caption = words.reason(verdict)
    said = f"{len(rows)} case{'s' if len(rows) != 1 else ''}, {row.status}"
    summary = join([code(row.recipe), " ", element("span", said, class_="fine")])
    return details(summary, table(caption, ["Case", "Error", "Eager's own"], rows, class_="cases"))


def _case(errors: CaseErrors, case: Case | None, failed: bool) -> Html:
    notes = [_describe(case)] if case else []
    if errors.problem is not None:
        notes.append(errors.problem)
    notes += [note for output in errors.errors if (note := _remark(output))]
    mark = element("span", "failed", class_="bad") if failed else ""
    fine = (element("span", note, class_="fine") for note in notes if note)
    return join([element("span", errors.case, " ", mark), *fine])


def _describe(case: Case) -> str:
    sizes = " ".join(f"{name}={size}" for name, size in case.sizes.items())
    odd = [
        case.values if case.values not in ("random", "example") else "",
        case.layout if case.layout != "contiguous" else "",
        case.protocol if case.protocol != "once" else "",
    ]
    return ", ".join(part for part in (sizes, *odd) if part)


def _remark(output: OutputErrors) -> str:
    if output.shape_or_dtype is not None:
        return f"{output.output}: {output.shape_or_dtype}"
    if output.non_finite:
        return f"{output.output}: {output.non_finite} of {output.elements} not finite"
    if output.mismatched:
        return f"{output.output}: {output.mismatched} of {output.elements} differ"
    return ""


def _worst(errors: Sequence[OutputErrors]) -> str:
    if not errors:
        return fmt.DASH
    return fmt.error(words.worst_relative(tuple(e.relative for e in errors)))


# --- reproduce, capture, environment --------------------------------------------------------------


def reproduce(report: Report) -> Html:
    """The commands that make each row again; a click selects one."""
    python = report.header.origin is None
    items = (
        element(
            "div",
            element("dt", code(row.recipe)),
            element("dd", *(element("pre", element("code", command)) for command in row.reproduce)),
        )
        for row in report.rows
    )
    lead = "A click selects a whole line. "
    return section(
        "reproduce",
        "Do it again",
        element("dl", *items, class_="commands"),
        lead=lead
        + ("This run was made from Python, with model and inputs as given there." if python else ""),
    )


def capture(report: Report) -> Html:
    """How the model was captured, and what that cost in generality."""
    found = report.capture
    if found is None:
        return Html("")
    lists: list[Html] = []
    for title, lines in (
        ("Ranges that export narrowed", found.narrowed),
        ("Graph breaks", found.breaks),
    ):
        if lines:
            items = element("ul", *(element("li", element("code", line)) for line in lines))
            lists += [element("h3", title), items]
    return section("capture", "How the model was captured", facts(dict(_captured(found))), *lists)


def _captured(found: Capture) -> Iterable[tuple[str, Cell]]:
    yield "By", "torch.export, one graph" if found.mode == "export" else "Dynamo, in regions"
    if found.refused is not None:
        yield "Export refused", found.refused
    yield "Graphs", fmt.count(found.graphs)
    yield "Operations", fmt.count(found.nodes)
    yield "Parameters", fmt.count(found.parameters)
    yield "Took", fmt.seconds(found.seconds)


def environment(report: Report) -> Html:
    """Where it was measured, of what, and under which policy."""
    header = report.header
    where = header.environment
    machine: dict[str, Cell] = {
        "Processor": where.cpu,
        "Instruction sets": ", ".join(where.isa) or fmt.DASH,
        "Cores, threads": f"{where.cores}, {where.threads}",
        "Memory": fmt.size(where.memory_bytes),
        "Devices": ", ".join(where.devices) or "none",
        "Platform": f"{where.platform}, Python {where.python}",
        "Packages": ", ".join(f"{name} {version}" for name, version in sorted(where.packages.items())),
        "Seed": str(header.seed),
    }
    asked: dict[str, Cell] = {
        "Inputs": join((words.input_of(i) for i in header.workload.inputs), "; "),
        "Dims": ", ".join(map(words.dim_of, header.workload.dims)) or "all fixed",
        "Traffic": f"{fmt.count(len(header.workload.traffic))} requests",
        "Metric": header.workload.metric or "none",
        "Digest": element("code", header.workload.digest),
    }
    policy: dict[str, Cell] = {k: _plain(v) for k, v in header.policy.items() if v is not None}
    return section(
        "environment",
        "Where, of what, under which policy",
        element("h3", "Machine"),
        facts(machine),
        element("h3", "Workload"),
        facts(asked),
        element("h3", "Policy"),
        facts(policy),
    )


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
