"""Replays recorded traffic through ``torch.compile`` and keeps what it compiled, and why.

The backend is ``aot_eager``: it makes the guards that Inductor makes, those on numbers that become part
of the code included, and compiles in milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from torchstone import compat
from torchstone.capture.compiled import outputs
from torchstone.compat import dynamo as doors
from torchstone.records import Case, ScalarSpec, TensorSpec, WorkloadSpec, factor_and_dim
from torchstone.verify import tensors
from torchstone.workload import Workload
from torchstone.workload.keyword import KeywordModule, unwrap

__all__ = ["Event", "Replay", "Replayed", "Way", "mark_named", "named_axes", "plan"]

_FRAME = re.compile(r"^\[?(\d+)/")
_AT_LEAST = 4
"""Calls of a workload that changes its module's state between calls: a change shows at the second."""


@dataclass(frozen=True)
class Way:
    """How to compile for a replay."""

    backend: str = "aot_eager"
    """The backend."""
    dynamic: bool | None = None
    """``torch.compile``'s ``dynamic``."""
    marks: str | None = None
    """``dynamic`` or ``unbacked``: every named axis is marked so before each call."""
    config: dict[str, Any] = field(default_factory=dict)
    """Changes to Dynamo's configuration."""
    compare: bool = False
    """Compare each call with eager."""


@dataclass(frozen=True)
class Event:
    """A function for which no compiled version held."""

    call: int
    """Position of the call."""
    frame: int | None
    """The function, as Dynamo numbers them."""
    failed: tuple[doors.Failed, ...]
    """The failed guard of each version, newest first."""
    at_limit: bool
    """Whether torch's limit kept it from being compiled."""


@dataclass
class Replayed:
    """What a replay showed."""

    graphs: int = 0
    """Graphs compiled."""
    compiles: int = 0
    """Functions compiled, again or for the first time."""
    events: list[Event] = field(default_factory=list)
    """Each recompile."""
    ran: list[frozenset[int | None]] = field(default_factory=list)
    """For each call, the functions whose graphs ran."""
    errors: dict[int, float | None] = field(default_factory=dict)
    """Calls that could be compared with eager, and their relative error."""
    wrong: int | None = None
    """The first call that does not agree with eager."""


class Replay:
    """Runs the planned calls through one way of compiling, from an empty cache."""

    def __init__(self, workload: Workload, module: nn.Module, cases: tuple[Case, ...]) -> None:
        self.workload = workload
        self.module = module
        self.cases = cases
        self.spec = workload.spec()
        self._source = tensors.Source(self.spec, workload.example())

    @property
    def target(self) -> nn.Module:
        """The user's own module, whose argument names the guards use."""
        return unwrap(self.module)

    def arguments(self, position: int) -> tuple[Any, ...]:
        """Inputs of a call: the same each time."""
        return tensors.make(self.workload, self._source, self.cases[position])

    def calling(self, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """Call the user's module, or a compiled form of it."""
        if isinstance(self.module, KeywordModule):
            return function(**dict(zip(self.module.names, given, strict=True)))
        return function(*given)

    def run(self, way: Way, only: int | None = None) -> Replayed:
        """Replay every call, or one in the state that it comes in, from an empty compile cache.

        :raises Exception: what Dynamo or the model raises, of :func:`torchstone.compat.capture_errors`.
        """
        found = Replayed()
        doors.reset()
        try:
            with doors.config(**way.config), torch.no_grad():
                self._run(way, only, found)
        finally:
            doors.reset()
        return found

    def _run(self, way: Way, only: int | None, found: Replayed) -> None:
        failed: list[doors.Failed] = []
        ran: set[int | None] = set()
        make = doors.backend(way.backend)

        def backend(graph: torch.fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
            found.graphs += 1
            frame, made = doors.current_frame(), make(graph, given)

            def run(*args: Any) -> Any:
                ran.add(frame)
                return made(*args)

            return run

        compiled = doors.compiled(self.target, backend, on_fail=failed.append, dynamic=way.dynamic)
        for position in range(len(self.cases) if only is None else only + 1):
            if position:
                self.workload.disturb(self.module)
            if only is not None and position < only:
                continue
            self._call(way, compiled, position, found)
            found.compiles += sum(frame.why is None for frame in doors.frames())
            found.events += _events(position, failed)
            found.ran.append(frozenset(ran))
            failed.clear()
            ran.clear()

    def _call(self, way: Way, compiled: Any, position: int, found: Replayed) -> None:
        expected = None
        if way.compare:
            expected = outputs.eager_call(
                self.target, lambda module: self.calling(module, self.arguments(position))
            )
        given = self.arguments(position)
        if way.marks is not None:
            mark_named(self.spec, given, unbacked=way.marks == "unbacked")
        leaves = _pytree.tree_leaves(self.calling(compiled, given))
        if expected is None:
            return
        error = outputs.relative_error(leaves, expected)
        found.errors[position] = error
        if found.wrong is None and not outputs.agrees(error, expected):
            found.wrong = position


def plan(workload: Workload, calls: int) -> tuple[Case, ...]:
    """The recorded requests in their order, at most ``calls``.

    Requests seen before are left out, since only another shape, number or state can compile; not where
    the workload changes its module's state between calls.
    """
    spec = workload.spec()
    arrivals = list(spec.traffic)
    if spec.perturbs:
        arrivals = (arrivals * _AT_LEAST)[: max(len(arrivals), _AT_LEAST)]
    else:
        keys = [(*sorted(a.sizes.items()), *sorted(a.scalars.items())) for a in arrivals]
        arrivals = [a for i, a in enumerate(arrivals) if keys[i] not in keys[:i]]
    return tuple(
        Case(name="replay", kind="traffic", sizes=a.sizes, scalars=a.scalars) for a in arrivals[:calls]
    )


def mark_named(spec: WorkloadSpec, given: tuple[Any, ...], *, unbacked: bool) -> None:
    """Mark every axis that has a named dim of more than one size."""
    ranges = {d.name: d for d in spec.dims if d.high > d.low}
    for tensor, value in zip(spec.inputs, given, strict=True):
        if isinstance(tensor, ScalarSpec):
            continue
        for axis, (factor, name) in named_axes(tensor).items():
            if name in ranges:
                low, high = max(1, factor * ranges[name].low), factor * ranges[name].high
                doors.mark(value, axis, unbacked=unbacked, low=low, high=high)


def named_axes(tensor: TensorSpec) -> dict[int, tuple[int, str]]:
    """Axes with a named dim: its factor and name."""
    return {i: factor_and_dim(n) for i, n in enumerate(tensor.shape) if isinstance(n, str)}


def _events(position: int, failed: list[doors.Failed]) -> list[Event]:
    groups: dict[tuple[int | None, int], list[doors.Failed]] = {}
    for failure in failed:
        match = _FRAME.match(failure.reason)
        groups.setdefault((int(match[1]) if match else None, id(failure.code)), []).append(failure)
    limit = compat.recompile_limit()
    return [
        Event(position, frame, tuple(group), len(group) >= limit) for (frame, _), group in groups.items()
    ]
