"""Jobs that build and load candidates, run in a worker.

Both leave ``state["call"]`` (positional inputs to the flat tuple of outputs) and ``state["module"]``
(the user's module, where the candidate runs it; else None).
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

from torchstone import backends, compat, recipe
from torchstone.backends import rewriting
from torchstone.backends.base import Built, Context
from torchstone.records import Arrival, Build, Case, Unsupported
from torchstone.verify import inputs
from torchstone.worker import workload_of
from torchstone.workload import Workload

__all__ = ["build", "load"]

_REPLAYED = 32


def build(
    state: dict[str, Any], recipe: str, program: str | None, directory: str
) -> Build | Unsupported:
    """Build a candidate, call it once on the example, and replay the traffic's shapes if it is lazy."""
    return _make(state, _context(state, recipe, program, directory), fresh=True)


def load(state: dict[str, Any], recipe: str, program: str | None, directory: str) -> Build | Unsupported:
    """Have a candidate again from the files that :func:`build` left; no measurement."""
    return _make(state, _context(state, recipe, program, directory), fresh=False)


def _context(state: dict[str, Any], text: str, program: str | None, directory: str) -> Context:
    return Context(
        workload=workload_of(state),
        recipe=recipe.parse(text),
        program=None if program is None else Path(program),
        directory=Path(directory),
    )


def _make(state: dict[str, Any], context: Context, *, fresh: bool) -> Build | Unsupported:
    backend = backends.of(context.recipe)
    context.directory.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    given = rewriting.built(context) if fresh else (rewriting.loaded(context), None)
    if isinstance(given, Unsupported):
        return given
    built = backend.build(given[0]) if fresh else backend.load(given[0])
    seconds = time.perf_counter() - started
    if isinstance(built, Unsupported):
        return built
    built = backends.recorded(context.recipe, built)
    files = tuple(sorted({*built.files, *rewriting.files(context)}))
    workload = workload_of(state)
    state["call"], state["module"] = built.call, built.module
    example = workload.example()
    started = time.perf_counter()
    built.call(*example)
    first_call_s = time.perf_counter() - started
    recompiles, limit = _replay(workload, built) if fresh else (None, ())
    return Build(
        recipe=str(context.recipe),
        seconds=seconds,
        first_call_s=first_call_s,
        peak_memory_bytes=_peak_memory_bytes(),
        artifact=str(context.directory) if files else None,
        files=files,
        recompiles=recompiles,
        notes=(*built.notes, *limit),
        rewrites=given[1],
    )


def _replay(workload: Workload, built: Built) -> tuple[int | None, tuple[str, ...]]:
    """Graphs compiled once every recorded shape was seen, and a note if a shape is left to eager."""
    if not callable(built.graphs):
        return built.graphs, ()
    for arrival in _shapes(workload.spec().traffic):
        case = Case(name="replay", kind="traffic", sizes=arrival.sizes, scalars=arrival.scalars)
        built.call(*inputs.materialize(workload, case))
    count = built.graphs()
    if count < compat.recompile_limit():
        return count, ()
    return count, (f"{count} graphs: at torch's recompile limit, further shapes run eagerly",)


def _shapes(traffic: tuple[Arrival, ...]) -> list[Arrival]:
    """Distinct recorded shapes in the order that they came; spread evenly if there are many."""
    seen = {(*sorted(a.sizes.items()), *sorted(a.scalars.items())): a for a in reversed(traffic)}
    ordered = list(reversed(seen.values()))
    step = -(-len(ordered) // _REPLAYED)
    return ordered[::step] if step > 1 else ordered


def _peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
