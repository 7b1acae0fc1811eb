"""Graph breaks: where, why, how deep, what each costs, and whether nested graph breaks help.

What a break costs is measured: each compiled graph notes when it is entered and left, so the time
between leaving the graph that a break ended and entering the next is that break's: guards, resumed
functions, the statement itself, and whatever runs eagerly until then. What it costs in lost fusion
cannot be told break by break; eager, as it is, and nested, timed in turns in one session, show that for
the model as a whole.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

import torchstone
from torchstone import compat, recipe
from torchstone.capture.compiled import breaktext, outputs, state
from torchstone.capture.export import one_line
from torchstone.compat import dynamo as doors
from torchstone.records import Break, BreakStudy, Capturing
from torchstone.workload import Workload

__all__ = ["study_breaks"]

_ROUNDS = 30
_LEAST_ROUNDS = 5
_NOISE = 1.02
"""A way that is slower by no more than this is as fast."""
_RESUMED = "torch_dynamo_resume_in_"

_NOTHING = "Dynamo compiles nothing of this model: all of it runs eagerly."

Site = tuple[str, int]


class _Span(NamedTuple):
    site: Site | None
    """The break that ended the graph, as Dynamo names it: innermost file and line."""
    entered: float
    left: float


@dataclass
class _Way:
    """One way to compile, alive."""

    call: Callable[..., Any]
    counting: bool = True
    graphs: int = 0
    operations: int = 0
    backend_s: float = 0.0
    first_s: float = 0.0
    spans: list[_Span] = field(default_factory=list)
    events: list[doors.BreakEvent] = field(default_factory=list)
    failed: tuple[doors.Frame, ...] = ()
    steady: list[float] = field(default_factory=list)
    timelines: list[tuple[float, float, list[_Span]]] = field(default_factory=list)


def study_breaks(
    workload: Workload, module: nn.Module, *, backend: str = "inductor", seconds: float = 5.0
) -> BreakStudy:
    """Find and measure every graph break on the example's inputs.

    Runs in a worker, without gradients. The times of single graphs are the host's. Nested graph breaks
    (``torch._dynamo.config.nested_graph_breaks``) are tried where there is a break and torch has them.

    :param module: the workload's module.
    :param backend: the backend that is timed.
    :param seconds: time for the steady-state rounds, at least 5 of which are run.
    :returns: the study; one with ``refused`` where Dynamo cannot run the model at all.
    """
    args = workload.example()
    doors.reset()
    try:
        with tempfile.TemporaryDirectory(prefix="torchstone-") as folder, torch.no_grad():
            return _study(module, args, backend, (seconds, Path(folder)))
    except compat.capture_errors() as error:
        return _refused(backend, outputs.why_not(error, lambda: module(*_fresh(args))))
    finally:
        doors.reset()


def _study(
    module: nn.Module, args: tuple[Any, ...], backend: str, limits: tuple[float, Path]
) -> BreakStudy:
    seconds, folder = limits
    _warm_up(backend, folder / "warm-up")
    plain = _compile(module, args, (backend, folder / "plain"), nested=False)
    nested, failed = None, None
    if plain.events and doors.has_nested_breaks():
        doors.reset()  # functions that Dynamo gave up are not tried again otherwise
        try:
            nested = _compile(module, args, (backend, folder / "nested"), nested=True)
        except compat.capture_errors() as error:
            failed = one_line(error)
        plain.counting = False
        with compat.cache_in(folder / "plain"):
            plain.call(*_fresh(args))  # compiled again, so that both are there to be timed in turns
    ways = [plain] if nested is None else [plain, nested]
    eager = _time(module, ways, args, seconds)
    relative, agree = (None, False) if nested is None else _compare(module, plain, nested, args)
    better, why = _winner(plain, nested, agree)
    if failed is not None:
        why = f"With nested graph breaks it fails: {failed}"
    chosen = recipe.Recipe(recipe.Inductor(module=True, nested=better))
    nothing = plain.graphs == 0 and (nested is None or nested.graphs == 0)
    return BreakStudy(
        backend=backend,
        breaks=tuple(_breaks(plain, nested)),
        plain=_capturing(plain),
        nested=None if nested is None else _capturing(nested),
        eager_s=statistics.median(eager),
        relative=relative,
        recipe=str(recipe.baseline() if nothing else chosen),
        why=_NOTHING if nothing else why,
        refused=_NOTHING if nothing else None,
    )


def _refused(backend: str, why: str) -> BreakStudy:
    return BreakStudy(
        backend=backend,
        recipe=str(recipe.baseline()),
        why="There is nothing to choose between.",
        refused=why,
    )


def _warm_up(backend: str, cache: Path) -> None:
    """Compile something else first: the first compile of a process pays for imports and headers."""
    with compat.cache_in(cache):
        doors.compiled(lambda x: x + 1, doors.backend(backend))(torch.zeros(3))


def _compile(module: nn.Module, args: tuple[Any, ...], by: tuple[str, Path], *, nested: bool) -> _Way:
    """Compile by one call on copies of the inputs, with an empty cache.

    :param by: the backend, and where it keeps its cache.
    """
    backend, cache = by
    make = doors.backend(backend)

    def compile_graph(graph: torch.fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        site = doors.site_of(graph)
        started = time.perf_counter()
        made = make(graph, given)
        if way.counting:
            way.graphs += 1
            way.operations += sum(n.op.startswith("call") for n in graph.graph.nodes)
            way.backend_s += time.perf_counter() - started

        def run(*values: Any) -> Any:
            entered = time.perf_counter()
            result = made(*values)
            way.spans.append(_Span(site, entered, time.perf_counter()))
            return result

        return run

    way = _Way(doors.compiled(module, compile_graph))
    given = _fresh(args)
    with compat.cache_in(cache), doors.nested_breaks(nested), doors.watch_breaks() as events:
        doors.frames()
        started = time.perf_counter()
        way.call(*given)
        way.first_s = time.perf_counter() - started
    way.events = events
    way.failed = tuple(frame for frame in doors.frames() if frame.why is not None)
    return way


def _fresh(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def _time(module: nn.Module, ways: list[_Way], args: tuple[Any, ...], seconds: float) -> list[float]:
    """Seconds of calls in turns: eager, and each way; a way's graphs are noted on the way."""
    eager: list[float] = []
    end = time.perf_counter() + seconds
    for round_ in range(_ROUNDS + 2):
        if round_ >= _LEAST_ROUNDS + 2 and time.perf_counter() > end:
            break
        given = _fresh(args)
        started = time.perf_counter()
        module(*given)
        elapsed = _finished(given) - started
        if round_ >= 2:  # the first two warm up
            eager.append(elapsed)
        for way in ways if round_ % 2 else reversed(ways):
            given = _fresh(args)
            way.spans.clear()
            started = time.perf_counter()
            way.call(*given)
            ended = _finished(given)
            if round_ >= 2:
                way.steady.append(ended - started)
                way.timelines.append((started, ended, list(way.spans)))
    return eager


