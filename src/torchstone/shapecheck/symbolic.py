"""Symbolic execution: a model run on tensors that have shapes but no values, and no memory.

A model first runs with odd numbers for its dims, unlike each other, which takes a quarter of the time
that symbols do. What fails is run with symbolic sizes, which name what does not fit in the user's own
dims (``expected 64, got 3*S``), and at other sizes where the user stated none. So a finding is a
failure that was seen with numbers, at every size that was tried or at one that the user stated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from torchstone.records import CheckedEntry, Finding, Place
from torchstone.shapecheck import runs
from torchstone.shapecheck import sizes as sizes_of
from torchstone.shapecheck.entries import Form, Target, size_at
from torchstone.shapecheck.runs import Failure, Made, Run, Source

__all__ = ["Executed", "execute"]

_NAMING_S = 5.0
"""Seconds that naming a failure may take: some expressions of sizes take sympy minutes."""


class Executed(NamedTuple):
    """What came of one target."""

    entry: CheckedEntry
    """The record of it."""
    finding: Finding | None = None
    """What failed."""
    lines: frozenset[int] = frozenset()
    """Lines of the file that went well."""
    failed: frozenset[int] = frozenset()
    """Lines on the way to what failed."""


def execute(source: Source, target: Target) -> Executed:
    """Run a target in all the ways that it is to be run."""
    made = runs.build(source, target)
    if isinstance(made, Failure):
        return _failed(source, target, Run(made))
    forms = target.forms(made.model)
    if not forms:
        return _unknown(target)
    if target.how == "class":
        return _guessed(source, target, forms, made)
    return _form(source, target, forms[0], made)


def _guessed(source: Source, target: Target, forms: Sequence[Form], made: Made) -> Executed:
    """Run with the first guess that runs; tell of a failure only where it does not hang on the guess."""
    tried = []
    for form in forms:
        run = runs.run(source, made, form, sizes_of.generic(form.dims))
        if run.failure is None:
            return _form(source, target, form, made)
        tried.append((run.operations, run.failure, form))
    reached, furthest, form = max(tried, key=lambda one: one[0])
    executed = _form(source, target, form, made)
    if executed.entry.status == "clean":
        return executed
    found = executed.finding
    one_rank = len({form.ranks for form in forms}) == 1
    certain = _whatever_the_guess(furthest, [failure for _, failure, _ in tried], one_rank=one_rank)
    if found is not None and found.kind == "shape" and reached > 0 and certain:
        return executed
    return _unknown(target, executed.lines)


def _whatever_the_guess(furthest: Failure, failures: Sequence[Failure], *, one_rank: bool) -> bool:
    """Whether the guesses are no cause of the furthest failure.

    Where all fail at one place, they are none if the sizes are the same each time, or if no parameter is
    concerned: a weight may ask for an input that was not guessed, but two results of one input that
    do not fit each other are wrong for any. Where some failed before, the others must fail with the same
    sizes; where the guesses are of several ranks, a weight must have refused those that failed before.
    """
    there = [f for f in failures if f.trail.place == furthest.trail.place]
    before = [f for f in failures if f.trail.place != furthest.trail.place]
    alike = len({f.explanation.text for f in there}) == 1
    if not before:
        return alike or not _by_a_parameter(furthest)
    return alike and (one_rank or all(_by_a_parameter(f) for f in before))


def _by_a_parameter(failure: Failure) -> bool:
    tensors = failure.call.tensors if failure.call is not None else ()
    return any(isinstance(tensor, nn.Parameter) for tensor in tensors)


def _unknown(target: Target, lines: frozenset[int] = frozenset()) -> Executed:
    note = f"its inputs could not be told: say so with # torchstone: check {target.name}, x=f32[B, ...]"
    return Executed(_entry(target, "not-run", notes=(note,)), lines=lines)


def _form(source: Source, target: Target, form: Form, made: Made) -> Executed:
    """Run one form: with numbers, then other ones where these fail; then the ends of what is stated."""
    sizes: Mapping[str, int] = sizes_of.generic(form.dims)
    dims = tuple(dim.name for dim in form.dims)
    run = _with_numbers(source, target, form, sizes, made)
    notes: list[str] = []
    if run.failure is not None:
        run, failure = _named(source, target, form, run, sizes)
        other = _elsewhere(source, target, form, failure)
        if other is None:
            relevant = {} if failure.explanation.fixed else sizes
            return _failed(source, target, run, form, relevant)
        notes.append(_needs(source, failure, sizes, other[0]))
        run = other[1]
    for stated in sizes_of.ends(form.dims):
        end = runs.run(source, made, form, stated)
        if end.failure is not None:  # a model that was used may have kept sizes: only a fresh one counts
            end = _with_numbers(source, target, form, stated)
        if end.failure is not None and end.failure.is_shape:
            return _failed(source, target, end, form, stated)
    answered = sorted({line for line in run.assumed if line is not None})
    notes += [f"the branch on a tensor's values at line {line} was chosen" for line in answered]
    entry = _entry(target, "clean", dims=dims, operations=run.operations, notes=tuple(notes))
    return Executed(entry, lines=run.lines)


def _with_numbers(
    source: Source, target: Target, form: Form, sizes: Mapping[str, int], made: Made | None = None
) -> Run:
    """Run with numbers; a branch on values the other way where the first fails for another reason.

    A model whose constructor read values off tensors is made again with these.

    :param made: the model, if it is made and unused.
    """
    run = Run(None)
    for truth in (True, False):
        fresh = made or runs.build(source, target)
        made = None
        if isinstance(fresh, Failure):
            return Run(fresh)
        run = runs.run(source, fresh, form, sizes, truth=truth)
        if run.failure is not None and run.failure.refused:
            fresh = runs.build(source, target, values=True)
            run = (
                run if isinstance(fresh, Failure) else runs.run(source, fresh, form, sizes, truth=truth)
            )
        if run.failure is None or run.failure.is_shape or not run.assumed:
            break
    return run


def _elsewhere(
    source: Source, target: Target, form: Form, failure: Failure
) -> tuple[Mapping[str, int], Run] | None:
    """Other sizes at which it runs, if that could be."""
    if not failure.is_shape or failure.explanation.fixed:
        return None
    for sizes in sizes_of.others(form.dims):
        if not _could_fit(failure, sizes):
            continue
        run = _with_numbers(source, target, form, sizes)
        if run.failure is None:
            return sizes, run
    return None


def _could_fit(failure: Failure, sizes: Mapping[str, int]) -> bool:
    """Whether what does not fit could at these sizes, as far as that can be told without a run."""
    if failure.explanation.unequal is None:
        return True
    try:
        a, b = (size_at(str(size), sizes) for size in failure.explanation.unequal)
    except (KeyError, SyntaxError):  # an expression that only sympy reads
        return True
    return bool(a == b or 1 in (a, b))


def _named(
    source: Source, target: Target, form: Form, run: Run, sizes: Mapping[str, int]
) -> tuple[Run, Failure]:
    """The failure with numbers, told in named dims where it is the same with symbolic sizes."""
    failure = run.failure
    assert failure is not None
    made = runs.build(source, target) if form.dims and failure.is_shape else None
    if made is None or isinstance(made, Failure):
        return run, failure
    try:
        with runs.within(_NAMING_S):
            symbols = {name: made.symbols.size(name, size) for name, size in sizes.items()}
            named = runs.run(source, made, form, symbols).failure
    except runs.TooLongError:
        return run, failure
    if named is None or not named.is_shape or named.trail.place != failure.trail.place:
        return run, failure
    return run._replace(failure=named), named


def _needs(
    source: Source, failure: Failure, generic: Mapping[str, int], other: Mapping[str, int]
) -> str:
    place = failure.trail.place
    line = f" (line {place.line})" if place is not None and place.file == source.shown else ""
    return f"runs at {_sizes(other)}, not at {_sizes(generic)}{line}: {failure.explanation.text}"


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _failed(
    source: Source,
    target: Target,
    run: Run,
    form: Form | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Executed:
    """A failed run as a finding; without a form the model could not be made."""
    failure = run.failure
    assert failure is not None
    op = failure.call.op if failure.call is not None else ""
    told = failure.explanation.text if form else f"cannot be made: {failure.explanation.text}"
    dims = tuple(dim.name for dim in form.dims) if form else ()
    if failure.refused:
        told = f"the shapes depend on values: {told}"
    place = failure.trail.place or Place(file=source.shown, line=target.line, end_line=target.line)
    finding = Finding(
        kind="shape" if failure.is_shape else "could-not-run",
        rule=(op or "python") if failure.is_shape else "could-not-run",
        message=f"{op}: {told}" if op and failure.is_shape else told,
        place=place,
        proved_by=("symbolic",),
        operands=failure.operands if failure.is_shape else (),
        path=failure.trail.path,
        entry=target.name,
        sizes=dict(sizes or {}) if failure.is_shape else {},
        within=failure.trail.within,
    )
    entry = _entry(
        target, "failed" if failure.is_shape else "not-run", dims=dims, operations=run.operations
    )
    return Executed(entry, finding, run.lines, frozenset(failure.trail.lines))


def _entry(
    target: Target,
    status: Any,
    *,
    dims: tuple[str, ...] = (),
    operations: int = 0,
    notes: tuple[str, ...] = (),
) -> CheckedEntry:
    return CheckedEntry(
        name=target.name,
        how=target.how,
        line=target.line,
        status=status,
        dims=dims,
        operations=operations,
        notes=notes,
    )
