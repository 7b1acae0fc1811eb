"""Workers: spawned processes that hold a model, so that a crash, a hang or an OOM is a value.

The main process never runs a model. It starts a :class:`Worker`, which answers *jobs* one at a time: a
job is a module-level function ``f(state, **kwargs)``, named by its dotted path
(``"torchstone.verify.jobs:reference"``); ``state`` is a dict that lives as long as the process.

What may go wrong in a worker, and what the caller sees:

=============================================  ==================================================
the job raises                                 :class:`Crashed` of kind ``exception``; it lives on
it raises our InputError, or says what lacks    the same error, raised at the caller
a signal (segfault, the kernel's OOM killer)   ``Crashed`` of kind ``signal``
``os._exit``                                   ``Crashed`` of kind ``exit``
resident memory over the limit                 killed, ``Crashed`` of kind ``memory``
no answer within ``limit_s``                   killed with all it started, :class:`TimedOut`
the main process dies                          the worker and all it started die by ``SIGIO``
=============================================  ==================================================

A plain ``subprocess`` is used rather than :mod:`multiprocessing`'s spawn, which imports the user's
``__main__`` again and so runs a script without a main guard twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from torchstone import errors, settings
from torchstone.records import Crashed, Record, TimedOut

if TYPE_CHECKING:
    from torchstone.workload import Workload

__all__ = ["Limits", "Worker", "serve", "workload_of"]

_POLL_S = 0.05
_MEMORY_EVERY_S = 0.5  # reading every process of the tree takes milliseconds, of cores that may be timed
_LOG_BYTES = 6000


class Limits(Record, frozen=True, kw_only=True):
    """What a worker may use."""

    memory_bytes: int
    """Resident memory of the process and all that it started."""
    threads: int
    """Intra-op threads."""


class Worker:
    """A process that answers jobs.

    :param name: for the log's file name and for messages.
    :param directory: where its log is kept; made if need be.
    :param workload: file written by :func:`torchstone.workload.dump`, if its jobs need one.
    """

    def __init__(self, name: str, *, directory: Path, workload: Path | None, limits: Limits) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.limits = limits
        self._log = directory / f"{name}.log"
        self._log_start = 0
        self._ended: Crashed | TimedOut | None = None
        parent, child = Pipe()
        lifeline_read, self._lifeline = os.pipe()
        config = {
            "connection": child.fileno(),
            "lifeline": lifeline_read,
            "path": sys.path,
            "workload": None if workload is None else str(workload),
            "threads": limits.threads,
        }
        threads = str(limits.threads)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(child.fileno(), lifeline_read),
                env=settings.child_environment(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads),
                start_new_session=True,
            )
        child.close()
        os.close(lifeline_read)
        self._connection: Connection[Any, Any] = parent

    def call(self, target: str, /, *, stage: str, limit_s: float, **kwargs: object) -> Any:
        """Run a job and wait for what it returns.

        :param target: ``"package.module:function"``.
        :param stage: what to say it was doing if it fails.
        :param limit_s: seconds after which the worker is killed.
        :returns: the job's value, or :class:`Crashed` or :class:`TimedOut`.
        :raises InputError: where the job raised one; likewise :class:`EnvironmentLacksError`.
        """
        if self._ended is not None:
            return self._ended
        started = time.monotonic()
        self._log_start = self._log.stat().st_size
        try:
            self._connection.send((target, kwargs))
            read_memory = started + _MEMORY_EVERY_S
            while not self._connection.poll(_POLL_S):
                if time.monotonic() - started > limit_s:
                    return self._end(TimedOut(stage=stage, limit_s=limit_s, log=self.log_tail()))
                if time.monotonic() < read_memory:
                    continue
                read_memory = time.monotonic() + _MEMORY_EVERY_S
                used = self._resident_bytes()
                if used > self.limits.memory_bytes:
                    text = f"used {used:,} bytes; the limit is {self.limits.memory_bytes:,}"
                    return self._end(Crashed(stage=stage, kind="memory", text=text, log=self.log_tail()))
            kind, payload = self._connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            return self._end(self._post_mortem(stage))
        if kind == "input_error":
            raise _revive(payload)
        if kind == "raised":
            text, trace = payload
            return Crashed(stage=stage, kind="exception", text=text, log=_joined(self.log_tail(), trace))
        return payload

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can take another job."""
        return self._ended is None and self._process.poll() is None

    def log_tail(self) -> str:
        """The last lines that the process printed since its latest job began."""
        with self._log.open("rb") as file:
            file.seek(max(self._log_start, self._log.stat().st_size - _LOG_BYTES))
            return file.read().decode(errors="replace").strip()

    def close(self) -> None:
        """End the process and all that it started; harmless when it has ended."""
        if self._ended is None:
            self._end(Crashed(stage="closed", kind="exit", text="closed", log=""))

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, why: Crashed | TimedOut) -> Crashed | TimedOut:
        self._ended = why
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        lifeline, self._lifeline = self._lifeline, -1  # another thread may end it too
        if lifeline >= 0:
            os.close(lifeline)
        return why

    def _post_mortem(self, stage: str) -> Crashed:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # it closed its connection and lives on
            text = "closed its connection to the main process"
            return Crashed(stage=stage, kind="exit", text=text, log=self.log_tail())
        if code < 0:
            name = signal.Signals(-code).name
            return Crashed(stage=stage, kind="signal", text=f"killed by {name}", log=self.log_tail())
        return Crashed(stage=stage, kind="exit", text=f"exited with code {code}", log=self.log_tail())

    def _resident_bytes(self) -> int:
        total = 0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            total = process.memory_info().rss
            for child in process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    total += child.memory_info().rss
        return total


