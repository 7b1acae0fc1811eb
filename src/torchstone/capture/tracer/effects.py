"""What a function does beside tensor operations: what a graph would bake in or lose.

Reads of globals are found in the byte code of what can be reached from the function, before it runs.
Writes are found by comparing what lives on before and after a run; they are undone.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import io
import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from torchstone.capture.tracer.recorder import user_site
from torchstone.capture.tracer.sizes import Site

__all__ = ["PLAIN", "Changed", "Watch", "reads_of_state", "watched"]

_TORCH = str(Path(torch.__file__).parent)
PLAIN = (int, float, str, bytes, bool, type(None), tuple, frozenset, torch.dtype, torch.device)
"""Types whose values compare by equality and do not change."""
_RANDOM_MODULES = ("random", "numpy.random")


class Changed(Exception):  # noqa: N818  it says what happened, and never leaves this room
    """A run changed something that lives on."""

    def __init__(self, text: str, site: Site | None) -> None:
        super().__init__(text)
        self.text = text
        self.site = site


class _Reach(NamedTuple):
    """Code of the user's that a call can reach, with the globals it sees."""

    code: types.CodeType
    globals: dict[str, Any]


def reads_of_state(fn: nn.Module | Callable[..., Any]) -> tuple[str, Site] | None:
    """The first read of a global that may change, or write of one, in the user's code below ``fn``.

    Constants (numbers, strings and tuples that no function of their module rebinds), functions, classes
    and modules are no such reads. What cannot be reached by name from ``forward`` is not looked at.
    """
    for reach in _reachable(fn):
        for instruction, line in _instructions(reach.code):
            name = instruction.argval
            site = Site(reach.code.co_filename, line, reach.code.co_name)
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                return f"it writes to the global {name}", site
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name in reach.globals:
                why = _changeable(reach.globals, name)
                if why is not None:
                    return f"it reads the global {name}, {why}, whose value would be baked in", site
    return None


def _changeable(scope: dict[str, Any], name: str) -> str | None:
    value = scope[name]
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, nn.Module):
        return "a module"
    if isinstance(value, list | dict | set | bytearray):
        return f"a {type(value).__name__}"
    if isinstance(value, PLAIN) and name in _rebound(scope):
        return "which a function rebinds"
    return None


def _rebound(scope: dict[str, Any]) -> set[str]:
    """Globals that some function of this module rebinds."""
    known = scope.get("__name__")
    names: set[str] = set()
    for value in list(scope.values()):
        members = [value, *vars(value).values()] if isinstance(value, type) else [value]
        for member in members:
            code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
            if isinstance(code, types.CodeType) and getattr(member, "__module__", None) == known:
                names |= {
                    i.argval
                    for i, _ in _instructions(code)
                    if i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
                }
    return names


def _instructions(code: types.CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    """Instructions with their lines, those of nested functions and comprehensions included."""
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        yield instruction, int(line)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _reachable(fn: nn.Module | Callable[..., Any]) -> Iterator[_Reach]:
    seen: set[types.CodeType] = set()
    waiting: list[tuple[Any, type | None]] = [(fn, None)]
    if isinstance(fn, nn.Module):
        kinds = dict.fromkeys(type(module) for module in fn.modules())
        waiting = [(kind.forward, kind) for kind in kinds]
        instances = [m for m in fn.modules() if "forward" in vars(m)]
        waiting += [(m.forward, type(m)) for m in instances]
    while waiting:
        function, owner = waiting.pop()
        plain = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
        code = getattr(plain, "__code__", None)
        if code is None or code in seen or _foreign(code.co_filename):
            continue
        seen.add(code)
        scope = plain.__globals__  # type: ignore[union-attr]
        yield _Reach(code, scope)
        for name in _names(code):
            found = scope.get(name, getattr(owner, name, None))
            if isinstance(found, types.FunctionType | types.MethodType):
                waiting.append((found, owner))


def _names(code: types.CodeType) -> set[str]:
    nested = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names}.union(*(_names(c) for c in nested))


def _foreign(file: str) -> bool:
    """Whether code is torch's, or of a package: those are not rewritten while a model is served."""
    return file.startswith((_TORCH, "<frozen")) or "site-packages" in file


