"""Recompiles over the recorded traffic: how many, which guard failed, why, and what helps.

The traffic is replayed in its order through ``torch.compile`` as users call it, so sizes become symbolic
at the second size that is seen, as in production. Each recompile is explained by the guard that failed
(:mod:`torchstone.capture.compiled.guards`); recompiles of one cause on one thing are a storm; fixes that
need no edit of the model are tried on the same replay.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator
from types import CodeType
from typing import Any

import msgspec
import torch
from torch import nn

from torchstone import compat
from torchstone.capture.compiled import guards, outputs
from torchstone.capture.compiled.replay import Event, Replay, Replayed, Way, named_axes, plan
from torchstone.capture.export import one_line
from torchstone.compat import dynamo as doors
from torchstone.compat import shapes
from torchstone.records import Recompile, RecompileStudy, ScalarSpec, Storm, TensorSpec, Tried
from torchstone.workload import Workload

__all__ = ["study_recompiles"]

_OF_SIZES = ("FIRST_SIZE", "ZERO_ONE", "SIZE_SPECIALIZED", "SIZE_BRANCH", "SIZES_RELATED", "LAYOUT")


def study_recompiles(
    workload: Workload, module: nn.Module, calls: int = 64, *, trials_s: float = 60.0
) -> RecompileStudy:
    """Replay the recorded traffic through ``torch.compile`` and explain every recompile.

    Runs in a worker. Where the workload changes its module's state between calls, so does the replay.

    :param module: the workload's module; its state may be another one afterwards.
    :param calls: most calls to replay.
    :param trials_s: time for trying fixes, seconds; none is begun later.
    :returns: the study; one with ``refused`` where Dynamo cannot run the model.
    """
    replay = Replay(workload, module, plan(workload, calls))
    limit, allowed = compat.recompile_limit(), workload.policy.max_recompiles
    before = outputs.copied(module) if workload.spec().perturbs else None
    try:
        found = replay.run(Way())
    except compat.capture_errors() as error:
        study = RecompileStudy(calls=len(replay.cases), graphs=0, compiles=0, limit=limit)
        example = workload.example()
        refused = outputs.why_not(error, lambda: module(*example))
        return msgspec.structs.replace(study, allowed=allowed, refused=refused)
    recompiles = tuple(_explained(replay, found))
    return RecompileStudy(
        calls=len(replay.cases),
        graphs=found.graphs,
        compiles=found.compiles,
        recompiles=recompiles,
        storms=_storms(recompiles),
        limit=limit,
        limited=tuple(dict.fromkeys(r.function for r in recompiles if r.at_limit)),
        eager_calls=_eager_calls(found),
        allowed=allowed,
        exceeds=allowed is not None and found.graphs > allowed,
        tried=tuple(_trials(replay, before, recompiles, trials_s)),
    )


def _explained(replay: Replay, found: Replayed) -> Iterator[Recompile]:
    seen: dict[Any, list[float]] = {}
    position = 0
    for event in found.events:
        while position < event.call:
            _remember(replay, position, seen)
            position += 1
        failure, others = guards.principal(
            [f.reason for f in event.failed], _context(replay, event, seen)
        )
        code = event.failed[0].code
        yield Recompile(
            call=event.call,
            function=f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}",
            failure=failure,
            others=others,
            at_limit=event.at_limit,
        )


def _remember(replay: Replay, position: int, seen: dict[Any, list[float]]) -> None:
    """Add the sizes and numbers of a call to those seen."""
    for name, value in _now(replay, position).items():
        pairs = (
            [((name, i), n) for i, n in enumerate(value)]
            if isinstance(value, tuple)
            else [(name, value)]
        )
        for key, number in pairs:
            known = seen.setdefault(key, [])
            if number not in known:
                known.append(number)


def _now(replay: Replay, position: int) -> dict[str, Any]:
    given = replay.arguments(position)
    return {
        spec.name: tuple(value.shape) if isinstance(value, torch.Tensor) else value
        for spec, value in zip(replay.spec.inputs, given, strict=True)
    }


def _context(replay: Replay, event: Event, seen: dict[Any, list[float]]) -> guards.Context:
    code = event.failed[0].code
    own = code in _codes_of(type(replay.target).forward) or "/_dynamo/" in code.co_filename
    return guards.Context(
        # a helper's x need not be the model's
        inputs={spec.name: spec for spec in replay.spec.inputs} if own else {},
        now=_now(replay, event.call),
        seen=seen,
        parameters=code.co_varnames[: code.co_argcount + code.co_kwonlyargcount],
        free=code.co_freevars,
        function=code.co_name,
        file=code.co_filename,
        resolve=lambda name: doors.resolve(code, name),
    )


def _codes_of(function: Any) -> Iterator[CodeType]:
    """The code of a function and of those that its decorators wrap."""
    while function is not None:
        if (code := getattr(function, "__code__", None)) is not None:
            yield code
        function = getattr(function, "__wrapped__", None)


def _storms(recompiles: tuple[Recompile, ...]) -> tuple[Storm, ...]:
    groups: dict[tuple[str, str], list[Recompile]] = {}
    for recompile in recompiles:
        key = (recompile.failure.cause, recompile.failure.guarded)
        groups.setdefault(key, []).append(recompile)
    storms = [
        Storm(
            cause=group[0].failure.cause,
            guarded=group[0].failure.guarded,
            count=len(group),
            calls=tuple(r.call for r in group),
            sentence=group[0].failure.sentence,
            fix=group[0].failure.fix,
            code=group[0].failure.code,
        )
        for group in groups.values()
    ]
    return tuple(sorted(storms, key=lambda storm: -storm.count))


def _eager_calls(found: Replayed) -> tuple[int, ...]:
    """Calls, from the one that hit the limit on, in which no graph of the limited function ran."""
    hit: dict[int | None, int] = {}
    for event in found.events:
        if event.at_limit:
            hit.setdefault(event.frame, event.call)
    return tuple(
        call
        for call, ran in enumerate(found.ran)
        if any(call >= first and frame not in ran for frame, first in hit.items())
    )


def _trials(
    replay: Replay, before: nn.Module | None, recompiles: tuple[Recompile, ...], seconds: float
) -> Iterator[Tried]:
    causes = {recompile.failure.cause for recompile in recompiles}
    marked = next(_marked(replay), None)
    fixes: list[tuple[str, str, Way]] = []
    if causes & {*_OF_SIZES} and marked is not None:
        name, axis, low = marked
        bound = f"min={low}"
        door = "torch._dynamo"
        fixes = [
            ("mark_dynamic", f"{door}.mark_dynamic({name}, {axis})", Way(marks="dynamic")),
            ("dynamic=True", "torch.compile(model, dynamic=True)", Way(dynamic=True)),
        ]
        if shapes.bounds_unavailable() is None:
            code = f"{door}.decorators.mark_unbacked({name}, {axis}, {bound})"
            fixes.insert(1, (f"mark_unbacked({bound})", code, Way(marks="unbacked")))
    if "MODULE_ATTRIBUTE" in causes:
        option = "allow_unspec_int_on_nn_module"
        fixes.append((option, f"torch._dynamo.config.{option} = True", Way(config={option: True})))
    end = time.monotonic() + seconds
    for name, code, way in fixes:
        if time.monotonic() < end:
            yield _tried(replay, before, name, code, way)


def _marked(replay: Replay) -> Iterator[tuple[str, int, int]]:
    """Axes that are marked in a trial: the input, the axis, its smallest size (at least 1)."""
    ranges = {d.name: d for d in replay.spec.dims if d.high > d.low}
    for spec in replay.spec.inputs:
        if isinstance(spec, ScalarSpec):
            continue
        assert isinstance(spec, TensorSpec)
        for axis, (factor, dim) in named_axes(spec).items():
            if dim in ranges:
                yield spec.name, axis, max(1, factor * ranges[dim].low)


def _tried(replay: Replay, before: nn.Module | None, name: str, code: str, way: Way) -> Tried:
    module = replay.module if before is None else outputs.copied(before)
    again = Replay(replay.workload, module, replay.cases)
    try:
        found = again.run(dataclasses.replace(way, backend="eager", compare=True))
    except compat.capture_errors() as error:
        return Tried(name=name, code=code, graphs=None, failed=_why(error))
    return Tried(name=name, code=code, graphs=found.graphs, agrees=found.wrong is None)


def _why(error: Exception) -> str:
    """The error's own reason, in one line, with the user's line where it tells one."""
    reasons = re.findall(r"^\s+- (.+)$", str(error), flags=re.MULTILINE)
    places = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    where = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
    return f"{type(error).__name__}: {reasons[0]}{where}" if reasons else f"{one_line(error)}{where}"
