"""The worker's job: execute files, each in a fork of the worker, which has torch loaded.

A file's own process starts in a millisecond, sees no module of another file, and may crash or hang: that
is told as a finding of the file. torch starts no thread before the first operation, so that forking is
safe here.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from torchstone.errors import InputError, WorkloadError
from torchstone.records import Finding, Place, SymbolicRun
from torchstone.workload.usercode import call, import_file

__all__ = ["run"]


class _Child(NamedTuple):
    """A process that executes one file."""

    number: int
    """Which of the files."""
    pid: int
    """The process."""
    reads: int
    """The end of the pipe that its answer comes out of."""
    until: float
    """When its time is over, by the monotonic clock."""
    answer: bytearray
    """What has come so far."""


def run(
    state: dict[str, Any], *, files: Sequence[str], lanes: int, limit_s_each: float
) -> list[SymbolicRun]:
    """Execute files.

    :param files: paths, as the user gave them.
    :param lanes: how many at a time.
    :param limit_s_each: seconds that one may take.
    :returns: one a file, in order.
    """
    from torchstone.compat import shapecheck as compat

    gc.disable()  # a process of seconds, whose garbage is not worth the search for it
    compat.without_compiler()
    _load_ahead()
    _load_shared(files)
    gc.freeze()  # forks then share these pages
    waiting = list(enumerate(files))
    children: list[_Child] = []
    done: dict[int, SymbolicRun] = {}
    while waiting or children:
        while waiting and len(children) < lanes:
            index, file = waiting.pop(0)
            children.append(_start(index, file, limit_s_each))
        now = time.monotonic()
        patience = max(0.0, min(child.until for child in children) - now)
        ready, _, _ = select.select([child.reads for child in children], [], [], patience)
        for child in list(children):
            ended = child.reads in ready and _read(child)
            if ended or time.monotonic() > child.until:
                children.remove(child)
                done[child.number] = _ended(child, files[child.number], None if ended else limit_s_each)
    return [done[index] for index in range(len(files))]


def _load_ahead() -> None:
    """Import once what every fork needs."""
    import torch

    from torchstone.compat import shapecheck as compat

    importlib.import_module("torchstone.shapecheck.symbolic")
    # what an operation refuses is told as a finding; torch would log each with its whole traceback
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    torch.backends.mha.set_fastpath_enabled(value=False)  # one fused operation that checks no mask
    with compat.fake_mode(compat.Symbols()):
        torch.nn.Linear(1, 1)(torch.empty(1, 1))


def _load_shared(files: Sequence[str]) -> None:
    """Import once what several files import from installed packages, down to the names they ask for."""
    asked = [_imports(Path(file)) for file in files]
    users = Counter(package for one in asked for package in {m.partition(".")[0] for m, _ in one})
    for module, name in sorted(set().union(*asked)):
        package = module.partition(".")[0]
        if users[package] > 1 and _installed(package):
            with contextlib.suppress(InputError):  # told for each file that fails so
                loaded = call(partial(importlib.import_module, module), what=f"importing {module}")
                call(partial(getattr, loaded, name, None), what=f"importing {module}.{name}")


def _imports(path: Path) -> set[tuple[str, str]]:
    """(module, name) of what a file imports at its top."""
    found = set()
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import):
            found |= {(alias.name, "__name__") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {(node.module, alias.name) for alias in node.names}
    return found


def _installed(package: str) -> bool:
    """Whether it is a package of the environment, and not a file or folder of the user's."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    return spec is not None and "site-packages" in (spec.origin or "")


def _start(index: int, file: str, limit_s: float) -> _Child:
    sys.stdout.flush()
    sys.stderr.flush()
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)  # so that all it starts can be ended with it
            os.close(reads)
            answer = msgspec.msgpack.encode(execute(file))
            with open(writes, "wb") as pipe:
                pipe.write(answer)
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writes)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    return _Child(index, pid, reads, time.monotonic() + limit_s, bytearray())


def _read(child: _Child) -> bool:
    """Take what it wrote; True at the end of it."""
    part = os.read(child.reads, 1 << 16)
    child.answer.extend(part)
    return not part


def _ended(child: _Child, file: str, over_s: float | None) -> SymbolicRun:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    os.close(child.reads)
    if over_s is not None:
        return _not_run(file, f"took longer than {over_s:g} s and was ended")
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.msgpack.decode(child.answer, type=SymbolicRun)
    code = os.waitstatus_to_exitcode(status)
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return _not_run(file, f"its process was {how}" if code < 0 else f"its process {how}")


def _not_run(file: str, why: str, line: int | None = None) -> SymbolicRun:
    place = Place(file=file, line=line or 1, end_line=line or 1)
    finding = Finding(
        kind="could-not-run", rule="could-not-run", message=why, place=place, proved_by=("symbolic",)
    )
    return SymbolicRun(findings=(finding,))


def execute(file: str) -> SymbolicRun:
    """Execute one file in this process: all that it says, or shows, how to call."""
    from torchstone.shapecheck import entries, runs, symbolic

    path = Path(file).resolve()
    text = path.read_text(encoding="utf-8")
    try:
        module = _import(path)
        found = entries.targets(module, path, text)
    except InputError as error:
        own = error.where is not None and Path(error.where).resolve() == path
        return _not_run(
            file, error.what if own else str(error).splitlines()[0], error.line if own else None
        )
    if not found:
        return SymbolicRun(
            notes=("nothing to execute: say how with # torchstone: check Net(), x=f32[B, 3]",)
        )
    source = runs.Source(path, file)
    ran = [symbolic.execute(source, target) for target in found]
    failed = {line for one in ran for line in one.failed}
    executed = {line for one in ran for line in one.lines} - failed
    return SymbolicRun(
        entries=tuple(one.entry for one in ran),
        findings=tuple({f.place: f for one in reversed(ran) if (f := one.finding) is not None}.values()),
        executed=tuple(sorted(executed)),
        unreached=_after(text, failed, executed),
    )


def _after(text: str, failed: set[int], executed: set[int]) -> tuple[int, ...]:
    """Lines that come after a failed one in its function, and did not begin."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    found: set[int] = set()
    for line in failed:
        around = [f for f in functions if f.lineno <= line <= (f.end_lineno or line)]
        if around:
            innermost = max(around, key=lambda f: f.lineno)
            found.update(range(line + 1, (innermost.end_lineno or line) + 1))
    return tuple(sorted(found - executed - failed))


def _import(path: Path) -> ModuleType:
    """Import a file; one in a package as a part of it, so that its relative imports work.

    :raises WorkloadError: where it does not compile or raises, with file and line.
    """
    if not (path.parent / "__init__.py").is_file():
        return import_file(path)
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    sys.path.insert(0, str(root))
    module = call(lambda: importlib.import_module(name), what=f"importing {name}", where=path)
    if getattr(module, "__file__", None) is None or Path(module.__file__ or "").resolve() != path:
        raise WorkloadError(f"{name} is another module than {path.name}", where=path)
    return module
