"""One run of a function on fake tensors, written down: operations, and what Python asked of sizes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

import torchstone
from torchstone.capture.tracer.sizes import Axis, Ledger, Site
from torchstone.compat import tracing

__all__ = ["Constant", "Entry", "Recording", "Value", "record", "user_site"]

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(torchstone.__file__).parent), "<")


class Value(NamedTuple):
    """A tensor of the recording, by its number."""

    number: int


@dataclass(frozen=True, eq=False)
class Constant:
    """A real tensor that is no input."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Entry:
    """One operation."""

    target: Any
    """The overload: ``aten.linear.default``."""
    args: Any
    """Its arguments; tensors are :class:`Value` or :class:`Constant`."""
    kwargs: Any
    results: tuple[int, ...]
    """Numbers of the tensors that it gives, in pytree order."""
    site: Site | None
    """The line of the user's code that called it."""
    modules: tuple[tuple[str, str], ...]
    """Submodules that were running, outermost first: path and class."""


@dataclass
class Recording:
    """What one run did."""

    ledger: Ledger
    inputs: int
    """Number of inputs: values 0, 1, ..."""
    entries: list[Entry] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shape of every value."""
    storages: list[int] = field(default_factory=list)
    """Which memory every value lies in."""
    outputs: list[Any] = field(default_factory=list)
    """Leaves of the result: :class:`Value`, :class:`Constant`, or plain data."""


def user_site() -> Site | None:
    """The innermost line that is neither torch's nor ours; None where there is none on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            return Site(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


class _Recorder(tracing.PreDispatchMode):  # type: ignore[no-untyped-call]  # torch's class below
    def __init__(self, recording: Recording, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.compute = compute
        self.recording = recording
        # weak: a new tensor that anybody holds is copied on its way to Python (torch's make_variable)
        self.numbers: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
        self.memory: list[Any] = []  # kept, so that no address is given twice
        self.modules: list[tuple[str, str]] = []

    def number(self, tensor: torch.Tensor) -> int:
        known = self.numbers.get(tensor)
        if known is not None:
            return known
        number = self.numbers[tensor] = len(self.recording.shapes)
        self.recording.shapes.append(tuple(torch.Tensor.size(tensor)))
        memory = tensor.untyped_storage()
        self.memory.append(memory)
        self.recording.storages.append(memory._cdata)
        return number

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ledger = self.recording.ledger
        given, named = pytree.tree_map(self.named, (args, kwargs))
        ledger.listening = False
        try:
            result = self.compute(func, args, kwargs)
        finally:
            ledger.listening = True
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if tensors or func._schema.is_mutable:
            results = tuple(self.number(tensor) for tensor in tensors)
            self.recording.entries.append(
                Entry(func, given, named, results, user_site(), tuple(self.modules))
            )
        return result

    def named(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if isinstance(leaf, tracing.FakeTensor) or leaf in self.numbers:
            return Value(self.number(leaf))
        return Constant(leaf)

    def read(self, tensor: torch.Tensor, axis: int, size: int) -> int:
        ledger = self.recording.ledger
        number = self.numbers.get(tensor) if ledger.listening else None
        return size if number is None else ledger.size(size, Axis(number, axis))


def record(
    function: Callable[..., Any], fakes: list[torch.Tensor], root: nn.Module | None = None
) -> Recording:
    """Run ``function`` on fake tensors and write down what it does.

    What it raises is raised on.

    :param fakes: inputs; all of one fake mode.
    :param root: the module that runs in it, if there is one.
    """
    recording = Recording(Ledger(user_site), len(fakes))
    modes = [fake.fake_mode for fake in fakes if isinstance(fake, tracing.FakeTensor)]
    mode = modes[0] if modes else tracing.fake_mode()
    recorder = _Recorder(recording, tracing.ShapeCache(mode))
    for fake in fakes:
        recorder.number(fake)
    following = _followed(root, recorder.modules)
    with torch.no_grad(), mode, tracing.sizes_through(recorder.read), following, recorder:
        result = function(*fakes)
    recording.outputs = [recorder.named(leaf) for leaf in pytree.tree_leaves(result)]
    return recording


@contextmanager
def _followed(root: nn.Module | None, running: list[tuple[str, str]]) -> Iterator[None]:
    """Keep ``running`` up to date with the submodules of ``root`` that run in this thread."""
    if root is None:
        yield
        return
    paths = {id(module): path for path, module in root.named_modules()}
    thread = threading.get_ident()

    def enter(module: nn.Module, _given: Any) -> None:
        if id(module) in paths and threading.get_ident() == thread:
            kind = type(module)
            running.append((paths[id(module)], f"{kind.__module__}.{kind.__qualname__}"))

    def leave(module: nn.Module, _given: Any, _result: Any) -> None:
        if id(module) in paths and threading.get_ident() == thread:
            running.pop()

    hooks = (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
