"""One run of a model on fake tensors, and what came of it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torchstone.compat import shapecheck as compat
from torchstone.errors import WorkloadError
from torchstone.records import Operand
from torchstone.shapecheck.entries import Arguments, Form, Target, as_module
from torchstone.shapecheck.explain import Explanation, Names, explain, is_shape_error
from torchstone.shapecheck.watch import Call, Trail, Watch, trail
from torchstone.workload.usercode import call

__all__ = ["Failure", "Made", "Run", "Source", "TooLongError", "build", "run", "within"]


class Source(NamedTuple):
    """The file that is checked."""

    path: Path
    """Where it is, resolved."""
    shown: str
    """Its name for the user."""


class Failure(NamedTuple):
    """A run that raised."""

    is_shape: bool
    """Whether it is about shapes."""
    refused: bool
    """Whether the lack of values is at fault, and not the model."""
    call: Call | None
    """The operation; None where it was none of torch's."""
    trail: Trail
    """Where in the source and in the model."""
    explanation: Explanation
    """Why."""
    operands: tuple[Operand, ...]
    """The operation's tensors."""


class Run(NamedTuple):
    """One run."""

    failure: Failure | None
    """Why it ended early, if it did."""
    operations: int = 0
    """Operations that went well."""
    lines: frozenset[int] = frozenset()
    """Lines of the file that began and are not on the way to the failure."""
    assumed: tuple[int | None, ...] = ()
    """Lines whose branch on a tensor's value was answered; None for those of torch's own."""


class Made(NamedTuple):
    """A model, and the mode that it lives in."""

    model: Any
    """The module, or function."""
    symbols: compat.Symbols
    """The mode's symbolic sizes."""
    mode: Any
    """The fake mode."""
    lines: frozenset[int]
    """Lines of the file that its making ran."""


class TooLongError(BaseException):
    """Raised by :func:`within`; no ``Exception``, so that nothing on the way takes it for its own."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Give what runs in the context so long, in the main thread of a process of its own.

    :raises TooLongError: when the time is over.
    """

    def ring(*_: object) -> NoReturn:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def build(source: Source, target: Target, *, values: bool = False) -> Made | Failure:
    """Make the model without memory, or with it and its values.

    :param values: whether its constructor is to have values (``torch.linspace(...)[1].item()``); they
        are also given where it fails for the lack of them.
    """
    symbols = compat.Symbols()
    mode = compat.fake_mode(symbols)
    watch = Watch(source.path, filling=values)
    try:
        with contextlib.nullcontext() if values else mode, watch.following():
            model = as_module(call(target.build, what=target.name), target.name)
    except WorkloadError as error:
        failure = _failure(source, error, watch.failed, None, symbols)
        return failure if failure.is_shape or values else build(source, target, values=True)
    return Made(model, symbols, mode, frozenset(watch.lines))


def run(
    source: Source,
    made: Made,
    form: Form,
    sizes: Mapping[str, Any],
    *,
    truth: bool = True,
) -> Run:
    """Call the model once.

    :param sizes: numbers, or symbols of ``made``, for the form's dims.
    :param truth: how a branch on a tensor's value is answered.
    """
    watch = Watch(source.path, truth=truth)
    try:
        positional, keywords = _inputs(made, form, sizes)
        with made.mode, watch.following():
            call(lambda: made.model(*positional, **keywords), what="forward")
    except WorkloadError as error:
        with made.mode:  # sizes are compared, which may ask the mode
            failure = _failure(source, error, watch.failed, made.model, made.symbols)
        lines = (made.lines | watch.lines) - set(failure.trail.lines)
        return Run(failure, watch.operations, lines, tuple(watch.assumed))
    return Run(None, watch.operations, made.lines | watch.lines, tuple(watch.assumed))


def _inputs(made: Made, form: Form, sizes: Mapping[str, Any]) -> Arguments:
    """The inputs: without memory; with it where the user's function asks for values (``.numpy()``)."""
    try:
        with made.mode:
            return call(lambda: form.make(sizes), what="making the inputs")
    except WorkloadError:
        if not all(isinstance(size, int) for size in sizes.values()):
            raise
    return call(lambda: form.make(sizes), what="making the inputs")


def _failure(
    source: Source, error: WorkloadError, failed: Call | None, root: object, symbols: compat.Symbols
) -> Failure:
    cause = error.__cause__ or error
    names = Names(symbols.names)
    refused = isinstance(cause, compat.fake_refusals())
    is_shape = not refused and is_shape_error(cause, failed)
    told = explain(cause, failed, names) if is_shape else _plain(cause, names)
    operands = () if failed is None else tuple(names.operand(tensor) for tensor in failed.tensors)
    return Failure(
        is_shape, refused, failed, trail(cause, source.path, source.shown, root), told, operands
    )


def _plain(error: BaseException, names: Names) -> Explanation:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return Explanation(names.text(f"{type(error).__name__}: {first}")[:300], fixed=False)
