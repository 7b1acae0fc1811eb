"""For which sizes a captured program is the model: a contract, dim by dim, and what a clause rests on.

``torch.export`` narrows ranges without a word: ``Dim.AUTO`` and ``Dim.DYNAMIC`` take the condition of a
branch for a bound, a named ``Dim`` from 1 is traced at 2 or more, and what Python makes of a size is no
condition at all. So the contract is read twice. Guards say why, but only for what the trace asked; a
sweep over sizes that break things, program against eager, says what, but only where it went. A guard
that the sweep refutes is dropped; a failure that no guard explains is a clause of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec import structs
from torch import nn
from torch.export import Dim as ExportDim
from torch.export import ExportedProgram

from torchstone import compat
from torchstone.capture import export
from torchstone.capture.shapes import sweep
from torchstone.capture.shapes.clauses import Condition, from_guards, sizes_of
from torchstone.capture.shapes.refusals import explain
from torchstone.capture.shapes.sweep import TOLERANCE, Bench, Ran, Sizes, difference
from torchstone.compat import shapes
from torchstone.records import (
    Clause,
    Dim,
    DimContract,
    Outcome,
    Probe,
    Refusal,
    ScalarSpec,
    ShapeContract,
    SourceLine,
)
from torchstone.workload import Workload

__all__ = ["contract"]

_FAILED: tuple[Outcome, ...] = ("REFUSES", "WRONG", "RAISES")


def contract(
    workload: Workload,
    module: nn.Module,
    captured: ExportedProgram | export.Refused,
    *,
    limit_s: float = 60.0,
) -> ShapeContract:
    """Find the sizes that a capture holds for.

    :param captured: the program, or why there is none; then one that export may narrow as it likes is
        swept, so that the contract says what one program would hold for.
    :param limit_s: seconds after which no further trace or size is begun; what is left out is listed.
    """
    started = time.perf_counter()
    bench = Bench.of(workload)
    study = _Study(bench, module, sweep.settled(bench, module), deadline=started + limit_s)
    program = _traces(study, captured)
    clauses, probes = _known(study, program)
    if program is not None and not isinstance(captured, ExportedProgram):
        elsewhere = _elsewhere(study, probes)
        if elsewhere is not None:
            program, (clauses, probes) = elsewhere
    given = isinstance(captured, ExportedProgram)
    dims = () if program is None else tuple(_dim_contract(dim, clauses) for dim in study.dims)
    ties = tuple(c.clause for c in clauses if len(c.clause.dims) > 1)
    return ShapeContract(
        subject="none" if program is None else "program" if given else "automatic",
        dims=dims,
        ties=ties,
        narrowed=(
            *_lost_altogether(study, program, probes),
            *(_narrowed(d) for d in dims if d.clauses),
            *(t.text for t in ties),
        ),
        refusals=study.refusals,
        probes=probes,
        seconds=time.perf_counter() - started,
        not_tried=tuple(study.not_tried),
    )


def _lost_altogether(
    study: _Study, program: ExportedProgram | None, probes: tuple[Probe, ...]
) -> Iterator[str]:
    """What is lost that is no range: there is no program, or it is wrong, or nothing tells."""
    if program is None:
        yield from (f"no program: {refusal.text}" for refusal in [*study.refusals.values()][-1:])
        return
    start = next((p for p in probes if p.sizes == study.base), None)
    if start is not None and start.outcome in _FAILED:
        yield "everything: the program is not the model at the sizes that it was traced at"
    if probes and all(p.outcome == "EAGER_RAISES" for p in probes):
        yield "everything: the model itself raises at all sizes that were tried"


_Known = tuple[list[Condition], tuple[Probe, ...]]


def _known(study: _Study, program: ExportedProgram | None) -> _Known:
    """The clauses of a program and the sweep that they rest on."""
    if program is None:
        return [], ()
    study.guards += shapes.guards_of(program)
    proposed = from_guards(study.spec, study.guards)
    probes = _probe(study, program, proposed)
    return [*_judged(proposed, probes), *_unexplained(study, proposed, probes)], probes


def _elsewhere(study: _Study, probes: tuple[Probe, ...]) -> tuple[ExportedProgram, _Known] | None:
    """A program traced at other sizes, where that one holds for more.

    At 8 rows, ``rows // 8`` is 1, which export takes for a constant: the guards then refuse sizes for
    which the operations are right.
    """
    refused = [p for p in probes if p.outcome == "REFUSES" and p.unguarded == "AGREES"]
    usable = [p.sizes for p in refused if all(n > 1 for n in p.sizes.values())]
    if not usable:
        return None
    base = min(usable, key=lambda sizes: math.prod(sizes.values()))
    other = replace(study, base=base, guards=[], refusals={})
    program = _observed(other)
    if program is None:
        return None
    known = _known(other, program)
    better = sum(p.outcome == "AGREES" for p in known[1]) > sum(p.outcome == "AGREES" for p in probes)
    return (program, known) if better else None


@dataclass
class _Study(sweep.Inquiry):
    """What is known so far."""

    bench: Bench
    module: nn.Module
    base: Sizes
    deadline: float
    guards: list[shapes.Guard] = field(default_factory=list)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    not_tried: list[str] = field(default_factory=list)


# --- traces ---------------------------------------------------------------------------------------

_Asked = Literal["declared", "automatic", "dynamic"]


def _traces(study: _Study, captured: ExportedProgram | export.Refused) -> ExportedProgram | None:
    """Trace in the ways that narrow differently, keeping guards and refusals; gives what to sweep."""
    if any(isinstance(given, ScalarSpec) for given in study.spec.inputs):
        study.not_tried.append("export: it would freeze the Python numbers among the inputs")
        return None
    given = captured if isinstance(captured, ExportedProgram) else None
    if given is None:
        _trace(study, "declared")
        _trace(study, "dynamic")
    observed = _observed(study)
    return given or observed


def _observed(study: _Study) -> ExportedProgram | None:
    """A program that export may narrow as it likes, with every guard on the way."""
    program = _trace(study, "automatic")
    with shapes.oblivious_to_size():
        # torch takes sizes for at least 2, so that a branch on 1 leaves no guard: here it does
        _trace(study, "automatic", keep=False)
    return program


def _trace(study: _Study, asked: _Asked, *, keep: bool = True) -> ExportedProgram | None:
    if study.late(f"tracing with {asked} dims"):
        return None
    make: dict[_Asked, Callable[..., Any]] = {
        "declared": export.declared,
        "automatic": export.automatic,
        "dynamic": _dynamic,
    }
    args = study.bench.inputs(study.base)
    dynamic = export.by_parameter(study.module, export.dynamic_shapes(study.spec, make[asked]))
    program = None
    with shapes.watch() as seen, torch.no_grad():
        try:
            program = torch.export.export(study.module, args, dynamic_shapes=dynamic, strict=False)
        except compat.capture_errors() as error:
            if keep:
                study.refusals[asked] = explain(error, study.spec, seen)
    study.guards += seen.guards
    return program


def _dynamic(_root: Any, dim: Dim, factor: int) -> Any:
    return ExportDim.DYNAMIC(min=factor * dim.low, max=factor * dim.high)


# --- the sweep ------------------------------------------------------------------------------------


def _probe(study: _Study, program: ExportedProgram, clauses: list[Condition]) -> tuple[Probe, ...]:
    programs = program.module(), shapes.unguarded(program)
    probes: list[Probe] = []
    for sizes in sweep.sweep(study.spec, study.base, _edges(study, clauses)):
        if not study.late(f"sizes {sizes}"):
            probe = _one(study, programs, sizes)
            probes += [] if probe is None else [probe]
    return tuple(probes)


def _edges(study: _Study, clauses: list[Condition]) -> dict[str, list[int]]:
    """Sizes on both sides of where a clause of one dim begins and ceases to hold."""
    edges: dict[str, list[int]] = {d.name: [] for d in study.dims}
    for clause in clauses:
        if len(clause.clause.dims) == 1:
            name = clause.clause.dims[0]
            domain = sizes_of(next(d for d in study.dims if d.name == name))
            held = [clause.holds({name: n}) for n in domain]
            turns = [i for i in range(1, len(domain)) if held[i] != held[i - 1]]
            edges[name] += [domain[j] for i in (*turns[:2], *turns[-1:]) for j in (i - 1, i)]
    return edges


def _one(study: _Study, programs: tuple[Any, Any], sizes: Sizes) -> Probe | None:
    bench = study.bench
    args = bench.inputs(sizes)
    eager = bench.run(study.module, args)
    if eager.leaves is None:
        assert eager.error is not None  # the other half of what a run gives
        return Probe(sizes=sizes, outcome="EAGER_RAISES", refusal=explain(eager.error, study.spec))
    again = bench.run(study.module, args)
    if again.leaves is None or difference(eager.leaves, again.leaves) > TOLERANCE:
        study.not_tried.append(f"sizes {sizes}: the model itself answers differently each time")
        return None
    guarded, bare = (bench.run(p, args) for p in programs)
    outcome, relative = _compared(eager.leaves, guarded)
    without, apart = _compared(eager.leaves, bare)
    if guarded.error is None:
        return Probe(sizes=sizes, outcome=outcome, relative=relative)
    refusal = explain(guarded.error, study.spec, shapes.Watch(guards=study.guards))
    if refusal.code != "PROGRAM_REFUSES" and bare.error is not None:
        return Probe(sizes=sizes, outcome="RAISES", refusal=refusal)
    return Probe(sizes=sizes, outcome="REFUSES", unguarded=without, relative=apart, refusal=refusal)


def _compared(expected: list[Any], found: Ran) -> tuple[Outcome, float | None]:
    if found.leaves is None:
        return "RAISES", None
    apart = difference(expected, found.leaves)
    return ("AGREES" if apart <= TOLERANCE else "WRONG"), (apart if math.isfinite(apart) else None)


# --- both together --------------------------------------------------------------------------------


def _judged(proposed: list[Condition], probes: tuple[Probe, ...]) -> Iterator[Condition]:
    """Guards' clauses with what the sweep says of them; one that it refutes is left out."""
    for found in proposed:
        against = [p for p in probes if not found.holds(p.sizes)]
        if against and all(p.outcome == "AGREES" for p in against):
            continue
        failed = [p for p in against if p.outcome in _FAILED]
        raised = [p for p in against if p.outcome == "EAGER_RAISES"]
        clause = Clause(
            text=found.clause.text,
            dims=found.clause.dims,
            where=found.clause.where,
            proof="both" if against else "guard",
            model=bool(raised) and not failed,
            silent=any("WRONG" in (p.outcome, p.unguarded) for p in failed),
            needless=bool(failed) and all(p.unguarded == "AGREES" for p in failed),
        )
        yield replace(found, clause=_fixed(clause))