def _finished(args: tuple[Any, ...]) -> float:
    """The time once the accelerator, where the inputs lie on one, has done what was asked of it."""
    if any(isinstance(a, torch.Tensor) and a.is_cuda for a in args):
        torch.cuda.synchronize()
    return time.perf_counter()


def _compare(
    module: nn.Module, plain: _Way, nested: _Way, args: tuple[Any, ...]
) -> tuple[float | None, bool]:
    """Largest relative error of nested against as it is, from the same state; whether they agree."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    _seed()
    first = _pytree.tree_leaves(plain.call(*_fresh(args)))
    first = [x.clone() if isinstance(x, torch.Tensor) else x for x in first]
    module.load_state_dict(before)
    _seed()
    error = outputs.relative_error(_pytree.tree_leaves(nested.call(*_fresh(args))), first)
    return error, outputs.agrees(error, first)


def _seed() -> None:
    """Draw alike in both, whatever they draw with."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _winner(plain: _Way, nested: _Way | None, agree: bool) -> tuple[bool, str]:
    if not plain.events:
        return False, "There is no graph break."
    if nested is None:
        return False, "This torch has no nested graph breaks."
    if not agree:
        return False, "Its outputs with nested graph breaks are not those without."
    entered, entered_nested = _entered(plain), _entered(nested)
    ratio = statistics.median(nested.steady) / statistics.median(plain.steady)
    if entered_nested >= entered:
        return False, f"Nested, a call enters {entered_nested} graphs, and {entered} as it is."
    saves = f"Nested, a call enters {entered_nested} graphs, not {entered}"
    if ratio > _NOISE:
        return False, f"{saves}, but is slower."
    return True, f"{saves}, is not slower, and gives the same outputs."


def _entered(way: _Way) -> int:
    return len(way.timelines[-1][2])


def _capturing(way: _Way) -> Capturing:
    outside = [
        end - start - sum(s.left - s.entered for s in spans) for start, end, spans in way.timelines
    ]
    return Capturing(
        graphs=way.graphs,
        operations=way.operations,
        entered=_entered(way),
        breaks=len(way.events),
        eager_functions=tuple(dict.fromkeys(map(_named, filter(_of_user, way.failed)))),
        capture_s=way.first_s - way.backend_s,
        compile_s=way.backend_s,
        steady_s=statistics.median(way.steady),
        outside_s=statistics.median(outside),
    )