class Watch:
    """Compares what lives on with what it was when the watch began."""

    def __init__(self, fn: nn.Module | Callable[..., Any]) -> None:
        self.fn = fn
        self.printed = _Listener()
        modules = fn.named_modules() if isinstance(fn, nn.Module) else ()
        # torch's own keep books (an LSTM of its weights' places) that say nothing of the answer
        self._modules = {n: m for n, m in modules if not type(m).__module__.startswith("torch.")}
        self._before = {name: _state(module) for name, module in self._modules.items()}
        self._random = (random.getstate(), _numpy_state())

    def check(self) -> None:
        """See that nothing changed.

        :raises Changed: naming the first thing that did.
        """
        if self.printed.site is not None:
            raise Changed("it prints, which a graph does not", self.printed.site)
        for name, module in self._modules.items():
            attribute = _difference(self._before[name], _state(module))
            if attribute is not None:
                path = f"{name}.{attribute}" if name else attribute
                raise Changed(f"it changes its own attribute {path}", _writer(type(module), attribute))
        if self._random[0] != random.getstate() or self._random[1] != _numpy_state():
            raise Changed("it draws random numbers from Python or numpy", _drawer(self.fn))

    def undo(self) -> None:
        """Put attributes back as they were."""
        for name, module in self._modules.items():
            for attribute, (value, contents) in self._before[name].items():
                vars(module)[attribute] = value
                _refill(value, contents)
            for attribute in set(vars(module)) - set(self._before[name]):
                if attribute not in _REGISTRIES:
                    del vars(module)[attribute]
        random.setstate(self._random[0])


@contextlib.contextmanager
def watched(fn: nn.Module | Callable[..., Any]) -> Iterator[Watch]:
    """Watch ``fn`` while it is traced; what it wrote to itself is undone afterwards."""
    watch = Watch(fn)
    with contextlib.redirect_stdout(watch.printed):
        try:
            yield watch
        finally:
            watch.undo()


class _Listener(io.TextIOBase):
    """Standard output that remembers who wrote first."""

    site: Site | None = None

    def write(self, text: str) -> int:
        self.site = self.site or user_site()
        return len(text)


_REGISTRIES = frozenset(vars(nn.Module()))
"""What torch keeps in a module: parameters, buffers, hooks. Tensors there are lifted."""


def _state(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Attributes, and a copy of what containers hold."""
    kept = {}
    for name, value in vars(module).items():
        if name not in _REGISTRIES or name == "training":
            kept[name] = (value, _contents(value))
    return kept


def _contents(value: Any) -> list[Any] | None:
    """What a container holds, flat; None for what is none."""
    if isinstance(value, dict):
        return [part for item in value.items() for part in item]
    return list(value) if isinstance(value, list | set) else None


def _refill(value: Any, contents: list[Any] | None) -> None:
    if contents is None or _same((None, _contents(value)), (None, contents)):
        return
    value.clear()
    if isinstance(value, dict):
        value.update(zip(contents[::2], contents[1::2], strict=True))
    elif isinstance(value, list):
        value.extend(contents)
    else:
        value.update(contents)


def _difference(before: dict[str, tuple[Any, Any]], after: dict[str, tuple[Any, Any]]) -> str | None:
    for name in (*before, *after):
        if name not in before or name not in after or not _same(before[name], after[name]):
            return name
    return None


def _same(old: tuple[Any, Any], new: tuple[Any, Any]) -> bool:
    if not _alike(old[0], new[0]):
        return False
    if old[1] is None or new[1] is None:
        return old[1] is new[1]
    return len(old[1]) == len(new[1]) and all(map(_alike, old[1], new[1]))


def _alike(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, PLAIN) and type(a) is type(b) and bool(a == b))


def _writer(kind: type, attribute: str) -> Site | None:
    """The line of the class that writes the attribute, outside of its constructor."""
    best: Site | None = None
    for owner in kind.__mro__:
        for name, member in vars(owner).items():
            code = getattr(member, "__code__", None)
            if name == "__init__" or code is None or _foreign(code.co_filename):
                continue
            for instruction, line in _instructions(code):
                if instruction.argval != attribute:
                    continue
                site = Site(code.co_filename, line, code.co_name)
                if instruction.opname == "STORE_ATTR":
                    return site
                best = best or site  # self.log.append(x) loads it only
    return best


def _drawer(fn: nn.Module | Callable[..., Any]) -> Site | None:
    for reach in _reachable(fn):
        for instruction, line in _instructions(reach.code):
            value = reach.globals.get(str(instruction.argval))
            name = getattr(value, "__name__", "") or ""
            module = getattr(value, "__module__", "") or ""
            numpy = value is np and "random" in reach.code.co_names
            if name in _RANDOM_MODULES or module in _RANDOM_MODULES or numpy:
                return Site(reach.code.co_filename, line, reach.code.co_name)
    return None


def _numpy_state() -> tuple[str, bytes, int]:
    name, keys, position, *_ = np.random.get_state(legacy=True)
    return str(name), np.asarray(keys).tobytes(), int(position)