def _unexplained(
    study: _Study, proposed: list[Condition], probes: tuple[Probe, ...]
) -> Iterator[Condition]:
    """Clauses for what failed in the sweep though every guard holds."""
    left = [p for p in probes if p.outcome != "AGREES" and all(c.holds(p.sizes) for c in proposed)]
    base = study.base
    groups: dict[tuple[tuple[str, ...], bool], list[Probe]] = {}
    for probe in left:
        moved = tuple(name for name, size in probe.sizes.items() if size != base[name])
        groups.setdefault((moved, probe.outcome == "EAGER_RAISES"), []).append(probe)
    explained: list[Condition] = []
    for (moved, model), all_failed in sorted(groups.items(), key=lambda item: len(item[0][0])):
        failed = [p for p in all_failed if all(c.holds(p.sizes) for c in explained)]
        if failed and moved:
            explained.append(_swept(study, moved, failed, probes, model=model))
    yield from explained


def _swept(
    study: _Study, moved: tuple[str, ...], failed: list[Probe], probes: Sequence[Probe], *, model: bool
) -> Condition:
    bad = [{name: p.sizes[name] for name in moved} for p in failed]
    text = " and ".join(
        "not (" + " and ".join(f"{name} == {size}" for name, size in sizes.items()) + ")"
        for sizes in bad
    )
    if len(moved) == 1:
        name = moved[0]
        base = study.base
        tried = sorted(
            {p.sizes[name] for p in probes if all(p.sizes[n] == base[n] for n in base if n != name)}
        )
        text = _outside(name, [sizes[name] for sizes in bad], tried)
    lines = [p.refusal.where for p in failed if p.refusal is not None and p.refusal.where is not None]
    clause = Clause(
        text=text,
        dims=moved,
        where=lines[0] if lines else None,
        proof="sweep",
        model=model,
        silent=any("WRONG" in (p.outcome, p.unguarded) for p in failed),
        needless=not model and all(p.unguarded == "AGREES" for p in failed),
    )
    return Condition(_fixed(clause), lambda sizes: all(any(sizes[n] != b[n] for n in b) for b in bad))


