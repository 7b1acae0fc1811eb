"""Private doors into torch's symbolic shapes: guards as they arise, marks, names of sizes.

A guard is a condition on sizes that a trace takes for granted. The exported program keeps the guards but
not the lines that caused them, and an error may keep neither: so they are recorded while tracing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram

import torchstone
from torchstone import compat
from torchstone.compat.sizenames import PLACE
from torchstone.records import SourceLine

__all__ = [
    "Guard",
    "Watch",
    "bounds_unavailable",
    "call_errors",
    "cause_chain",
    "checked_by_user",
    "guards_of",
    "line_traced",
    "mark_backed",
    "mark_unbacked",
    "oblivious_to_size",
    "recompiling",
    "symbol_sources",
    "unguarded",
    "user_line",
    "watch",
]

_FOREIGN = (
    str(Path(torch.__file__).parent) + "/",
    str(Path(torchstone.__file__).parent) + "/",
    "<",
)
_IN_TRACE = re.compile(r'File "(.+)", line (\d+), in (.+)\n\s*(.*)')
_LIBRARY = sysconfig.get_path("stdlib") + "/"


class Guard(NamedTuple):
    """A condition that a trace relies on."""

    code: str
    """Python expression over torch's symbols: ``s27 <= 128``."""
    sources: dict[str, str]
    """Each symbol in it and torch's name of the size it stands for; symbols of values have none."""
    where: SourceLine | None
    """The user's line that asked."""
    deferred: bool
    """Whether the program checks it as it runs, rather than before."""

    def holds(self, values: dict[str, int]) -> bool | None:
        """Whether it holds for these values of its symbols; None where that cannot be said."""
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

        if not self.sources.keys() <= values.keys():
            return None
        try:
            # what torch itself does to check the guards of a program
            return bool(eval(_compiled(self.code), dict(SYMPY_INTERP), dict(values)))
        except ZeroDivisionError:
            return False  # x % (s // 8) where s < 8: there the model divides by zero as well
        except (NameError, TypeError, ValueError, OverflowError):
            return None


@functools.lru_cache(maxsize=4096)
def _compiled(code: str) -> Any:
    return compile(code, "<guard>", "eval")


def guards_of(program: ExportedProgram) -> list[Guard]:
    """The conditions that a program keeps: its guards, and the ranges of its inputs' sizes; no lines.

    A range from 2 is none from below: torch writes that for every size, and lets 0 and 1 pass.
    """
    guards = [_guard_of_code(code) for code in getattr(program, "_guards_code", None) or ()]
    values = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    for name in program.graph_signature.user_inputs:
        for axis, size in enumerate(getattr(values.get(str(name)), "shape", ())):
            low, high, _ = compat.size_range(program, size)
            code = [f"s0 == {low}"]
            if low != high:
                code = [f"{low} <= s0"] * (low > 2) + [f"s0 <= {high}"]
            guards += [Guard(c, {"s0": f"{name}.size()[{axis}]"}, None, False) for c in code]
    return guards


def _guard_of_code(code: str) -> Guard:
    sources: dict[str, str] = {}

    def symbol(match: re.Match[str]) -> str:
        return next((s for s, v in sources.items() if v == match[0]), None) or _added(match[0])

    def _added(source: str) -> str:
        sources[f"s{len(sources)}"] = source
        return f"s{len(sources) - 1}"

    return Guard(PLACE.sub(symbol, code), sources, None, False)


@dataclass
class Watch:
    """What a trace relied on, in order, filled while :func:`watch` is open."""

    guards: list[Guard] = field(default_factory=list)
    """The guards."""
    marked: dict[str, str] = field(default_factory=dict)
    """Symbols of the latest trace for sizes marked unbacked, with torch's names of the sizes."""


