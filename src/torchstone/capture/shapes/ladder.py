"""Which way of compiling for dynamic sizes holds: unbacked from 1, from 2, backed, or left to torch.

Unbacked sizes are unknown to the compiler, so one graph serves all, and what the code asks of them is an
error instead of a recompile. From 2, sizes 0 and 1, which broadcast and are contiguous in ways of their
own, get graphs of their own. Backed sizes (``mark_dynamic``) do the same and may guard on what the code
asks. Left alone, torch compiles the first size, then what changed, then 0 and 1.

Which one holds cannot be read from the model: it is tried, on sizes of the declared ranges, against
eager. The dims that a refusal names go one rung down; the others stay.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import nn

from torchstone import compat
from torchstone.capture.shapes import sweep
from torchstone.capture.shapes.refusals import explain
from torchstone.capture.shapes.sweep import TOLERANCE, Bench, Sizes, difference
from torchstone.compat import shapes
from torchstone.records import (
    Attempt,
    Dim,
    LadderStudy,
    Rung,
    TensorSpec,
    Trial,
    WorkloadSpec,
    factor_and_dim,
)
from torchstone.verify import tensors
from torchstone.workload import Workload

__all__ = ["climb", "code_for"]

_LADDER: tuple[Rung, ...] = ("unbacked", "unbacked-2", "backed", "automatic")
_GRAPHS = 64
"""Graphs a function may have here: each way is counted to its end."""
_CASES = 16
_ROUNDS = 9

Rungs = dict[str, Rung]


def climb(
    workload: Workload, module: nn.Module, *, backend: str = "inductor", limit_s: float = 120.0
) -> LadderStudy:
    """Find the highest rung of each dim that compiles, answers as eager does, and needs no guard.

    :param backend: of ``torch.compile``; ``eager`` finds out about guards in a fraction of the time.
    :param limit_s: seconds after which nothing further is begun; what is left out is listed.
    """
    started = time.perf_counter()
    bench = Bench.of(workload)
    study = _Study(bench, module, backend, deadline=started + limit_s)
    with _afresh(backend):
        study.cases = list(_cases(study))
        chosen = _descend(study) if study.dims else None
        path = len(study.tried)
        for rung in _LADDER[2:]:
            _once(study, dict.fromkeys((d.name for d in study.dims), rung))
        if chosen is not None:
            with sweep.kept(module):
                _time(study)
    attempts = [tried.attempt for tried in study.tried]
    left = [a.graphs for a in attempts if set(a.rungs.values()) == {"automatic"} and a.trials]
    return LadderStudy(
        backend=backend,
        chosen={} if chosen is None else chosen,
        why=_why(study, study.tried[:path], chosen),
        code="" if chosen is None else code_for(study.spec, chosen),
        attempts=tuple(attempts),
        graphs_without=left[0] if left else None,
        seconds=time.perf_counter() - started,
        not_tried=tuple(study.not_tried),
    )


@dataclass(frozen=True)
class _Case:
    """Sizes, inputs of them, and what the model answers."""

    sizes: Sizes
    args: tuple[Any, ...]
    expected: list[Any]


@dataclass(frozen=True)
class _Tried:
    """An attempt and what it compiled."""

    attempt: Attempt
    call: Callable[..., Any] | None

    @property
    def holds(self) -> bool:
        a = self.attempt
        return bool(a.trials) and a.failed is None and a.wrong is None and a.unavailable is None


@dataclass
class _Study(sweep.Inquiry):
    """What is known so far."""

    bench: Bench
    module: nn.Module
    backend: str
    deadline: float
    cases: list[_Case] = field(default_factory=list)
    tried: list[_Tried] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)


@contextlib.contextmanager
def _afresh(backend: str) -> Iterator[None]:
    """Compile from nothing.

    A warm cache makes every rung look free, and it hides refusals: what Inductor took for granted about
    a size is checked when the graph is made, not when it comes from the cache. Multi-head attention with
    an unbacked batch from 1 is refused at first, and wrong by 0.9 in the next process (torch 2.13).
    """
    with shapes.recompiling(_GRAPHS), contextlib.ExitStack() as stack:
        if backend == "inductor":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(compat.cache_in(Path(folder)))
        yield


# --- trying ---------------------------------------------------------------------------------------


def _cases(study: _Study) -> Iterator[_Case]:
    """The sizes that every rung is tried on, those that the model itself takes."""
    base = sweep.settled(study.bench, study.module)
    lowest = {d.name: d.low for d in study.spec.dims}
    highest = {d.name: d.high for d in study.spec.dims}
    ordered = [base, lowest, *sweep.sweep(study.spec, base)][:_CASES]
    ordered += [highest, *(arrival.sizes for arrival in study.spec.traffic[:4])]
    seen: list[Sizes] = []
    for sizes in ordered:
        if sizes in seen or study.late(f"sizes {sizes}"):
            continue
        seen.append(sizes)
        args = study.bench.inputs(sizes)
        ran = study.bench.run(study.module, args)
        if ran.leaves is None:
            study.not_tried.append(f"sizes {sizes}: the model itself raises")
        else:
            yield _Case(sizes, args, ran.leaves)


def _descend(study: _Study) -> Rungs | None:
    """Down from the top, until it holds; None where nothing does."""
    why = shapes.bounds_unavailable()
    top = 0 if why is None else _LADDER.index("backed")
    for rung in _LADDER[:top]:
        rungs = dict.fromkeys((d.name for d in study.dims), rung)
        study.tried.append(_Tried(Attempt(rungs=rungs, unavailable=why), None))
    levels = {d.name: top for d in study.dims}
    while True:
        rungs = {name: _LADDER[level] for name, level in levels.items()}
        tried = _once(study, rungs)
        if tried is None:
            return None
        if tried.holds:
            return rungs
        lower = _lower(levels, tried.attempt)
        if not lower:
            return None
        levels = {name: level + (name in lower) for name, level in levels.items()}


def _lower(levels: dict[str, int], attempt: Attempt) -> set[str]:
    """The dims that go down: those that the refusal names, else all that are on the highest rung."""
    axes = () if attempt.failed is None else attempt.failed.axes
    named = {factor_and_dim(axis.dim)[1] for axis in axes if axis.dim is not None}
    bottom = len(_LADDER) - 1
    able = {name for name, level in levels.items() if level < bottom}
    highest = min((levels[name] for name in able), default=bottom)
    return (named & able) or {name for name in able if levels[name] == highest}


def _once(study: _Study, rungs: Rungs) -> _Tried | None:
    """Try these rungs, unless they were tried before; None where the time is over."""
    known = next((t for t in study.tried if t.attempt.rungs == rungs), None)
    if known is not None or not rungs:
        return known
    if study.late(f"rungs {rungs}"):
        return None
    tried = _attempt(study, rungs)
    study.tried.append(tried)
    return tried


def _attempt(study: _Study, rungs: Rungs) -> _Tried:
    call = _entry(study, len(study.tried))
    trials: list[Trial] = []
    attempt = Attempt(rungs=rungs)
    with shapes.watch() as seen:
        for case in study.cases:
            if study.late(f"sizes {case.sizes} on rungs {rungs}"):
                break
            before, started = compat.graphs_compiled(), time.perf_counter()
            ran = study.bench.run(
                call, case.args, prepare=_marker(study.spec, rungs), owner=study.module
            )
            seconds, graphs = time.perf_counter() - started, compat.graphs_compiled() - before
            if ran.leaves is None:
                assert ran.error is not None  # the other half of what a run gives
                attempt = structs.replace(attempt, failed=explain(ran.error, study.spec, seen))
                break
            apart = difference(case.expected, ran.leaves)
            relative = apart if math.isfinite(apart) else None
            trials.append(Trial(sizes=case.sizes, relative=relative, graphs=graphs, seconds=seconds))
            if apart > TOLERANCE:
                attempt = structs.replace(attempt, wrong=case.sizes)
                break
    compiling = [t.seconds for t in trials if t.graphs]
    done = structs.replace(
        attempt,
        trials=tuple(trials),
        graphs=sum(t.graphs for t in trials),
        compile_s=sum(compiling),
    )
    return _Tried(done, call)


def _entry(study: _Study, number: int) -> Callable[..., Any]:
    """The module compiled, with graphs that no other entry shares: torch keeps them by code object."""
    module = study.module

    def call(*args: Any) -> Any:
        return module(*args)

    call.__code__ = call.__code__.replace(co_name=f"rung_{number}")
    compiled: Callable[..., Any] = torch.compile(call, backend=study.backend, fullgraph=True)
    return compiled


def _marker(spec: WorkloadSpec, rungs: Rungs) -> Callable[[tuple[Any, ...]], None]:
    """A function that marks the sizes of inputs as their rungs say."""

    def mark(args: tuple[Any, ...]) -> None:
        for position, axis, label, dim in _places(spec, rungs):
            factor, rung = factor_and_dim(label)[0], rungs[dim.name]
            least, tensor = _least(rung), args[position]
            low, high = max(factor * dim.low, least), factor * dim.high
            if rung == "automatic" or tensor.shape[axis] < least:
                continue  # not marked, a size of 0 or 1 has a graph of its own
            if rung == "backed":
                shapes.mark_backed(tensor, axis, low, high)
            else:
                shapes.mark_unbacked(tensor, axis, low, high, label if _repeated(spec, label) else None)

    return mark


def _least(rung: Rung) -> int:
    """The smallest size that is marked."""
    return 1 if rung == "unbacked" else 2


def _places(spec: WorkloadSpec, rungs: Rungs) -> Iterator[tuple[int, int, str, Dim]]:
    """Every dynamic axis: input's position, axis, the size as written, and its dim."""
    dims = {dim.name: dim for dim in spec.dims if dim.name in rungs}
    for position, given in enumerate(spec.inputs):
        for axis, size in enumerate(given.shape if isinstance(given, TensorSpec) else ()):
            if isinstance(size, str) and factor_and_dim(size)[1] in dims:
                yield position, axis, size, dims[factor_and_dim(size)[1]]


