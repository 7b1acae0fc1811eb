"""Finding the line of a key in a TOML text, and naming it in errors."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torchstone.errors import InputError

__all__ = ["blame", "line_in", "line_of", "located"]

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_PATH = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER = re.compile(rf"\s*\[\[?\s*({_PATH})\s*\]\]?\s*(?:#.*)?\Z")
_KEY = re.compile(rf"\s*({_PATH})\s*=")


def line_of(text: str, keys: tuple[str, ...]) -> int | None:
    """The line, 1-based, on which a key is written; that of its nearest table where it is not.

    tomllib keeps no positions, so the text is scanned: table headers and ``key =`` at a line's start.

    :param keys: the path of the key, ``("inputs", "x", "shape")``.
    """
    prefix: tuple[str, ...] = ()
    best: tuple[int, int] | None = None  # (number of keys that match, line)
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            found = prefix = _split(header[1])
        elif key := _KEY.match(line):
            found = prefix + _split(key[1])
        else:
            continue
        common = found[: len(keys)]
        if common == keys[: len(common)] and (best is None or len(common) > best[0]):
            best = (len(common), number)
    return None if best is None else best[1]


def _split(path: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_PART, path))


@contextmanager
def located(path: Path | None, keys: tuple[str, ...]) -> Generator[None, None, None]:
    """Give errors of the user's input the file and line of a key, where they have none yet.

    :param path: the TOML file; None for a workload of Python objects, whose errors stay as they are.
    """
    try:
        yield
    except InputError as error:
        if path is None or error.where is not None:
            raise
        raise _placed(error, str(path), line_in(path, keys)) from error.__cause__


@contextmanager
def blame(function: object) -> Generator[None, None, None]:
    """Give errors of the user's input the file and line of a function, where they have none yet."""
    try:
        yield
    except InputError as error:
        code = getattr(function, "__code__", None)
        if code is None or error.where is not None or not Path(code.co_filename).is_file():
            raise
        raise _placed(error, code.co_filename, code.co_firstlineno) from error.__cause__


def line_in(path: Path, keys: tuple[str, ...]) -> int | None:
    """:func:`line_of` in a file."""
    return line_of(path.read_text(encoding="utf-8"), keys) if path.is_file() else None


def _placed(error: InputError, where: str, line: int | None) -> InputError:
    return type(error)(error.what, where=where, line=line, hint=error.hint)