@contextlib.contextmanager
def watch() -> Iterator[Watch]:
    """Record the guards of every trace made inside, each with the user's line that caused it.

    torch logs the same (``TORCH_LOGS=dynamic``) as text, with the last two parts of the path; and in its
    trace log, which reads the source of every function for it and fails where there is none.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    seen = Watch()
    depth = sum(1 for _ in traceback.walk_stack(None))
    door: Any = ShapeEnv  # assigning to a method is what type checkers cannot follow
    log, create = getattr(door, "_log_guard", None), getattr(door, "create_unbacked_symint", None)
    if log is None or create is None:  # a torch that names them otherwise: no lines, the rest works
        yield seen
        return

    def logged(env: Any, prefix: str, g: Any, *args: Any, **options: Any) -> Any:
        if "suppressed" not in prefix:
            seen.guards.append(_guard(env, seen.marked, g, (_line_now(depth), prefix)))
        return log(env, prefix, g, *args, **options)

    def created(env: Any, source: Any = None, *args: Any, **options: Any) -> Any:
        size = create(env, source, *args, **options)
        symbol = str(size.node.expr)
        if symbol == "u0":  # counted anew for every trace
            seen.marked.clear()
        if source is not None:
            seen.marked[symbol] = _name(source)
        return size

    door._log_guard, door.create_unbacked_symint = logged, created
    try:
        yield seen
    finally:
        door._log_guard, door.create_unbacked_symint = log, create


def _guard(
    env: Any, marked: dict[str, str], expression: Any, at: tuple[SourceLine | None, str]
) -> Guard:
    from torch.utils._sympy.printers import PythonPrinter

    names = marked | _names(env)
    sources = {str(s): names.get(str(s), "") for s in expression.free_symbols}
    where, prefix = at
    return Guard(PythonPrinter().doprint(expression), sources, where, prefix == "runtime_assert")


def _line_now(depth: int) -> SourceLine | None:
    """The user's line that is being traced: Dynamo knows it; elsewhere it is on the stack.

    :param depth: frames that were on the stack when the watch began.
    """
    from torch._guards import TracingContext

    traced = list(TracingContext.extract_stack())
    if traced:
        return _innermost(traced)
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    for frame in frames[: len(frames) - depth]:
        file, code = frame.f_code.co_filename, frame.f_code
        if _of_user(file):
            text = linecache.getline(file, frame.f_lineno, frame.f_globals).strip()
            return SourceLine(file=file, line=frame.f_lineno, text=text, function=code.co_name)
    return None


def _names(env: Any) -> dict[str, str]:
    """Symbols to torch's names of sizes; those that were marked unbacked are not among them."""
    names = {str(symbol): str(source) for source, symbol in getattr(env, "source_to_var", {}).items()}
    for symbol, sources in getattr(env, "var_to_sources", {}).items():
        if sources:
            names.setdefault(str(symbol), _name(sources[0]))
    return names


def _name(source: Any) -> str:
    name = source.name  # a property since 2.12
    return str(name() if callable(name) else name)


def cause_chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, outermost first."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def symbol_sources(error: BaseException) -> dict[str, str]:
    """Symbols (``u0``, ``s27``) to torch's names of sizes, from the shape environment that raised.

    The message of an error has only the symbols; the frames that it went through have the environment.
    """
    found: dict[str, str] = {}
    for link in cause_chain(error):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            for value in list(frame.f_locals.values()):
                found |= _known_to(value)
    return found


def _known_to(value: Any) -> dict[str, str]:
    """Names of sizes that a local of the tracer knows: an environment, a fake mode, Dynamo's graph."""
    from torch._dynamo.output_graph import OutputGraph
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if isinstance(value, ShapeEnv):
        return _names(value)
    if isinstance(value, FakeTensorMode) and value.shape_env is not None:
        return _names(value.shape_env)
    if not isinstance(value, OutputGraph):
        return {}
    return {
        str(size.node.expr): f"{_name(tracked.source)}.size()[{axis}]"
        for tracked in value.tracked_fakes
        for axis, size in _symbolic_sizes(tracked.fake)
    }


def _symbolic_sizes(value: Any) -> Iterator[tuple[int, Any]]:
    if isinstance(value, torch.Tensor):
        yield from ((axis, n) for axis, n in enumerate(value.shape) if not isinstance(n, int))


def line_traced(error: BaseException) -> SourceLine | None:
    """The user's line that Dynamo was at when it raised; None where it was not Dynamo."""
    for link in cause_chain(error):
        stack = getattr(link, "real_stack", None)
        if stack and (line := _innermost(list(stack))) is not None:
            return line
    return None


def user_line(error: BaseException) -> SourceLine | None:
    """The user's line at fault: Dynamo's own stack, else the node being compiled, else the traceback."""
    if (line := line_traced(error)) is not None:
        return line
    for link in cause_chain(error):
        if (line := _line_compiled(link)) is not None:
            return line
    for link in cause_chain(error):
        # the first frame is the one that caught it
        if (line := _innermost(list(traceback.extract_tb(link.__traceback__))[1:])) is not None:
            return line
    return None


