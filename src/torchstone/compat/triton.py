"""Doors of Triton that it does not document, in 3.6 and 3.7; nothing here needs it to be installed."""

from __future__ import annotations

import importlib
import importlib.util
import io
import linecache
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["compiling", "dumps", "facts", "serves"]

_OPTIONS = ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")


def serves(device: str) -> bool:
    """Whether functions for a device (``cuda``, ``cpu``) may launch Triton kernels in this process."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device == "cuda" or bool(importlib.import_module("triton").knobs.runtime.interpret)


@contextmanager
def compiling() -> Generator[list[Any]]:
    """Within it every launch of a Triton kernel only compiles; gives the kernels compiled, as they come.

    Each is loaded too: what does not fit the device is told here (``OutOfResources``), not at its first
    launch, and registers are known. The product stays in Triton's cache on disk, for any process.
    """
    jit = importlib.import_module("triton.runtime.jit").JITFunction
    interpreted = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    compiled = importlib.import_module("triton.compiler.compiler").CompiledKernel
    found: list[Any] = []

    def compile_only(run: Callable[..., Any]) -> Callable[..., Any]:
        def warm(self: Any, *args: Any, **kwargs: Any) -> Any:
            kernel = run(self, *args, **{**kwargs, "warmup": True})
            if kernel is not None:  # None: interpreted, or compiled by a hook
                kernel._init_handles()
                found.append(kernel)
            return kernel

        return warm

    def no_launch(kernel: Any, grid: Any) -> Callable[..., None]:
        kernel._init_handles()
        found.append(kernel)
        return lambda *args, **kwargs: None

    kept = jit.run, interpreted.run, compiled.__getitem__
    jit.run, interpreted.run = compile_only(jit.run), compile_only(interpreted.run)
    compiled.__getitem__ = no_launch  # a kernel that its caller compiled by `warmup`
    try:
        yield found
    finally:
        jit.run, interpreted.run, compiled.__getitem__ = kept


def facts(kernels: Sequence[Any]) -> dict[str, float]:
    """The most that any kernel takes: ``registers`` and ``spills`` a thread, ``shared_bytes``."""
    if not kernels:
        return {}
    return {
        "registers": float(max(k.n_regs for k in kernels)),
        "spills": float(max(k.n_spills for k in kernels)),
        "shared_bytes": float(max(k.metadata.shared for k in kernels)),
    }


def dumps(value: Any) -> bytes:
    """Cloudpickle, for values that may hold Triton functions, which it cannot take apart.

    :raises Exception: whatever the parts of ``value`` refuse with.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if (kind.__module__, kind.__name__) == ("triton.runtime.jit", "JITFunction"):
                return _reduced(obj)
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _reduced(function: Any) -> tuple[Any, ...]:
    """By name where a module has it, else the Python function with the source that Triton will read."""
    name, plain = function.__module__, function.fn
    import cloudpickle

    by_value = name == "__main__" or name in cloudpickle.list_registry_pickle_by_value()
    if not by_value and getattr(sys.modules.get(name), plain.__name__, None) is function:
        return getattr, (sys.modules[name], plain.__name__)
    options = {option: getattr(function, option) for option in _OPTIONS}
    options |= {"repr": function._repr, "launch_metadata": function.launch_metadata}
    file = plain.__code__.co_filename
    return _jitted, (plain, options, file, linecache.getlines(file))


def _jitted(plain: Any, options: dict[str, Any], file: str, lines: list[str]) -> Any:
    plain.__code__ = plain.__code__.replace(co_filename=file)  # cloudpickle has dropped it
    if not Path(file).exists():  # the cell of a notebook
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    return importlib.import_module("triton").jit(**options)(plain)