def _of_user(frame: doors.Frame) -> bool:
    return state.is_users(frame.file)


def _named(frame: doors.Frame) -> str:
    return f"{frame.file}:{frame.line} in {_plain_name(frame.function)}"


class _Place(NamedTuple):
    file: str
    line: int
    text: str
    function: str
    path: tuple[tuple[str, int, str], ...]
    """File, line and function of the user's frames, from the module's ``forward`` on."""


def _breaks(plain: _Way, nested: _Way | None) -> Iterator[Break]:
    """One record for each place; the first event of a place has the whole way to it."""
    first = _first(plain)
    costs, nested_costs = _costs(plain), {} if nested is None else _costs(nested)
    for site, (place, event) in first.items():
        words = breaktext.told(event.kind, event.text, place.text)
        inner = _innermost(plain, site)
        yield Break(
            file=place.file,
            line=place.line,
            text=place.text,
            function=place.function,
            kind=words.kind,
            reason=words.reason,
            raw=words.raw,
            edit=words.edit,
            depth=len(place.path) - 1,
            path=tuple(f"{file}:{line} in {name}" for file, line, name in place.path),
            times=_times(plain, site),
            nested_times=None if nested is None else _times(nested, site),
            outside_s=_sum(costs, inner),
            nested_outside_s=_sum(nested_costs, inner),
            limits=breaktext.limits(place.path),
        )


def _first(way: _Way) -> dict[Site, tuple[_Place, doors.BreakEvent]]:
    """The first event of each place, without those that only follow from a break further in.

    Where Dynamo cannot resume in a function, giving it up is told once more, at the call in it.
    """
    found: dict[Site, tuple[_Place, doors.BreakEvent]] = {}
    for event in way.events:
        place = _place(event)
        outer = {frame[:2] for known, _ in found.values() for frame in known.path[:-1]}
        follows = (place.file, place.line) in outer
        if not (follows and breaktext.told(event.kind, event.text, place.text).kind == "OTHER"):
            found.setdefault((place.file, place.line), (place, event))
    return found


def _times(way: _Way, site: Site) -> int:
    return sum((place.file, place.line) == site for place in map(_place, way.events))


def _innermost(way: _Way, site: Site) -> set[Site]:
    """The innermost lines, which may be torch's, of the events at one of the user's lines."""
    found = {site}
    for event in way.events:
        place = _place(event)
        if (place.file, place.line) == site and event.stack:
            found.add((event.stack[-1].filename, event.stack[-1].lineno or 0))
    return found


def _sum(costs: dict[Site, float], sites: set[Site]) -> float | None:
    known = [costs[site] for site in sites if site in costs]
    return sum(known) if known else None


def _costs(way: _Way) -> dict[Site, float]:
    """Median seconds a call after graphs that each break ended, until the next is entered."""
    calls: dict[Site, list[float]] = {}
    for position, (_, ended, spans) in enumerate(way.timelines):
        entries = [span.entered for span in spans]
        for span, after in zip(spans, [*entries[1:], ended], strict=False):  # no graph: no pair
            if span.site is not None:
                gaps = calls.setdefault(span.site, [0.0] * len(way.timelines))
                gaps[position] += after - span.left
    return {site: statistics.median(gaps) for site, gaps in calls.items()}


def _place(event: doors.BreakEvent) -> _Place:
    """Where in the user's code it is: the frames below the compiled call, without those of torch."""
    own = str(Path(torchstone.__file__).parent)
    last = max((i for i, f in enumerate(event.stack) if f.filename.startswith(own)), default=-1)
    path: list[tuple[str, int, str]] = []
    text = ""
    for frame in event.stack[last + 1 :]:
        if not state.is_users(frame.filename):
            continue
        name = _plain_name(frame.name)
        # the rest of a function runs below the function itself
        if name != frame.name and path and (path[-1][0], path[-1][2]) == (frame.filename, name):
            path.pop()
        path.append((frame.filename, frame.lineno or 0, name))
        text = (frame.line or "").strip()
    if not path:  # the model is one of torch's own
        frame = event.stack[-1]
        path, text = [(frame.filename, frame.lineno or 0, frame.name)], (frame.line or "").strip()
    file, line, function = path[-1]
    return _Place(file, line, text, function, tuple(path))


def _plain_name(name: str) -> str:
    """The function's own name, also for what Dynamo resumes it by."""
    return name.removeprefix(_RESUMED).rpartition("_at_")[0] if name.startswith(_RESUMED) else name