def _repeated(spec: WorkloadSpec, label: str) -> bool:
    """Whether several axes have this size, which unbacked they would not be known to."""
    return sum(given.shape.count(label) for given in spec.inputs if isinstance(given, TensorSpec)) > 1


# --- timing ---------------------------------------------------------------------------------------


def _time(study: _Study) -> None:
    """Steady-state times of the rungs that hold, in turns on the same inputs."""
    running = [t for t in study.tried if t.holds and t.call is not None]
    cases = [study.cases[0], study.cases[-1]] if len(study.cases) > 1 else study.cases
    seconds: dict[int, dict[str, list[float]]] = {id(t): {} for t in running}
    for case in cases:
        label = " ".join(f"{name}={size}" for name, size in case.sizes.items())
        given = {}
        for tried in running:
            args = tensors.copies(case.args)
            _marker(study.spec, tried.attempt.rungs)(args)
            given[id(tried)] = args
        for number in range(_ROUNDS + 1):  # the first warms up
            if study.late(f"timing {label}, round {number}"):
                break
            for tried in running:
                spent = _timed(tried, given[id(tried)])
                if number:
                    seconds[id(tried)].setdefault(label, []).append(spent)
    medians = {k: {name: statistics.median(v) for name, v in s.items()} for k, s in seconds.items()}
    backed = next((medians[id(t)] for t in running if set(t.attempt.rungs.values()) == {"backed"}), {})
    for tried in running:
        mine = medians[id(tried)]
        ratios = [math.log(mine[name] / backed[name]) for name in mine if name in backed]
        ratio = math.exp(sum(ratios) / len(ratios)) if ratios else None
        done = structs.replace(tried.attempt, median_s=mine, against_backed=ratio)
        study.tried[study.tried.index(tried)] = replace(tried, attempt=done)


