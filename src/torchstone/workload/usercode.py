"""Importing and calling the user's Python, with errors that point at the user's line."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from torchstone.errors import TorchstoneError, WorkloadError

__all__ = ["call", "import_file"]

T = TypeVar("T")
_LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
_PACKAGE = str(Path(__file__).resolve().parents[1])


def import_file(path: Path) -> ModuleType:
    """Import a Python file under a module name of its own, its folder on ``sys.path`` for siblings.

    :raises WorkloadError: where the file does not compile or raises, with file and line.
    """
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = f"torchstone_user_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError("is no Python file", where=path, hint="its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    sys.modules[name] = module  # before it runs: dataclasses and pickle look the module up by name
    try:
        call(lambda: loader.exec_module(module), what=f"importing {path.name}", where=path)
    except TorchstoneError:
        del sys.modules[name]
        raise
    return module


def call(function: Callable[[], T], *, what: str, where: Path | None = None) -> T:
    """Call the user's code; what it raises becomes a WorkloadError at the user's line.

    :param what: what is being done, for the message: ``"model build()"``.
    :param where: the file to name where no frame is the user's.
    :raises WorkloadError: with file and line of the deepest frame of the user's own code.
    """
    try:
        return function()
    except TorchstoneError:
        raise  # the user's code said on purpose what is wrong and what to do
    except SyntaxError as error:
        file = error.filename or (str(where) if where else None)
        raise WorkloadError(
            f"{what} failed: {type(error).__name__}: {error.msg}",
            where=file,
            line=error.lineno,
            hint=f"correct the syntax: {error.text.strip()}" if error.text else "correct the syntax",
        ) from error
    except Exception as error:  # translated, never swallowed: anything can come out of the user's code
        file, line = _user_frame(error, where)
        raise WorkloadError(
            f"{what} failed: {type(error).__name__}: {error}", where=file, line=line, hint=_hint(error)
        ) from error


def _user_frame(error: Exception, where: Path | None) -> tuple[str | None, int | None]:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_LIBRARIES, _PACKAGE, "<frozen"))
    ]
    if not frames:
        return (str(where) if where else None), None
    return frames[-1].filename, frames[-1].lineno


def _hint(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.split(".")[0]
        return (
            f"install it (pip install {top}), or, if {top} is a file of yours, put it beside the "
            "Python file of the workload"
        )
    if isinstance(error, ImportError):
        return "the installed version of that package may be too old or too new"
    if isinstance(error, OSError) and error.filename:
        return f"check that {error.filename} is there; relative paths start at the working directory"
    return "call the function by itself to see its whole traceback; it must work without Torchstone"
