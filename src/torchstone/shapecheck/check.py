"""Both checkers at the same time, and what they found together."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import psutil

from torchstone.errors import EnvironmentLacksError, InputError, WorkloadError
from torchstone.records import CheckReport, Crashed, Prover, SymbolicRun, TimedOut
from torchstone.shapecheck import pyrefly
from torchstone.shapecheck.directive import directives
from torchstone.shapecheck.merge import merge
from torchstone.worker import Limits, Worker
from torchstone.workload.toml import parse, toml_path

__all__ = ["Checker", "check"]

Checker = Literal["pyrefly", "symbolic", "both"]
_START_S = 60.0
"""Seconds that a worker may take to load torch."""


def check(
    files: Sequence[str],
    *,
    checker: Checker = "both",
    everything: bool = False,
    limit_s: float = 30.0,
    lanes: int | None = None,
) -> CheckReport:
    """Check the shapes in Python files; nothing is run on data, and no memory is taken for weights.

    :param files: Python files; a workload's folder or TOML file stands for the file its model is in.
    :param checker: who looks. With ``"both"``, symbolic execution goes on alone, and the report says so,
        where Pyrefly is not installed.
    :param everything: tell also of type errors that are not about shapes.
    :param limit_s: seconds that the execution of one file may take.
    :param lanes: files executed at a time; all cores if None.
    :raises InputError: where a file is not there, or is no Python file.
    :raises EnvironmentLacksError: where Pyrefly is asked for by name and is not installed.
    """
    started = time.monotonic()
    paths = tuple(dict.fromkeys(_checked(file) for file in files))
    lacks = pyrefly.absent() if checker != "symbolic" else None
    if lacks is not None and checker == "pyrefly":
        raise EnvironmentLacksError(lacks, hint=pyrefly.INSTALL)
    reads = checker != "symbolic" and lacks is None
    lanes = lanes or psutil.cpu_count(logical=False) or 1
    with tempfile.TemporaryDirectory(prefix="torchstone-check-") as name:
        folder = Path(name)
        worker = None if checker == "pyrefly" else _worker(folder)
        reading = pyrefly.Started(paths, folder) if reads else None
        try:
            runs = _executed(worker, paths, lanes, limit_s)
            errors = {} if reading is None else reading.errors(limit_s * len(paths))
        finally:
            if reading is not None:
                reading.close()
            if worker is not None:
                worker.close()
    merged = (
        merge(
            path,
            pyrefly.findings(path, errors.get(str(Path(path).resolve()), ()), everything=everything),
            run,
        )
        for path, run in zip(paths, runs, strict=True)
    )
    asked: dict[Prover, bool] = {"pyrefly": reads, "symbolic": worker is not None}
    return CheckReport(
        files=tuple(merged),
        checkers=tuple(name for name, looked in asked.items() if looked),
        seconds=time.monotonic() - started,
        notes=() if lacks is None else (f"{lacks} ({pyrefly.INSTALL})",),
    )


def _checked(file: str) -> str:
    """The Python file that is meant, seen to be one.

    :raises InputError: where it is not.
    """
    path = Path(file)
    if path.is_dir() or path.suffix == ".toml":
        path = _of_workload(path)
        file = str(path)
    if not path.is_file():
        raise InputError("there is no such file", where=file, hint="give Python files")
    if path.suffix not in (".py", ".pyi"):
        raise InputError("is no Python file", where=file, hint="its name must end in .py")
    try:
        compile(path.read_bytes(), file, "exec", dont_inherit=True)
        directives(path, path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise InputError(
            f"syntax: {error.msg}", where=file, line=error.lineno, hint="correct the syntax"
        ) from None
    except ValueError as error:  # not UTF-8, or a null byte
        raise InputError(f"is no Python source: {error}", where=file, hint="save it as UTF-8") from None
    return file


def _of_workload(path: Path) -> Path:
    """The Python file that a workload's model is in."""
    toml = toml_path(path)
    section = parse(toml).get("workload")
    model = section.get("model") if isinstance(section, dict) else None
    if not isinstance(model, str):
        raise WorkloadError("names no model", where=toml, hint="write model = 'file:function'")
    return toml.parent / f"{model.partition(':')[0]}.py"


def _worker(folder: Path) -> Worker:
    limits = Limits(memory_bytes=psutil.virtual_memory().total // 2, threads=1)
    return Worker("check", directory=folder, workload=None, limits=limits)


def _executed(
    worker: Worker | None, paths: Sequence[str], lanes: int, limit_s: float
) -> Sequence[SymbolicRun | None]:
    if worker is None:
        return [None] * len(paths)
    answer: list[SymbolicRun] | Crashed | TimedOut = worker.call(
        "torchstone.shapecheck.jobs:run",
        stage="check",
        limit_s=_START_S + limit_s * len(paths),
        files=paths,
        lanes=lanes,
        limit_s_each=limit_s,
    )
    if isinstance(answer, Crashed | TimedOut):
        why = answer.text if isinstance(answer, Crashed) else f"took longer than {answer.limit_s:g} s"
        return [SymbolicRun(notes=(f"symbolic execution ended: {why}",))] * len(paths)
    return answer
