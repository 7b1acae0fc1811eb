"""The doors into Dynamo: where it breaks, what it compiles, which guards fail, what can be switched.

Tried on torch 2.13 and 2.14. Where a door is missing, as some are in other versions, the function says
so or finds less; none raises.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch

__all__ = [
    "BreakEvent",
    "Failed",
    "Frame",
    "backend",
    "compiled",
    "config",
    "current_frame",
    "frames",
    "has_nested_breaks",
    "mark",
    "nested_breaks",
    "regions_inlined",
    "reset",
    "resolve",
    "site_of",
    "use_nested_breaks",
    "watch_breaks",
]

Frames = tuple[traceback.FrameSummary, ...]


class BreakEvent(NamedTuple):
    """One graph break, as Dynamo reports it."""

    kind: str
    """Dynamo's name for this kind of break (``gb_type``)."""
    text: str
    """Its explanation, several lines."""
    stack: Frames
    """Python's stack at the break, outermost first: what ran, and below it what was being traced."""


class Failed(NamedTuple):
    """A guard that did not hold."""

    reason: str
    """Dynamo's text: the version that it belongs to, the guard, often the user's line."""
    code: CodeType
    """The function that was called."""


class Frame(NamedTuple):
    """One time that Dynamo took up a function."""

    function: str
    """Its name."""
    file: str
    """Its file."""
    line: int
    """Its first line."""
    why: str | None
    """Why Dynamo gave it up; None where it was compiled."""


def reset() -> None:
    """Forget everything compiled in this process."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()


@contextlib.contextmanager
def config(**values: Any) -> Iterator[None]:
    """Change Dynamo's configuration for a while; options that this torch lacks are left out."""
    import torch._dynamo

    known = {name: value for name, value in values.items() if hasattr(torch._dynamo.config, name)}
    with torch._dynamo.config.patch(**known) if known else contextlib.nullcontext():
        yield


def has_nested_breaks() -> bool:
    """Whether this torch can resume inside a function called by the one that breaks."""
    import torch._dynamo

    return hasattr(torch._dynamo.config, "nested_graph_breaks")


def nested_breaks(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Compile with or without nested graph breaks for a while."""
    return config(nested_graph_breaks=enabled)


def use_nested_breaks(enabled: bool) -> None:
    """The same for the rest of the process: for a worker of its own, which compiles as inputs come."""
    import torch._dynamo

    if has_nested_breaks():
        torch._dynamo.config.nested_graph_breaks = enabled


def compiled(
    function: Callable[..., Any],
    made_by: Callable[..., Any],
    *,
    on_fail: Callable[[Failed], None] | None = None,
    dynamic: bool | None = None,
) -> Any:
    """``torch.compile`` that also tells of each guard that fails, newest compiled version first."""
    import torch._dynamo

    def hook(failure: Any) -> None:
        if on_fail is not None:
            on_fail(Failed(str(failure.reason), failure.orig_code))

    return torch._dynamo.optimize(made_by, guard_fail_fn=hook, dynamic=dynamic)(function)


def backend(name: str) -> Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]:
    """A backend of ``torch.compile``: makes a callable of one graph and its example inputs."""
    import torch._dynamo

    return torch._dynamo.lookup_backend(name)


def current_frame() -> int | None:
    """Inside a backend: which function is being compiled, as Dynamo numbers them."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return None if current is None else current.frame_id


def site_of(graph: torch.fx.GraphModule) -> tuple[str, int] | None:
    """File and line of the break that ended a graph; None where it ends because the function does."""
    reason: Any = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return None
    last = reason.user_stack[-1]
    return str(last.filename), int(last.lineno or 0)


@contextlib.contextmanager
def watch_breaks() -> Iterator[list[BreakEvent]]:
    """Collect every graph break while it is open, also those that leave no graph behind.

    ``torch._dynamo.explain`` tells only of breaks that ended a graph, and the log leaves out the stack
    of a place seen before; so the method that writes the log is listened to.
    """
    from torch._dynamo import symbolic_convert
    from torch._dynamo.exc import TorchDynamoException

    events: list[BreakEvent] = []
    owner: Any = symbolic_convert.InstructionTranslatorBase
    original = getattr(owner, "log_graph_break", None)
    if original is None:
        yield events
        return

    def listen(self: Any, *args: Any, **kwargs: Any) -> Any:
        error = next((a for a in (*args, *kwargs.values()) if isinstance(a, TorchDynamoException)), None)
        reason = next((a for a in (kwargs.get("reason"), *args) if isinstance(a, str)), "")
        if error is not None and not getattr(error, "logged", False):
            traced = getattr(error, "real_stack", None) or torch._guards.TracingContext.extract_stack()
            stack = (*traceback.extract_stack()[:-1], *traced)
            kind = str(getattr(error, "gb_type", None) or type(error).__name__)
            events.append(BreakEvent(kind, reason or str(error), stack))
        return original(self, *args, **kwargs)

    owner.log_graph_break = listen
    try:
        yield events
    finally:
        owner.log_graph_break = original


def frames() -> tuple[Frame, ...]:
    """Functions that Dynamo took up since the last time this was asked, or :func:`reset`."""
    from torch._dynamo import utils

    metrics = utils.get_compilation_metrics()
    utils.clear_compilation_metrics()
    return tuple(
        Frame(
            function=str(m.co_name),
            file=str(m.co_filename),
            line=int(m.co_firstlineno or 0),
            why=None if m.fail_type is None else str(m.fail_reason),
        )
        for m in metrics
    )


def mark(tensor: torch.Tensor, axis: int, *, unbacked: bool, low: int, high: int) -> None:
    """Say that an axis has any size: symbolic with guards, or without (``unbacked``) from ``low`` on.

    :raises TypeError: where this torch's ``mark_unbacked`` takes no bounds.
    """
    from torch._dynamo import decorators

    if unbacked:
        decorators.mark_unbacked(tensor, axis, min=low, max=high)
    else:
        decorators.mark_dynamic(tensor, axis)


def resolve(code: CodeType, root: str) -> Any:
    """The object that a name outside of a function's arguments stands for in it: a global or a
    closure's.

    :returns: the object; None where it cannot be found.
    """
    for function in gc.get_referrers(code):
        if getattr(function, "__code__", None) is not code:
            continue
        if root in code.co_freevars:
            with contextlib.suppress(ValueError, TypeError):  # a cell may be empty
                return function.__closure__[code.co_freevars.index(root)].cell_contents
        if root in function.__globals__:
            return function.__globals__[root]
    return None


@contextlib.contextmanager
def regions_inlined(namespaces: Sequence[dict[str, Any]]) -> Iterator[dict[str, Callable[..., Any]]]:
    """Replace each ``torch.compiler.nested_compile_region`` found in these namespaces by its plain
    function.

    Gives the regions' functions by name.
    """
    found = {
        (index, name): value
        for index, space in enumerate(namespaces)
        for name, value in list(space.items())
        if callable(getattr(value, "__marked_compile_region_fn__", None))
    }
    plain = {key: value.__marked_compile_region_fn__ for key, value in found.items()}
    for (index, name), function in plain.items():
        namespaces[index][name] = function
    try:
        yield {name: function for (_, name), function in plain.items()}
    finally:
        for (index, name), value in found.items():
            namespaces[index][name] = value