def _line_compiled(error: BaseException) -> SourceLine | None:
    """The line that made the node which Inductor was lowering."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in list(frame.f_locals.values()):
            if isinstance(value, torch.fx.Node) and value.stack_trace:
                found = _IN_TRACE.findall(value.stack_trace)
                stack = [
                    traceback.FrameSummary(file, int(number), name, line=text)
                    for file, number, name, text in found
                ]
                return _innermost(stack)
    return None


def _innermost(frames: list[traceback.FrameSummary]) -> SourceLine | None:
    for frame in reversed(frames):
        if _of_user(frame.filename):
            text = (frame.line or "").strip()
            return SourceLine(
                file=frame.filename, line=frame.lineno or 0, text=text, function=frame.name
            )
    return None


def _of_user(file: str) -> bool:
    """Whether a file is neither torch's, ours, the standard library's, nor made up (``<eval>``)."""
    library = file.startswith(_LIBRARY) and "site-packages" not in file
    return not library and not file.startswith(_FOREIGN)


def checked_by_user(error: BaseException) -> bool:
    """Whether a ``torch._check`` or an ``assert`` in the user's own code raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "_check" not in f.name]
    checks = len(frames) < len(traceback.extract_tb(error.__traceback__))
    if not frames or not (checks or isinstance(error, AssertionError)):
        return False
    return _innermost(frames[-1:]) is not None


def unguarded(program: ExportedProgram) -> torch.nn.Module:
    """The program as engines run it that do not look at its guards: any size goes."""
    module = program.module(check_guards=False)
    module._forward_pre_hooks.clear()  # one of these still compares sizes with the ranges
    return module


def bounds_unavailable() -> str | None:
    """Why sizes cannot be marked unbacked with bounds in this torch; None where they can."""
    mark = getattr(torch._dynamo.decorators, "mark_unbacked", None)
    if mark is None:
        return f"torch {torch.__version__} has no mark_unbacked"
    if "min" not in inspect.signature(mark).parameters:
        return f"torch {torch.__version__}: mark_unbacked takes no bounds (min=, max=)"
    return None


def mark_unbacked(
    tensor: torch.Tensor, axis: int, low: int, high: int, shape_id: str | None = None
) -> None:
    """Have ``torch.compile`` take this size for unknown, within bounds that the code checks.

    :param shape_id: sizes that have the same one are equal.
    """
    torch._dynamo.decorators.mark_unbacked(tensor, axis, min=low, max=high, shape_id=shape_id)


def mark_backed(tensor: torch.Tensor, axis: int, low: int, high: int) -> None:
    """Have ``torch.compile`` take this size for dynamic, guarding where the code asks about it."""
    torch._dynamo.mark_dynamic(tensor, axis, min=low, max=high)


def call_errors() -> tuple[type[Exception], ...]:
    """What a call of a model, a program or a compiled function may raise because of its sizes."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return (
        *compat.capture_errors(),
        *compat.compile_errors(),
        FailOnRecompileLimitHit,
        ZeroDivisionError,  # x.shape[0] // (x.shape[0] // 8), in a model or in a guard
    )


@contextlib.contextmanager
def recompiling(limit: int) -> Iterator[None]:
    """Compile afresh inside, up to ``limit`` graphs a function, not by what earlier runs have seen."""
    import torch._dynamo

    torch._dynamo.reset()
    options = {
        "recompile_limit": limit,
        "automatic_dynamic_local_pgo": False,  # sizes of the last run would decide what is dynamic now
        "automatic_dynamic_remote_pgo": False,
    }
    try:
        with torch._dynamo.config.patch(options):
            yield
    finally:
        torch._dynamo.reset()


@contextlib.contextmanager
def oblivious_to_size() -> Iterator[None]:
    """Trace inside without taking for granted that sizes are at least 2: a branch on 1 is a guard then.

    torch's own branches (broadcasting, contiguity) go by the general case there.
    """
    from torch.fx.experimental import _config

    config: Any = _config  # its `patch` is added as it is imported
    if not hasattr(config, "backed_size_oblivious"):
        yield
        return
    with config.patch(backed_size_oblivious=True):
        yield
