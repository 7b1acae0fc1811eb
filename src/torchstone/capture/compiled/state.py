"""The state that a model's code can read besides its inputs: what is there, and what changed."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

__all__ = [
    "changed",
    "functions",
    "globals_read",
    "globals_written",
    "is_users",
    "namespaces",
    "snapshot",
]

_TORCH = str(Path(torch.__file__).parent)
_STANDARD = str(Path(inspect.__file__).parent)
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_BOOKKEEPING = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


def snapshot(module: nn.Module) -> dict[str, object]:
    """What modules hold in attributes of their own and what their code's globals hold, by name.

    A simple value stands for itself, anything else for its identity. An attribute that hides a
    parameter, a buffer or a submodule of the same name is said to.
    """
    found: dict[str, object] = {}
    for path, part in module.named_modules():
        registered = {*part._parameters, *part._buffers, *part._modules}
        for name, value in vars(part).items():
            if name in _BOOKKEEPING or name.endswith("hooks") or name.startswith("__"):
                continue
            full = ".".join(filter(None, ("self", path, name)))
            hides = " (hides what is registered under that name)" if name in registered else ""
            found[full + hides] = _stands_for(value)
        for name, value in (*part._parameters.items(), *part._buffers.items(), *part._modules.items()):
            found[".".join(filter(None, ("self", path, name)))] = id(value)
        found |= _attributes(type(part).__name__, type(part))
    for function in functions(module):
        for name in globals_read(function.__code__) & function.__globals__.keys():
            value = function.__globals__[name]
            found[name] = _stands_for(value)
            if inspect.isclass(value) and is_users(inspect.getsourcefile(function) or ""):
                found |= _attributes(name, value)
    return found


def _attributes(name: str, owner: type) -> dict[str, object]:
    """Plain values that a class holds."""
    plain = {n: v for n, v in vars(owner).items() if not n.startswith("__") and isinstance(v, _SIMPLE)}
    return {f"{name}.{n}": _stands_for(v) for n, v in plain.items()}


def changed(before: dict[str, object], after: dict[str, object]) -> tuple[str, ...]:
    """Names of what is there now and was not, or is another now."""
    return tuple(name for name, value in after.items() if name not in before or before[name] != value)


def functions(module: nn.Module) -> Iterator[Any]:
    """Functions and methods in the files that the user's module classes are in."""
    seen: set[int] = set()
    for space in namespaces(module):
        for value in list(space.values()):
            for function in _functions_of(value):
                if id(function) not in seen and is_users(function.__code__.co_filename):
                    seen.add(id(function))
                    yield function


def namespaces(module: nn.Module) -> list[dict[str, Any]]:
    """Globals of the files that the user's module classes are in."""
    found: dict[int, dict[str, Any]] = {}
    for part in module.modules():
        forward = inspect.unwrap(type(part).forward)
        code = getattr(forward, "__code__", None)
        if code is not None and is_users(code.co_filename):
            found.setdefault(id(forward.__globals__), forward.__globals__)
    return list(found.values())


def globals_read(code: CodeType) -> set[str]:
    """Names of the globals that a function reads."""
    return {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def globals_written(code: CodeType) -> set[str]:
    """Names of the globals that a function assigns."""
    return {
        i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    }


def _functions_of(value: Any) -> Iterator[Any]:
    if inspect.isfunction(value):
        yield inspect.unwrap(value)
    elif inspect.isclass(value):
        yield from (f for f in vars(value).values() if inspect.isfunction(f))


def is_users(file: str) -> bool:
    """Whether a source file is neither torch's nor the standard library's."""
    if file.startswith(("<", _TORCH)):
        return False
    return "site-packages" in file or not file.startswith(_STANDARD)


def _stands_for(value: object) -> object:
    if isinstance(value, _SIMPLE):
        return (type(value), value)
    if (
        isinstance(value, torch.Tensor | nn.Module)
        or inspect.ismodule(value)
        or sys.getsizeof(value) > 4096
    ):
        return id(value)
    if isinstance(value, list | tuple) and all(isinstance(v, _SIMPLE) for v in value):
        return (type(value), tuple(value))
    return id(value)
