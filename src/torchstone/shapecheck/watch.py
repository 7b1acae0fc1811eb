"""Following a run: which operation failed on what, on which of the user's lines, in which module."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchstone.compat import shapecheck as compat
from torchstone.records import Place
from torchstone.shapecheck import packed

__all__ = ["Call", "Trail", "Watch", "trail"]

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).resolve().parents[1])
_STANDARD = sysconfig.get_paths()["stdlib"]
_Function = Callable[..., Any]
_FILLS = frozenset(
    (
        "constant_",
        "fill_",
        "kaiming_normal_",
        "kaiming_uniform_",
        "normal_",
        "ones_",
        "orthogonal_",
        "trunc_normal_",
        "uniform_",
        "xavier_normal_",
        "xavier_uniform_",
        "zero_",
        "zeros_",
    )
)
"""Functions that overwrite a tensor's values, as initializers do."""


class Call(NamedTuple):
    """An operation that failed."""

    op: str
    """Its name: ``linear``."""
    tensors: tuple[torch.Tensor, ...]
    """The tensors among its arguments, in order, those in lists too."""
    arguments: tuple[Any, ...]
    """All positional arguments."""
    keywords: dict[str, Any]
    """All keyword arguments."""


class Watch(TorchFunctionMode):
    """Counts operations, keeps the one that failed, and answers for values that no tensor here has.

    :param truth: how a branch on a tensor's value is answered when its line first asks; the other way
        from then on, so that ``while mask.any():`` ends.
    :param filling: whether tensors are filled, as weights are; no shape hangs on it, and it takes time.
    """

    def __init__(self, file: Path, *, truth: bool = True, filling: bool = True) -> None:
        super().__init__()
        self.operations = 0
        """Calls of torch so far that gave something."""
        self.failed: Call | None = None
        """The first that raised."""
        self.lines: set[int] = set()
        """Lines of the file that have begun."""
        self.assumed: list[int | None] = []
        """The file's line of each branch on a value that was answered; None for those of other files."""
        self._file = str(file)
        self._truth = truth
        self._filling = filling
        self._asked: set[tuple[str, int]] = set()

    def __torch_function__(
        self,
        func: _Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in _FILLS and not self._filling:
            return args[0] if args else keywords["tensor"]
        tracer = sys.gettrace()
        sys.settrace(None)  # hundreds of torch's own frames a call, none of which is asked about
        done = False
        try:
            answer = packed.answer(name, func, args, keywords)
            result = answer() if answer is not None else self._called(func, args, keywords)
            done = True
            return result
        finally:
            if done:
                self.operations += name != "__get__"
            elif self.failed is None:
                self.failed = Call(name, tuple(_tensors((*args, *keywords.values()))), args, keywords)
            sys.settrace(tracer)

    def _called(self, func: _Function, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if func is not torch.Tensor.__bool__:
            return func(*args, **keywords)
        try:
            return func(*args)
        except compat.fake_refusals():
            asking = sys._getframe(2)
            own = asking.f_code.co_filename == self._file
            self.assumed.append(asking.f_lineno if own else None)
            site = (asking.f_code.co_filename, asking.f_lineno)
            first = site not in self._asked
            self._asked.add(site)
            return self._truth if first else not self._truth

    @contextmanager
    def following(self) -> Iterator[None]:
        """Note the file's lines as they begin, while the context lasts."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            with self:
                yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._step if frame.f_code.co_filename == self._file else None

    def _step(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line":
            self.lines.add(frame.f_lineno)
        return self._step


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class Trail(NamedTuple):
    """Where an exception came from."""

    place: Place | None
    """The deepest line in the file; else the deepest of other code that is neither torch's nor ours."""
    lines: tuple[int, ...]
    """All lines of the file on the way."""
    path: str | None
    """The innermost module in the model."""
    within: str | None
    """The deepest line outside torch, where that is not in the file."""


def trail(error: BaseException, file: Path, shown: str, root: object) -> Trail:
    """Read an exception's traceback.

    :param file: the file that is checked, resolved.
    :param shown: its name for the user.
    :param root: the model, for the names of its modules.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == str(file)]
    foreign = [f for f in frames if not f.filename.startswith((_TORCH, _PACKAGE, _STANDARD, "<"))]
    deepest = next(reversed(own or foreign), None)
    place = None
    if deepest is not None:
        name = shown if own else deepest.filename
        place = Place(
            file=name,
            line=deepest.lineno or 1,
            column=(deepest.colno or 0) + 1,
            end_line=deepest.end_lineno or deepest.lineno or 1,
            end_column=None if deepest.end_colno is None else deepest.end_colno + 1,
        )
    within = foreign[-1] if own and foreign and foreign[-1].filename != str(file) else None
    return Trail(
        place=place,
        lines=tuple(sorted({f.lineno for f in own if f.lineno is not None})),
        path=_module_path(error.__traceback__, root),
        within=None if within is None else f"{_short(within.filename)}:{within.lineno}",
    )


def _short(filename: str) -> str:
    """A library's file from its package on: ``transformers/models/bert/modeling_bert.py``."""
    return filename.rpartition("site-packages/")[2]


def _module_path(walk: TracebackType | None, root: object) -> str | None:
    if not isinstance(root, nn.Module):
        return None
    names = {id(module): name for name, module in root.named_modules()}
    found = None
    while walk is not None:
        frame = walk.tb_frame
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and names.get(id(owner)):
            found = names[id(owner)]
        walk = walk.tb_next
    return found