def _outside(name: str, bad: list[int], tried: list[int]) -> str:
    """``B != 1``, ``B >= 2`` or ``B not in {7, 9}`` of the sizes that were tried."""
    good = [n for n in tried if n not in bad]
    if len(bad) == 1:
        return f"{name} != {bad[0]}"
    if len(good) == 1:
        return f"{name} == {good[0]}"
    if good and max(bad) < min(good):
        return f"{name} >= {min(good)}"
    if good and min(bad) > max(good):
        return f"{name} <= {max(good)}"
    return f"{name} not in {{{', '.join(map(str, sorted(bad)))}}}"


def _fixed(clause: Clause) -> Clause:
    """With what to do about it."""
    line = "this line" if clause.where is None else _place(clause.where)
    if len(clause.dims) > 1 and clause.model:
        fix = f"The model itself needs it: declare one dim for {' and '.join(clause.dims)}."
    elif clause.model:
        fix = f"The model itself needs it: declare the range of {clause.dims[0]} so."
    elif clause.needless:
        fix = (
            "Only the guard needs it, the operations do not: serve without guards, or rewrite the line."
        )
    elif "==" in clause.text and "%" not in clause.text:
        fix = f"{line} fixes a size: take it from a tensor's shape, make no int of it, no equality."
    else:
        fix = (
            f"Rewrite {line} so that it holds for all sizes (torch.where, torch.cond, padding), or "
            "export one program for each side."
        )
    return structs.replace(clause, fix=fix)


