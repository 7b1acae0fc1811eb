"""What an inspection found, as sentences shared by the terminal and the page; all functions are pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from torchstone.records import (
    Attempt,
    Capture,
    Cause,
    Clause,
    Coverage,
    GuardFailure,
    Inspection,
    Inventory,
    ModuleUse,
    OpCount,
    OpUse,
    Outcome,
    Part,
    PartName,
    RecompileStudy,
    Rung,
    ShapeContract,
    SourceLine,
    Storm,
    TrafficMix,
    Tried,
)
from torchstone.report import format as fmt

__all__ = [
    "CAUSES",
    "OUTCOMES",
    "PARTS",
    "PROOFS",
    "ModuleGroup",
    "attained",
    "attempt",
    "bare",
    "best",
    "bounds",
    "captured",
    "caused",
    "clauses",
    "compiled",
    "computes",
    "coverage",
    "failure_of",
    "file_line",
    "line_of",
    "module_groups",
    "of_bound",
    "ops",
    "part",
    "place",
    "plural",
    "reason",
    "refused",
    "requests",
    "rung",
    "rungs",
    "served",
    "short",
    "sizes",
    "storms",
    "subject",
    "swept",
    "took",
    "tried",
]

PARTS: Mapping[PartName, str] = {
    "capture": "Capture",
    "inventory": "Where the time goes",
    "breaks": "Graph breaks",
    "recompiles": "Recompiles",
    "contract": "Sizes that hold",
    "ladder": "Compiling for dynamic sizes",
}
"""The parts of an inspection, as headings."""

CAUSES: Mapping[Cause, str] = {
    "FIRST_SIZE": "fixed first size",
    "ZERO_ONE": "size 0 or 1",
    "SIZE_SPECIALIZED": "one exact size",
    "SIZE_BRANCH": "branch on a size",
    "SIZES_RELATED": "relation between sizes",
    "RANK": "number of axes",
    "INTEGER_ARGUMENT": "integer argument",
    "FLOAT_ARGUMENT": "float argument",
    "ARGUMENT_VALUE": "argument's value",
    "BREAK_VALUE": "number out of a graph break",
    "DTYPE": "dtype",
    "DEVICE": "device",
    "LAYOUT": "memory layout",
    "ALIASING": "aliasing arguments",
    "REQUIRES_GRAD": "requires_grad",
    "GRAD_MODE": "gradient mode",
    "GLOBAL_STATE": "global setting of torch",
    "GLOBAL_VALUE": "global variable",
    "CLOSURE_VALUE": "closure variable",
    "MODULE_ATTRIBUTE": "module attribute",
    "CLASS_ATTRIBUTE": "class attribute",
    "OBJECT_TYPE": "type of an object",
    "OBJECT_IDENTITY": "identity of an object",
    "BACKEND": "another backend",
    "OTHER": "another guard",
}
"""Causes of recompiles, in a few words each."""

_OF_TENSORS: tuple[Cause, ...] = (
    "FIRST_SIZE",
    "ZERO_ONE",
    "SIZE_SPECIALIZED",
    "RANK",
    "DTYPE",
    "DEVICE",
    "LAYOUT",
    "REQUIRES_GRAD",
)
"""Causes that are a property of what was guarded."""

OUTCOMES: Mapping[Outcome, str] = {
    "AGREES": "agrees",
    "EAGER_RAISES": "the model itself refuses",
    "REFUSES": "a guard refuses",
    "WRONG": "wrong answer",
    "RAISES": "raises",
}
"""What a program does at a size."""

PROOFS: Mapping[str, str] = {
    "guard": "a guard of the trace",
    "sweep": "sizes that failed",
    "both": "a guard, and sizes that failed",
}
"""How a clause is known."""

_SUBJECTS: Mapping[str, str] = {
    "program": "the captured program",
    "automatic": "a program whose ranges export may narrow",
    "none": "no program",
}
_RUNGS: Mapping[Rung, str] = {
    "unbacked": "unbacked from 1",
    "unbacked-2": "unbacked from 2 (0 and 1 apart)",
    "backed": "backed (mark_dynamic)",
    "automatic": "left to torch",
}

_LEAST = 0.001
_TOKEN = re.compile(r"[^\s:\"'`(]+(:\d)?")
"""A word, and whether a line number follows it."""


# --- parts ----------------------------------------------------------------------------------------


def reason(failed: Part) -> str:
    """Why a part has nothing to show, and after how long."""
    return f"not found out, after {fmt.seconds(failed.seconds)}: {short(failed.failed or '')}"


def took(found: Inspection) -> str:
    """Seconds of every part, and of all."""
    told = ", ".join(f"{p.name} {fmt.duration(p.seconds)}" for p in found.parts)
    whole = fmt.duration(sum(p.seconds for p in found.parts))
    return f"{whole}: {told}" if told else "nothing was asked for"


# --- small words ----------------------------------------------------------------------------------


def part(found: Inspection, name: PartName) -> Part | None:
    """How the finding of a part went; None where it was not asked for."""
    return next((p for p in found.parts if p.name == name), None)


def place(file: str, line: int | None) -> str:
    """``model.py:41``: a file without its folders, and the line."""
    name = PurePath(file).name
    return name if line is None else f"{name}:{line}"


def line_of(where: SourceLine | None) -> str:
    """A source line with its place; empty where there is none."""
    return "" if where is None else file_line(where.file, where.line, where.text)


def file_line(file: str | None, line: int | None, text: str | None) -> str:
    """``model.py:41 x.view(B, S // 8, 8)``, as far as it is known."""
    if not file:
        return text or ""
    return " ".join(filter(None, (place(file, line), text)))


def short(text: str) -> str:
    """Text without the folders of the files that it names: ``model.py:41 in forward``."""
    return _TOKEN.sub(lambda m: m[0].rpartition("/")[2] if m[1] else m[0], text)


def plural(n: float, one: str, many: str | None = None) -> str:
    """``1 graph``, ``3 graphs``."""
    return f"{fmt.count(n)} {one if n == 1 else many or one + 's'}"


def sizes(given: Mapping[str, int], scalars: Mapping[str, float] | None = None) -> str:
    """``B=4 S=128 n=3``; a dash where there is none."""
    both = [*given.items(), *(scalars or {}).items()]
    return " ".join(f"{name}={_plain(value)}" for name, value in both) or fmt.DASH


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def bare(sentence: str) -> str:
    """A sentence as a part of another: its first line, without its full stop."""
    return short(sentence.strip().partition("\n")[0].removesuffix("."))


# --- capture, time, traffic -----------------------------------------------------------------------


def captured(capture: Capture) -> str:
    """One graph or regions, and by what."""
    if capture.mode == "dynamo" and not capture.graphs:
        return "no graph at all"
    if capture.mode == "dynamo":
        return f"{plural(capture.graphs, 'region')} by Dynamo"
    return f"one graph by {'the light tracer' if capture.traced else 'torch.export'}"


def refused(capture: Capture) -> Iterator[str]:
    """Who refused to make one graph of the model, and why."""
    if capture.trace_refused:
        yield f"the light tracer refused: {short(capture.trace_refused)}"
    if capture.refused:
        yield f"torch.export refused: {short(capture.refused)}"


def bounds(inventory: Inventory) -> str:
    """How far eager is from what the machine allows, on the example."""
    found = inventory.roofline.example if inventory.roofline else None
    if found is None:
        return "operations could not be traced, so there is no roofline"
    far = fmt.maybe(fmt.ratio, found.eager_over_operations)
    fused = fmt.maybe(fmt.ratio, found.eager_over_fused)
    return (
        f"roofline {fmt.seconds(found.operations_s)} operation by operation (eager takes {far}), "
        f"{fmt.seconds(found.fused_s)} fused ({fused})"
    )


class ModuleGroup(NamedTuple):
    """Submodules of one kind at one place of repeated blocks, added up."""

    path: str
    """``layers.*.attention``."""
    kind: str
    """Their class."""
    number: int
    """How many."""
    parameters: int
    """With those of their submodules."""
    flops: float
    """While they run, of both kinds."""
    seconds: float | None
    """While they run, in one call."""


def module_groups(modules: Sequence[ModuleUse]) -> list[ModuleGroup]:
    """Submodules, those of repeated blocks together, by what they take.

    A group inside another that takes as much says no more than that one, so it is left out.
    """
    together: dict[tuple[str, str], list[ModuleUse]] = {}
    for module in modules:
        if module.depth > 0 and (module.total.calls or module.total_seconds):
            path = re.sub(r"(?<![^.])\d+(?![^.])", "*", module.path)
            together.setdefault((path, module.kind), []).append(module)
    groups = [_group(path, kind, own) for (path, kind), own in together.items()]
    groups.sort(key=lambda g: (-(g.seconds or 0.0), -g.flops, -g.parameters, g.path.count(".")))
    whole = [_group("", m.kind, [m]) for m in modules if m.depth == 0]
    kept: list[ModuleGroup] = []
    for group in groups:
        around = [*whole, *(k for k in kept if group.path.startswith(f"{k.path}."))]
        if not any(k[3:] == group[3:] for k in around):
            kept.append(group)
    return kept


def _group(path: str, kind: str, own: Sequence[ModuleUse]) -> ModuleGroup:
    seconds = [m.total_seconds for m in own if m.total_seconds is not None]
    return ModuleGroup(
        path=path,
        kind=kind,
        number=len(own),
        parameters=sum(m.total_parameters for m in own),
        flops=sum(m.total.flops + m.total.other_flops for m in own),
        seconds=sum(seconds) if seconds else None,
    )


def requests(mix: TrafficMix) -> str:
    """How many requests, of how many kinds, at what rate."""
    text = f"{plural(mix.requests, 'request')}, {plural(mix.shapes, 'combination')} of sizes"
    if mix.rate is not None:
        text += f", {fmt.rate(mix.rate)}"
        if mix.peak_rate is not None:
            text += f" (peak {fmt.rate(mix.peak_rate)})"
    return text


def served(inventory: Inventory) -> str:
    """What one process serves of the mix."""
    if inventory.mean_s is None:
        return "a size of it fails, so there is no mean"
    text = f"eager takes {fmt.seconds(inventory.mean_s)} on average"
    if inventory.requests_per_s is not None:
        text += f", {fmt.rate(inventory.requests_per_s)} a process"
    return text


# --- operations -----------------------------------------------------------------------------------


def of_bound(op: OpUse) -> float | None:
    """Share of the machine's best that an operation attains; None where it is not known."""
    if not op.seconds or not op.bound_s or op.counted == "uncounted":
        return None
    return op.bound_s / op.seconds


def best(op: OpUse) -> str:
    """:func:`of_bound` as text; a dash where it is not known, or the operation moves nothing."""
    share = of_bound(op)
    return "under 0.1%" if share is not None and share < _LEAST else fmt.maybe(fmt.percent, share)


def computes(op: OpUse) -> bool:
    """Whether it is known to do any FLOPs."""
    return op.counted != "uncounted" and op.work.flops + op.work.other_flops > 0


def attained(op: OpUse) -> tuple[float, float] | None:
    """An operation's place on the roofline: FLOPs a byte, and FLOPs a second."""
    flops = op.work.flops + op.work.other_flops
    if not op.seconds or flops <= 0 or op.work.bytes <= 0:
        return None
    return flops / op.work.bytes, flops / op.seconds


def ops(counts: Sequence[OpCount], most: int = 6) -> str:
    """``aten.topk.default, aten.sort.default x2 and 3 more``."""
    told = [f"{c.op} x{c.count}" if c.count > 1 else c.op for c in counts[:most]]
    rest = len(counts) - len(told)
    return ", ".join(told) + (f" and {rest} more" if rest else "")


def coverage(found: Coverage) -> str:
    """What an engine makes of the model's operations, in a line."""
    if found.absent is not None:
        hint = f"; to have it: {found.absent.hint}" if found.absent.hint else ""
        return f"not installed: {found.absent.why}{hint}"
    facts = []
    if found.translated is not None:
        facts.append(f"{fmt.count(found.translated)} of {plural(found.operations, 'operation')}")
    if found.fallbacks:
        facts.append(f"falls back to ATen for {ops(found.fallbacks, 3)}")
    if found.missing:
        facts.append(f"cannot run {ops(found.missing, 3)}")
    if found.text:
        facts.append(found.text)
    return "; ".join(facts) or "nothing can be said"


# --- recompiles -----------------------------------------------------------------------------------


def storms(study: RecompileStudy) -> Iterator[tuple[Storm, GuardFailure | None]]:
    """Each storm with the guard of its first recompile, which tells the source line."""
    for storm in study.storms:
        yield storm, failure_of(study, storm)


def failure_of(study: RecompileStudy, storm: Storm) -> GuardFailure | None:
    """The guard of a storm's first recompile; one that knows its line, if any does."""
    own = [
        r.failure
        for r in study.recompiles
        if (r.failure.cause, r.failure.guarded) == (storm.cause, storm.guarded)
    ]
    return next((f for f in own if f.file is not None), own[0] if own else None)


def caused(storm: Storm) -> str:
    """What a storm is by: ``integer argument n``, ``size 0 or 1 of x.size()[0]``."""
    return f"{CAUSES[storm.cause]}{' of ' if storm.cause in _OF_TENSORS else ' '}{storm.guarded}"


def compiled(study: RecompileStudy) -> str:
    """How often it compiled, against what is allowed."""
    text = (
        f"{plural(study.graphs, 'graph')} in {plural(study.calls, 'call')}, "
        f"{plural(len(study.recompiles), 'recompile')}"
    )
    if study.allowed is not None:
        over = "more than" if study.exceeds else "within"
        text += f"; {over} the policy's max_recompiles of {study.allowed}"
    if study.limited:
        text += (
            f"; {', '.join(map(short, study.limited))} hit torch's limit of {study.limit}, "
            f"and {plural(len(study.eager_calls), 'call')} ran eagerly"
        )
    return text


def tried(fix: Tried) -> str:
    """How a fix came out on the same replay."""
    if fix.graphs is None:
        return f"fails: {short(fix.failed or 'no reason was given')}"
    right = "right" if fix.agrees else "but not every answer agrees with eager"
    return f"{plural(fix.graphs, 'graph')}, {right}"


# --- shapes ---------------------------------------------------------------------------------------


def clauses(contract: ShapeContract) -> tuple[Clause, ...]:
    """Every condition of a contract, those of one dim first."""
    return (*(c for dim in contract.dims for c in dim.clauses), *contract.ties)


def subject(contract: ShapeContract) -> str:
    """What was swept."""
    return _SUBJECTS[contract.subject]


def swept(contract: ShapeContract) -> str:
    """How the sweep came out: ``31 sizes tried: 28 agree, ...``."""
    counts = Counter(p.outcome for p in contract.probes)
    told = ", ".join(f"{OUTCOMES[outcome]} {n}" for outcome, n in counts.most_common())
    return f"{plural(len(contract.probes), 'combination')} of sizes tried: {told}"


def rung(name: Rung) -> str:
    """A rung in words."""
    return _RUNGS[name]


def rungs(given: Mapping[str, Rung]) -> str:
    """``B unbacked from 1, S backed (mark_dynamic)``; of all dims together where they are alike."""
    if len(given) > 1 and len(set(given.values())) == 1:
        return f"{', '.join(given)} {rung(next(iter(given.values())))}"
    return ", ".join(f"{dim} {rung(name)}" for dim, name in given.items()) or fmt.DASH


def attempt(tried: Attempt) -> str:
    """How one way to compile came out."""
    if tried.unavailable is not None:
        return f"not tried: {tried.unavailable}"
    if tried.failed is not None:
        at = f" ({line_of(tried.failed.where)})" if tried.failed.where is not None else ""
        return f"fell: {tried.failed.text}{at}"
    if tried.wrong is not None:
        return f"wrong answer at {sizes(tried.wrong)}"
    if not tried.trials:
        return "not tried"
    return f"holds at {plural(len(tried.trials), 'combination')} of sizes"