def _timed(tried: _Tried, args: tuple[Any, ...]) -> float:
    assert tried.call is not None  # only what compiled is timed
    with torch.no_grad():
        started = time.perf_counter()
        tried.call(*args)
        return time.perf_counter() - started


# --- words ----------------------------------------------------------------------------------------

_WORDS: dict[Rung, str] = {
    "unbacked": "unbacked from 1",
    "unbacked-2": "unbacked from 2, with graphs of their own for sizes 0 and 1",
    "backed": "backed (mark_dynamic)",
    "automatic": "left to torch",
}


def _why(study: _Study, path: list[_Tried], chosen: Rungs | None) -> str:
    if not study.dims:
        return "No dim has more than one size: one graph is enough."
    fallen = [_fell(t.attempt) for t in path if not t.holds]
    if chosen is None:
        return " ".join(["No rung holds.", *fallen])
    ways = dict.fromkeys(chosen.values())
    said = "; ".join(
        f"{', '.join(n for n, r in chosen.items() if r == rung)} {_WORDS[rung]}" for rung in ways
    )
    graphs = next(t.attempt.graphs for t in study.tried if t.attempt.rungs == chosen)
    count = f"{graphs} graph{'s' if graphs != 1 else ''} for {len(study.cases)} combinations of sizes"
    return " ".join([f"{said}: {count}.", *fallen])


def _fell(attempt: Attempt) -> str:
    rungs = ", ".join(f"{name} {rung}" for name, rung in attempt.rungs.items())
    if attempt.unavailable is not None:
        return f"{rungs}: not to be had, {attempt.unavailable}."
    if attempt.wrong is not None:
        sizes = ", ".join(f"{name} = {size}" for name, size in attempt.wrong.items())
        return f"{rungs} fell: the answer is not eager's at {sizes}."
    if attempt.failed is None:
        return f"{rungs}: not tried."
    where = attempt.failed.where
    line = "" if where is None else f" ({Path(where.file).name}:{where.line} {where.text})"
    return f"{rungs} fell: {attempt.failed.text}{line}."


def code_for(spec: WorkloadSpec, rungs: Rungs) -> str:
    """The code of these rungs: a function that marks its inputs and calls the compiled model."""
    names = ", ".join(given.name for given in spec.inputs)
    lines = []
    for position, axis, label, dim in _places(spec, rungs):
        rung, name = rungs[dim.name], spec.inputs[position].name
        factor, least = factor_and_dim(label)[0], _least(rung)
        if rung == "automatic":
            continue
        options = f"min={max(factor * dim.low, least)}, max={factor * dim.high}"
        if rung != "backed" and _repeated(spec, label):
            options += f", shape_id={label!r}"
        mark = "torch._dynamo.mark_dynamic" if rung == "backed" else "mark_unbacked"
        smaller = factor * dim.low < least
        guard = f"    if {name}.shape[{axis}] >= {least}:\n    " if smaller else ""
        lines.append(f"{guard}    {mark}({name}, {axis}, {options})")
    if not lines:
        return "compiled = torch.compile(model)"
    head = (
        ["from torch._dynamo.decorators import mark_unbacked\n"] if "mark_unb" in "".join(lines) else []
    )
    body = [f"def call({names}):", *lines, f"    return compiled({names})"]
    # without fullgraph, a question that an unbacked size cannot answer is a silent graph break
    return "\n".join([*head, "compiled = torch.compile(model, fullgraph=True)\n\n", *body])