# The parent's sys.path comes before the first import of ours, so that a source checkout works.
_BOOT = (
    "import sys, json; c = json.loads(sys.argv[1]); sys.path[:] = c['path']; "
    "from torchstone.worker import serve; serve(c)"
)


def serve(config: dict[str, Any]) -> None:
    """Answer jobs until the connection closes; runs in the child process."""
    _die_with_parent(config["lifeline"])
    connection: Connection[Any, Any] = Connection(config["connection"])
    state: dict[str, Any] = {"workload_path": config["workload"], "threads": config["threads"]}
    import torch

    torch.set_num_threads(config["threads"])
    torch.set_grad_enabled(False)
    while True:
        try:
            target, kwargs = connection.recv()
        except EOFError:
            return
        connection.send(_answer(target, state, kwargs))


def workload_of(state: dict[str, Any]) -> Workload:
    """The worker's workload, loaded on first use."""
    if state.get("workload") is None:
        from torchstone import workload

        state["workload"] = workload.load(Path(state["workload_path"]))
    loaded: Workload = state["workload"]
    return loaded


def _answer(target: str, state: dict[str, Any], kwargs: dict[str, Any]) -> tuple[str, Any]:
    try:
        answer = ("returned", _resolve(target)(state, **kwargs))
        pickle.dumps(answer)  # a value that cannot travel fails here, where it can be told
    except (errors.InputError, errors.EnvironmentLacksError) as error:
        parts = (error.what, error.where, error.line, error.hint)
        return "input_error", (type(error).__name__, parts)
    except BaseException as error:  # a candidate may raise anything, SystemExit too
        text = f"{type(error).__name__}: {error}".strip()
        return "raised", (text[:2000], traceback.format_exc()[-_LOG_BYTES:])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return answer


def _resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _revive(payload: tuple[str, tuple[Any, Any, Any, Any]]) -> errors.TorchstoneError:
    name, (what, where, line, hint) = payload
    kind: type[errors.TorchstoneError] = getattr(errors, name, errors.InputError)
    return kind(what, where=where, line=line, hint=hint)


def _joined(log: str, trace: str) -> str:
    return f"{log}\n{trace}".strip()[-_LOG_BYTES:]


def _die_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process group when the parent's end of ``lifeline`` closes.

    Signal-driven I/O needs no thread, so it works while a native call holds the interpreter; the
    default action of SIGIO is to terminate. (PR_SET_PDEATHSIG would fire when the *thread* that
    started the worker ends.)
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