def _place(where: SourceLine) -> str:
    return f"{Path(where.file).name}:{where.line} {where.text}".rstrip()


def _dim_contract(dim: Dim, clauses: list[Condition]) -> DimContract:
    own = [c for c in clauses if c.clause.dims == (dim.name,)]
    held = [
        n for n in range(dim.low, dim.high + 1, dim.multiple) if all(c.holds({dim.name: n}) for c in own)
    ]
    low, high = (held[0], held[-1]) if held else (dim.low, dim.low)
    parts = [f"{dim.name} in {low}..{high}"]
    for found in own:
        where = found.clause.where
        known = "found by the sweep" if found.clause.proof == "sweep" else "a guard"
        needed = f"needed by {_place(where)}" if where is not None else f"({known})"
        parts.append(f"{found.clause.text} {needed}")
    return DimContract(
        dim=dim.name,
        declared=_declared(dim),
        low=low,
        high=high,
        text=", ".join(parts),
        clauses=tuple(c.clause for c in own),
    )


def _declared(dim: Dim) -> str:
    return f"{dim.low}..{dim.high}" if dim.multiple == 1 else f"{dim.multiple}*k, {dim.low}..{dim.high}"


def _narrowed(found: DimContract) -> str:
    conditions = ", ".join(clause.text for clause in found.clauses)
    return f"{found.dim}: {found.declared} -> {found.low}..{found.high}, {conditions}"
