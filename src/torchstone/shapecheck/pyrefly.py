"""Pyrefly's tensor-shape checking: https://pyrefly.org, with the stubs of ``pyrefly-torch-stubs``.

It reads code and runs nothing. Without a configuration it reports nothing, and the user's own may switch
its checks off, so that it gets a temporary one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec

from torchstone.errors import TorchstoneError
from torchstone.records import Finding, Place

__all__ = ["INSTALL", "Started", "absent", "findings"]

INSTALL = "pip install 'torchstone[check]'"
_STUBS = "pyrefly-torch-stubs"
_DSL = "Cannot evaluate type-level shape DSL call: "
_SHAPES = re.compile(
    r"shape DSL call|Shape dimension mismatch|[Rr]ank mismatch|IntTuple\[|indices for tensor|"
    r"[Dd]imension .*out of range"
)
"""Words that Pyrefly has in an error on a tensor's shape, and in no other."""


class _Error(msgspec.Struct):
    """One error, as ``pyrefly check --output-format json`` prints it."""

    line: int
    column: int
    stop_line: int
    stop_column: int
    path: str
    name: str
    description: str
    concise_description: str
    severity: str = "error"


class _Answer(msgspec.Struct):
    """All errors."""

    errors: tuple[_Error, ...]


def absent() -> str | None:
    """What is not installed, or None."""
    if _program() is None:
        return "pyrefly is not installed"
    try:
        metadata.version(_STUBS)
    except metadata.PackageNotFoundError:
        return f"{_STUBS} is not installed: without it Pyrefly knows no shapes"
    return None


def _program() -> str | None:
    beside = Path(sysconfig.get_path("scripts")) / "pyrefly"
    return str(beside) if beside.is_file() else shutil.which("pyrefly")


class Started:
    """A check that goes on while something else is done.

    :param files: what to check.
    :param folder: for its configuration and its output.
    """

    def __init__(self, files: Sequence[str], folder: Path) -> None:
        config = folder / "pyrefly.toml"
        roots = dict.fromkeys(str(_root(Path(file).resolve())) for file in files)
        config.write_text(_config(list(roots)), encoding="utf-8")
        program = _program()
        assert program is not None
        self._paths = [str(Path(file).resolve()) for file in files]
        command = [program, "check", "--config", str(config), "--output-format", "json", *self._paths]
        self._output, self._errors = folder / "pyrefly.json", folder / "pyrefly.log"
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
            )

    def errors(self, limit_s: float) -> dict[str, list[Any]]:
        """Wait for its errors, by resolved path.

        :raises TorchstoneError: where it does not end in time, or says something else than errors.
        """
        hint = "go on without it: --checker symbolic"
        try:
            self._process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.close()
            raise TorchstoneError(f"pyrefly took longer than {limit_s:g} s", hint=hint) from None
        try:
            answer = msgspec.json.decode(self._output.read_bytes(), type=_Answer)
        except msgspec.DecodeError as error:
            last = self._errors.read_text(errors="replace").strip().splitlines()[-1:]
            said = last[0].strip() if last else str(error)
            raise TorchstoneError(f"pyrefly gave no answer: {said}", hint=hint) from None
        found: dict[str, list[Any]] = {path: [] for path in self._paths}
        for one in answer.errors:
            found.setdefault(str((self._output.parent / one.path).resolve()), []).append(one)
        return found

    def close(self) -> None:
        """End it; harmless when it has ended."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _root(path: Path) -> Path:
    """The folder that the file's own imports start from."""
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return root


def _config(roots: list[str]) -> str:
    lines = (
        'preset = "default"',
        f"python-interpreter-path = {json.dumps(sys.executable)}",
        f"search-path = {json.dumps(roots)}",
    )
    return "\n".join(lines) + "\n"


def findings(file: str, errors: Sequence[Any], *, everything: bool) -> tuple[Finding, ...]:
    """Pyrefly's errors as findings.

    :param file: the file's name for the user.
    :param errors: what :meth:`Started.errors` gave for it.
    :param everything: also those that are not about shapes.
    """
    found = []
    for one in errors:
        if one.severity != "error":
            continue
        kind: Literal["shape", "type"] = "shape" if _about_shapes(one) else "type"
        if kind == "type" and not everything:
            continue
        found.append(
            Finding(
                kind=kind,
                rule=one.name,
                message=_message(one),
                place=Place(
                    file=file,
                    line=one.line,
                    column=one.column,
                    end_line=one.stop_line,
                    end_column=one.stop_column,
                ),
                proved_by=("pyrefly",),
            )
        )
    return tuple(found)


def _about_shapes(one: _Error) -> bool:
    return bool(_SHAPES.search(one.description))


def _message(one: _Error) -> str:
    """Its words on one line: what it says in short, and the detail on sizes where it gives one."""
    details = [" ".join(line.split()) for line in one.description.splitlines()[1:]]
    about = [line for line in details if _SHAPES.search(line)]
    return ": ".join([one.concise_description, *about[:1]]).replace(_DSL, "")
